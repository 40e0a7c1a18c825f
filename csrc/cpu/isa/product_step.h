// One step of the tensor-core rule in exact integers, for every operand (docs/arithmetic.md 4.2): the definition in code.
#pragma once

#include <cstdint>

#include "cpu/isa/bf16.h"

static inline int32_t bf16_exponent(uint32_t bits) {
  const uint32_t field = (bits >> 7) & 0xFF;
  return static_cast<int32_t>(field == 0 ? 1 : field) - 127;
}

static inline uint32_t bf16_significand(uint32_t bits) { return (bits & 0x7F) | ((bits & 0x7F80) != 0 ? 0x80 : 0); }

// `magnitude` * 2^shift, cut toward zero.
static inline int64_t step_shift(uint32_t magnitude, int32_t shift) {
  if (shift >= 0) return static_cast<int64_t>(magnitude) << shift;
  return shift <= -32 ? 0 : static_cast<int64_t>(magnitude >> -shift);
}

// sum * 2^unit as fp32, cut toward zero; an overflow gives infinity, a zero sum +0.
static inline float step_normalise(int64_t sum, int32_t unit) {
  if (sum == 0) return 0.0f;
  const uint32_t sign = sum < 0 ? 0x80000000u : 0;
  const uint64_t magnitude = static_cast<uint64_t>(sum < 0 ? -sum : sum);
  const int32_t top = 63 - __builtin_clzll(magnitude);
  if (top + unit > 127) return bits_float(sign | 0x7F800000u);
  const int32_t lowest = top + unit < -126 ? -149 : top + unit - 23;  // weight of the last bit kept
  const int32_t shift = unit - lowest;
  const uint64_t kept = shift >= 0 ? magnitude << shift : shift <= -64 ? 0 : magnitude >> -shift;
  const uint32_t field = top + unit < -126 ? 0 : static_cast<uint32_t>(top + unit + 126);  // the leading bit adds 1
  return bits_float(sign | ((field << 23) + static_cast<uint32_t>(kept)));
}

// The non-finite part of the rule; false if every term is finite.
static inline bool step_non_finite(float c, const uint16_t *a, const uint16_t *b, float *out) {
  const uint32_t cbits = float_bits(c);
  bool any = (cbits & 0x7F800000u) == 0x7F800000u;
  bool nan = any && (cbits & 0x007FFFFFu) != 0;
  uint32_t signs = any ? 1u << (cbits >> 31) : 0;
  for (int q = 0; q < 16; ++q) {
    const uint32_t x = a[q] & 0x7FFFu, y = b[q] & 0x7FFFu;
    if (x < 0x7F80 && y < 0x7F80) continue;
    any = true;
    nan = nan || x > 0x7F80 || y > 0x7F80 || x == 0 || y == 0;
    signs |= 1u << ((a[q] ^ b[q]) >> 15 & 1);
  }
  if (any) *out = bits_float(nan || signs == 3 ? 0x7FFFFFFFu : signs == 2 ? 0xFF800000u : 0x7F800000u);
  return any;
}

// c after one block of 16 products a[q] * b[q].
static inline float tensor_core_step(float c, const uint16_t *a, const uint16_t *b) {
  float special;
  if (step_non_finite(c, a, b, &special)) return special;
  const int32_t kZeroExponent = -133;
  const uint32_t cbits = float_bits(c);
  const uint32_t cfield = (cbits >> 23) & 0xFF;
  const uint32_t cmagnitude = (cbits & 0x007FFFFFu) | (cfield != 0 ? 0x00800000u : 0);
  const int32_t cexponent = static_cast<int32_t>(cfield == 0 ? 1 : cfield) - 127;
  int32_t largest = cmagnitude == 0 ? kZeroExponent : cexponent;
  uint32_t magnitude[16];
  int32_t exponent[16];
  for (int q = 0; q < 16; ++q) {
    magnitude[q] = bf16_significand(a[q]) * bf16_significand(b[q]);
    exponent[q] = magnitude[q] == 0 ? kZeroExponent : bf16_exponent(a[q]) + bf16_exponent(b[q]);
    largest = exponent[q] > largest ? exponent[q] : largest;
  }
  int64_t sum = step_shift(cmagnitude, 2 + cexponent - largest);
  if ((cbits >> 31) != 0) sum = -sum;
  for (int q = 0; q < 16; ++q) {
    const int64_t term = step_shift(magnitude[q], 11 + exponent[q] - largest);
    sum += ((a[q] ^ b[q]) & 0x8000) != 0 ? -term : term;
  }
  return step_normalise(sum, largest - 25);
}

// The bf16 matrix product rule of docs/arithmetic.md section 4.2 in integer arithmetic, for host and device.
//
// This is the oracle, not a kernel: it is written for reading, one step of the rule after another, and shares nothing with the
// code that it checks. tests and the device probe compare tensor cores and the CPU kernels with it, bit for bit.
#pragma once

#include "common/platform.h"

namespace mok::rule {

constexpr int kBlock = 16;           // products that are summed at once
constexpr int kKeptBits = 25;        // fractional bits kept below the largest exponent
constexpr int kZeroExponent = -133;  // the exponent that a zero term counts with
constexpr uint32_t kCanonicalNan = 0x7FFFFFFF;

// A finite number as sign, significand and exponent: (-1)^negative * significand * 2^(exponent - FRACTION).
// `exponent` is not normalised: a subnormal number keeps -126 and a significand without its leading bit.
struct Term {
  bool negative;
  int32_t exponent;
  uint32_t significand;
};

// A bf16 pattern (7 fraction bits) or fp32 pattern (23) with finite value.
template <int FRACTION>
MOK_HD Term unpack(uint32_t bits) {
  const uint32_t biased = (bits >> FRACTION) & 0xFF;
  const uint32_t fraction = bits & ((1u << FRACTION) - 1);
  const bool negative = ((bits >> (FRACTION + 8)) & 1) != 0;
  if (biased == 0) {
    return Term{negative, -126, fraction};
  }
  return Term{negative, static_cast<int32_t>(biased) - 127, fraction | (1u << FRACTION)};
}

template <int FRACTION>
MOK_HD bool is_nan(uint32_t bits) {
  return ((bits >> FRACTION) & 0xFF) == 0xFF && (bits & ((1u << FRACTION) - 1)) != 0;
}

template <int FRACTION>
MOK_HD bool is_infinite(uint32_t bits) {
  return ((bits >> FRACTION) & 0xFF) == 0xFF && (bits & ((1u << FRACTION) - 1)) == 0;
}

// The term in units of 2^(largest - kKeptBits), cut toward zero (step c).
template <int FRACTION>
MOK_HD int64_t aligned(const Term &term, int32_t largest) {
  const int32_t shift = term.exponent - FRACTION - (largest - kKeptBits);
  int64_t magnitude = 0;
  if (shift >= 0) {
    magnitude = static_cast<int64_t>(term.significand) << shift;  // at most 2^27: shift is bounded by kKeptBits - FRACTION
  } else if (shift > -32) {
    magnitude = static_cast<int64_t>(term.significand >> -shift);
  }
  return term.negative ? -magnitude : magnitude;
}

// sum * 2^(largest - kKeptBits), normalised and cut toward zero to an fp32 pattern (step e).
MOK_HD uint32_t rounded_toward_zero(int64_t sum, int32_t largest) {
  if (sum == 0) {
    return 0;
  }
  const uint32_t sign = sum < 0 ? 0x80000000u : 0u;
  const uint64_t magnitude = static_cast<uint64_t>(sum < 0 ? -sum : sum);
  int32_t top = 63;
  while ((magnitude >> top) == 0) {
    --top;
  }
  const int32_t exponent = top + largest - kKeptBits;
  if (exponent > 127) {
    return sign | 0x7F800000u;
  }
  // The last bit kept is worth 2^(exponent - 23), but never less than the smallest subnormal, 2^-149.
  const int32_t last = exponent - 23 > -149 ? exponent - 23 : -149;
  const int32_t shift = largest - kKeptBits - last;
  const uint32_t kept = static_cast<uint32_t>(shift >= 0 ? magnitude << shift : magnitude >> -shift);
  if (exponent < -126) {
    return sign | kept;
  }
  return sign | (static_cast<uint32_t>(exponent + 127) << 23) | (kept & 0x7FFFFFu);
}

// What infinities and NaN make of a block: true if they decide it, with the pattern in `out`.
MOK_HD bool special_block(uint32_t c, const uint16_t *a, const uint16_t *b, uint32_t &out) {
  bool nan = is_nan<23>(c);
  bool plus = c == 0x7F800000u;
  bool minus = c == 0xFF800000u;
  for (int i = 0; i < kBlock; ++i) {
    const bool infinite = is_infinite<7>(a[i]) || is_infinite<7>(b[i]);
    const bool zero = (a[i] & 0x7FFF) == 0 || (b[i] & 0x7FFF) == 0;
    const bool negative = ((a[i] ^ b[i]) & 0x8000) != 0;
    nan = nan || is_nan<7>(a[i]) || is_nan<7>(b[i]) || (infinite && zero);
    plus = plus || (infinite && !negative);
    minus = minus || (infinite && negative);
  }
  if (nan || (plus && minus)) {
    out = kCanonicalNan;
    return true;
  }
  out = plus ? 0x7F800000u : 0xFF800000u;
  return plus || minus;
}

// One step of the chain: accumulator pattern c, 16 products a[i] * b[i] of bf16 patterns. Returns the new accumulator pattern.
MOK_HD uint32_t block(uint32_t c, const uint16_t *a, const uint16_t *b) {
  uint32_t special = 0;
  if (special_block(c, a, b, special)) {
    return special;
  }
  Term products[kBlock];
  const Term start = unpack<23>(c);
  int32_t largest = start.significand == 0 ? kZeroExponent : start.exponent;
  for (int i = 0; i < kBlock; ++i) {
    const Term x = unpack<7>(a[i]);
    const Term y = unpack<7>(b[i]);
    products[i] = Term{x.negative != y.negative, x.exponent + y.exponent, x.significand * y.significand};
    const int32_t exponent = products[i].significand == 0 ? kZeroExponent : products[i].exponent;
    largest = exponent > largest ? exponent : largest;
  }
  int64_t sum = aligned<23>(start, largest);
  for (const Term &product : products) {
    sum += aligned<14>(product, largest);
  }
  return rounded_toward_zero(sum, largest);
}

// A whole chain: k products in blocks of 16 from `initial`, the last block padded with +0, then + 0.0f (section 4.3).
// a(i) and b(i) give the bf16 patterns of position i.
template <class A, class B>
MOK_HD uint32_t chain(uint32_t initial, int64_t k, const A &a, const B &b) {
  uint32_t accumulator = initial;
  for (int64_t first = 0; first < k; first += kBlock) {
    uint16_t left[kBlock];
    uint16_t right[kBlock];
    for (int i = 0; i < kBlock; ++i) {
      left[i] = first + i < k ? a(first + i) : uint16_t{0};
      right[i] = first + i < k ? b(first + i) : uint16_t{0};
    }
    accumulator = block(accumulator, left, right);
  }
  if (is_nan<23>(accumulator)) {
    return kCanonicalNan;
  }
  return accumulator == 0x80000000u ? 0u : accumulator;
}

}  // namespace mok::rule

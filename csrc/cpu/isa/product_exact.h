// Precision bf16, the careful way: one step of the tensor-core rule (docs/arithmetic.md 4.2) for 16 columns in integers, for every
// operand. The portable code is nothing else; the vector code falls back on it where its window does not reach.
#pragma once

#include "cpu/isa/product_operand.h"

namespace MOK_ISA_NS {
namespace {

constexpr int kStep = 16;           // products of a block
constexpr int32_t kZeroTerm = -133;  // the exponent of a term that is zero

// Sixteen bf16 numbers held as fp32, apart: |x| = significand * 2^(exponent - 7), sign 0 or -1; significand 0 where x is zero.
struct alignas(64) Parts {
  int32_t significand[kStep], exponent[kStep], sign[kStep];
};

void split(const float *x, float scale, Parts *out) {
  for (int j = 0; j < kStep; ++j) {
    const uint32_t bits = mok::f32::bits(x[j] * scale);
    const int32_t field = static_cast<int32_t>((bits >> 23) & 0xFF);
    out->significand[j] = static_cast<int32_t>((bits >> 16) & 0x7F) | (field != 0 ? 0x80 : 0);
    out->exponent[j] = (field != 0 ? field : 1) - 127;
    out->sign[j] = static_cast<int32_t>(bits) >> 31;
  }
}

// magnitude * 2^shift, cut toward zero, shift at most 11: both shifts give 0 for a count of 32 and more.
int32_t shifted(int32_t magnitude, int32_t shift) {
  const uint32_t left = shift > 0 ? static_cast<uint32_t>(shift) : 0, right = shift < 0 ? static_cast<uint32_t>(-shift) : 0;
  return static_cast<int32_t>((static_cast<uint32_t>(magnitude) << left) >> (right < 31 ? right : 31));
}

// (first + second) * 2^unit as fp32, cut toward zero: subnormals kept, infinity beyond the range, +0 for a sum of zero.
float cut_to_float(int32_t first, int32_t second, int32_t unit) {
  const double value = (static_cast<double>(first) + static_cast<double>(second)) *
                       mok::f64::from_bits(static_cast<uint64_t>(static_cast<int64_t>(unit) + 1023) << 52);
  const uint64_t bits = mok::f64::bits(value);
  const int64_t field = static_cast<int64_t>((bits >> 52) & 0x7FF);
  const int64_t below = 1023 - 126 - field;  // > 0: subnormal as fp32, so many bits less
  const int64_t cleared = 29 + (below > 0 ? below : 0);
  const uint64_t kept = cleared > 52 ? 0 : bits >> cleared << cleared;
  return static_cast<float>(mok::f64::from_bits(kept));
}

// What infinities and NaN make of one element, if there are any: *out is written then.
bool special_step(float c, const float *a, const float *b, int64_t b_stride, float *out) {
  bool nan = c != c, plus = false, minus = false;
  if (!mok::f32::finite(c)) (c > 0 ? plus : minus) = true;
  for (int p = 0; p < kStep; ++p) {
    const float x = a[p], y = b[p * b_stride];
    if (mok::f32::finite(x) && mok::f32::finite(y)) continue;
    const float product = x * y;  // infinite or NaN
    nan = nan || product != product;
    (product > 0 ? plus : minus) = true;
  }
  if (!nan && !plus && !minus) return false;
  *out = nan || (plus && minus) ? mok::f32::nan() : plus ? mok::f32::infinity() : -mok::f32::infinity();
  return true;
}

// The accumulators c[16], all values finite, after 16 products a[p] * b[p * b_stride + j] whose scaled values are given:
// a[p] * a_scale and b[..] * b_scale are the bf16 numbers.
void finite_step(const float *a, float a_scale, const float *b, int64_t b_stride, float b_scale, float *c) {
  alignas(64) int32_t magnitude[kStep][kStep], exponent[kStep][kStep], sign[kStep][kStep];
  alignas(64) int32_t largest[kStep], first[kStep], second[kStep] = {};
  Parts x, y;
  split(a, a_scale, &x);
  alignas(64) int32_t c_magnitude[kStep], c_exponent[kStep], c_sign[kStep];
  for (int j = 0; j < kStep; ++j) {
    const uint32_t bits = mok::f32::bits(c[j]);
    const int32_t field = static_cast<int32_t>((bits >> 23) & 0xFF);
    c_magnitude[j] = static_cast<int32_t>(bits & 0x007FFFFF) | (field != 0 ? 0x00800000 : 0);
    c_exponent[j] = (field != 0 ? field : 1) - 127;
    c_sign[j] = static_cast<int32_t>(bits) >> 31;
    largest[j] = c_magnitude[j] != 0 ? c_exponent[j] : kZeroTerm;
  }
  for (int p = 0; p < kStep; ++p) {
    split(b + p * b_stride, b_scale, &y);
    const int32_t significand = x.significand[p], power = x.exponent[p], negative = x.sign[p];
    for (int j = 0; j < kStep; ++j) {
      magnitude[p][j] = significand * y.significand[j];
      exponent[p][j] = power + y.exponent[j];
      sign[p][j] = negative ^ y.sign[j];
      const int32_t counted = magnitude[p][j] != 0 ? exponent[p][j] : kZeroTerm;
      largest[j] = counted > largest[j] ? counted : largest[j];
    }
  }
  for (int j = 0; j < kStep; ++j) first[j] = (shifted(c_magnitude[j], c_exponent[j] - largest[j] + 2) ^ c_sign[j]) - c_sign[j];
  for (int p = 0; p < kStep; ++p) {  // two sums: each less than 2^31
    int32_t *const sum = p < kStep / 2 ? first : second;
    for (int j = 0; j < kStep; ++j) sum[j] += (shifted(magnitude[p][j], exponent[p][j] - largest[j] + 11) ^ sign[p][j]) - sign[p][j];
  }
  for (int j = 0; j < kStep; ++j) c[j] = cut_to_float(first[j], second[j], largest[j] - 25);
}

bool all_finite(const float *x, int64_t count) {
  uint32_t worst = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = mok::f32::bits(x[i]) & 0x7FFFFFFFu;
    worst = magnitude > worst ? magnitude : worst;
  }
  return worst < 0x7F800000u;
}

// As finite_step, for any values.
void exact_step(const float *a, float a_scale, const float *b, int64_t b_stride, float b_scale, float *c) {
  bool finite = all_finite(c, kStep) && all_finite(a, kStep);
  for (int p = 0; p < kStep && finite; ++p) finite = all_finite(b + p * b_stride, kStep);
  if (finite) return finite_step(a, a_scale, b, b_stride, b_scale, c);
  alignas(64) float special[kStep], finite_c[kStep], finite_a[kStep], finite_b[kStep][kStep];
  bool decided[kStep], any_left = false;
  for (int j = 0; j < kStep; ++j) {
    decided[j] = special_step(c[j], a, b + j, b_stride, &special[j]);
    any_left = any_left || !decided[j];
  }
  if (any_left) {  // columns without a special value, beside columns with one: the latter's values don't matter
    for (int j = 0; j < kStep; ++j) finite_c[j] = decided[j] ? 0.0f : c[j];
    for (int p = 0; p < kStep; ++p) {
      finite_a[p] = mok::f32::finite(a[p]) ? a[p] : 0.0f;
      for (int j = 0; j < kStep; ++j) finite_b[p][j] = decided[j] ? 0.0f : b[p * b_stride + j];
    }
    finite_step(finite_a, a_scale, finite_b[0], kStep, b_scale, finite_c);
  }
  for (int j = 0; j < kStep; ++j) c[j] = decided[j] ? special[j] : finite_c[j];
}

}  // namespace
}  // namespace MOK_ISA_NS

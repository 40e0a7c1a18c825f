// Precision bf16, the careful way: one step of the tensor-core rule (docs/arithmetic.md 4.2) for 16 columns in integers, for
// every operand. The portable code is nothing else; the vector code falls back on it where its window does not reach.
#pragma once

#include "cpu/isa/product_lanes.h"
#include "cpu/isa/product_operand.h"

namespace MOK_ISA_NS {
namespace {

constexpr int kStep = 16;            // products of a block
constexpr int32_t kZeroTerm = -133;  // the exponent of a term that is zero

// int32 in the vectors of the instruction set; arithmetic is the compiler's.
typedef int32_t Lanes __attribute__((vector_size(4 * kLanes)));

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

// A bf16 number: |x| = significand * 2^(exponent - 7); sign 0 or -1.
struct Part {
  int32_t significand, exponent, sign;
};

Part split(float x) {
  const uint32_t bits = mok::f32::bits(x), field = bits >> 23 & 0xFF;
  return {static_cast<int32_t>((bits >> 16 & 0x7F) | (field == 0 ? 0 : 0x80)), static_cast<int32_t>(field == 0 ? 1 : field) - 127,
          static_cast<int32_t>(bits) >> 31};
}

// *sum += magnitude * 2^(exponent - largest), cut toward zero, with its sign. Shifting by more than 31 gives 0, as 31 does; the
// exponent of a zero may be above `largest`.
MOK_HD void add_aligned(Lanes magnitude, Lanes exponent, Lanes sign, Lanes largest, Lanes *sum) {
  Lanes count = largest - exponent;
  count = count > 31 ? count * 0 + 31 : count;
  count = count < 0 ? count * 0 : count;
  *sum += ((magnitude >> count) ^ sign) - sign;
}

// As finite_step for kLanes columns.
void finite_lanes(const Part *a, const float *b, int64_t b_stride, float b_scale, float *c) {
  Lanes magnitude[kStep], exponent[kStep], sign[kStep];  // of products: magnitude * 2^(exponent - 25)
  Lanes bits, field;
  memcpy(&bits, c, sizeof bits);
  field = bits >> 23 & 0xFF;
  const Lanes none = field * 0, c_sign = bits >> 31, c_exponent = (field == 0 ? none + 1 : field) - 127;
  const Lanes c_magnitude = ((bits & 0x007FFFFF) | (field == 0 ? none : none + 0x00800000)) << 2;
  Lanes largest = c_magnitude == 0 ? none + kZeroTerm : c_exponent;
  for (int p = 0; p < kStep; ++p) {
    float y[kLanes];
    for (int j = 0; j < kLanes; ++j) y[j] = b[p * b_stride + j] * b_scale;
    memcpy(&bits, y, sizeof bits);
    field = bits >> 23 & 0xFF;
    magnitude[p] = ((bits >> 16 & 0x7F) | (field == 0 ? none : none + 0x80)) * (a[p].significand << 11);
    exponent[p] = (field == 0 ? none + 1 : field) + (a[p].exponent - 127);
    sign[p] = bits >> 31 ^ a[p].sign;
    const Lanes counted = magnitude[p] == 0 ? none + kZeroTerm : exponent[p];
    largest = counted > largest ? counted : largest;
  }
  Lanes first = none, second = none;  // two sums: each less than 2^31
  add_aligned(c_magnitude, c_exponent, c_sign, largest, &first);
  for (int p = 0; p < kStep / 2; ++p) add_aligned(magnitude[p], exponent[p], sign[p], largest, &first);
  for (int p = kStep / 2; p < kStep; ++p) add_aligned(magnitude[p], exponent[p], sign[p], largest, &second);
  int32_t sums[3][kLanes];
  memcpy(sums[0], &first, sizeof first);
  memcpy(sums[1], &second, sizeof second);
  memcpy(sums[2], &largest, sizeof largest);
  for (int j = 0; j < kLanes; ++j) c[j] = cut_to_float(sums[0][j], sums[1][j], sums[2][j] - 25);
}

// The accumulators c[16], all values finite, after 16 products a[p] * b[p * b_stride + j] whose scaled values are given:
// a[p] * a_scale and b[..] * b_scale are the bf16 numbers.
void finite_step(const float *a, float a_scale, const float *b, int64_t b_stride, float b_scale, float *c) {
  Part parts[kStep];
  for (int p = 0; p < kStep; ++p) parts[p] = split(a[p] * a_scale);
  for (int j = 0; j < kStep; j += kLanes) finite_lanes(parts, b + j, b_stride, b_scale, c + j);
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

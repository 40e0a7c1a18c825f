// What the attention kernels share (docs/arithmetic.md section 9).
#pragma once

#include "common/functions.h"

namespace mok::cuda {

// c = scale * log2e, which turns dots into exponents of two.
inline float exponent_scale(float scale) { return f32::mul(scale, f32::from_bits(0x3FB8AA3Bu)); }

// exp2(dot * c - shift), +0 below 2^-126; the exponent is at most 0 and an error of rounding. A NaN stays one.
__device__ __forceinline__ float probability(float dot, float c, float shift) {
  const float t = f32::fma(dot, c, -shift);
  const float rest = t < -126.0f ? 0.0f : f32::nan();
  const float value = f32::exp2_normal(t);
  return t >= -126.0f ? value : rest;
}

}  // namespace mok::cuda

// What host and device share: one qualifier and the IEEE-754 operations that everything else is written in.
//
// Plain operators on the host (compile with -ffp-contract=off -fno-fast-math), the _rn intrinsics on the device, so that neither
// compiler nor ptxas contracts or approximates. Everything is static: no symbol leaves a translation unit.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define MOK_HD static __host__ __device__ __forceinline__
#else
#define MOK_HD static inline __attribute__((always_inline))
#endif

namespace mok {

namespace f32 {

#if defined(__CUDA_ARCH__)
MOK_HD float add(float a, float b) { return __fadd_rn(a, b); }
MOK_HD float sub(float a, float b) { return __fsub_rn(a, b); }
MOK_HD float mul(float a, float b) { return __fmul_rn(a, b); }
MOK_HD float div(float a, float b) { return __fdiv_rn(a, b); }
MOK_HD float root(float a) { return __fsqrt_rn(a); }
MOK_HD float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
MOK_HD uint32_t bits(float a) { return __float_as_uint(a); }
MOK_HD float from_bits(uint32_t a) { return __uint_as_float(a); }
#else
MOK_HD float add(float a, float b) { return a + b; }
MOK_HD float sub(float a, float b) { return a - b; }
MOK_HD float mul(float a, float b) { return a * b; }
MOK_HD float div(float a, float b) { return a / b; }
MOK_HD float root(float a) { return __builtin_sqrtf(a); }
MOK_HD float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
MOK_HD uint32_t bits(float a) {
  uint32_t result;
  __builtin_memcpy(&result, &a, sizeof result);
  return result;
}
MOK_HD float from_bits(uint32_t a) {
  float result;
  __builtin_memcpy(&result, &a, sizeof result);
  return result;
}
#endif

MOK_HD float infinity() { return from_bits(0x7F800000u); }
MOK_HD float nan() { return from_bits(0x7FFFFFFFu); }
MOK_HD float canonical(float a) { return a == a ? a : nan(); }  // 2.3: the only NaN that an operator writes
MOK_HD float absolute(float a) { return from_bits(bits(a) & 0x7FFFFFFFu); }
MOK_HD bool finite(float a) { return (bits(a) & 0x7F800000u) != 0x7F800000u; }

}  // namespace f32

namespace f64 {

#if defined(__CUDA_ARCH__)
MOK_HD double add(double a, double b) { return __dadd_rn(a, b); }
MOK_HD double sub(double a, double b) { return __dsub_rn(a, b); }
MOK_HD double mul(double a, double b) { return __dmul_rn(a, b); }
MOK_HD double div(double a, double b) { return __ddiv_rn(a, b); }
MOK_HD double root(double a) { return __dsqrt_rn(a); }
MOK_HD double fma(double a, double b, double c) { return __fma_rn(a, b, c); }
MOK_HD uint64_t bits(double a) { return static_cast<uint64_t>(__double_as_longlong(a)); }
MOK_HD double from_bits(uint64_t a) { return __longlong_as_double(static_cast<long long>(a)); }
#else
MOK_HD double add(double a, double b) { return a + b; }
MOK_HD double sub(double a, double b) { return a - b; }
MOK_HD double mul(double a, double b) { return a * b; }
MOK_HD double div(double a, double b) { return a / b; }
MOK_HD double root(double a) { return __builtin_sqrt(a); }
MOK_HD double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
MOK_HD uint64_t bits(double a) {
  uint64_t result;
  __builtin_memcpy(&result, &a, sizeof result);
  return result;
}
MOK_HD double from_bits(uint64_t a) {
  double result;
  __builtin_memcpy(&result, &a, sizeof result);
  return result;
}
#endif

MOK_HD double infinity() { return from_bits(0x7FF0000000000000u); }
MOK_HD double nan() { return from_bits(0x7FFFFFFFFFFFFFFFu); }
MOK_HD double absolute(double a) { return from_bits(bits(a) & 0x7FFFFFFFFFFFFFFFu); }

}  // namespace f64

}  // namespace mok

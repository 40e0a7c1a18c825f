// The elementary functions of docs/arithmetic.md section 3 and appendix A (algorithms, error bounds, special values).
//
// IEEE operations only, one fixed sequence each, no branch on the main paths: compilers vectorise loops over them, and every
// machine gives the same bits. A NaN result is 0x7FFFFFFF.
#pragma once

#include "common/platform.h"

namespace mok {

namespace f32 {

// Adding and subtracting it rounds to an integer, nearest even, for |a| <= 2^22; the low bits of the sum are that integer.
constexpr float kRounder = 0x1.8p+23f;
constexpr uint32_t kRounderBits = 0x4B400000u;

// p * 2^n for n in [-252, 254], rounded once (p is near 1: only the second product can be subnormal or overflow).
MOK_HD float scale(float p, int32_t n) {
  const int32_t half = n >> 1;
  const float first = from_bits(static_cast<uint32_t>(half + 127) << 23);
  const float second = from_bits(static_cast<uint32_t>(n - half + 127) << 23);
  return mul(mul(p, first), second);
}

// 2^f for |f| <= 1/2.
MOK_HD float exp2_fraction(float f) {
  float q = fma(f, 0x1.406dbap-13f, 0x1.5eda3ap-10f);
  q = fma(f, q, 0x1.3b2d98p-7f);
  q = fma(f, q, 0x1.c6afdcp-5f);
  q = fma(f, q, 0x1.ebfbe0p-3f);
  q = fma(f, q, 0x1.62e430p-1f);
  return fma(f, q, 1.0f);
}

MOK_HD float exp2(float x) {
  const float upper = x < 129.0f ? x : 129.0f;
  const float y = upper > -151.0f ? upper : -151.0f;
  const float k = add(y, kRounder);
  const float p = exp2_fraction(sub(y, sub(k, kRounder)));
  const float value = scale(p, static_cast<int32_t>(bits(k) - kRounderBits));
  return x == x ? value : nan();
}

// The bits of exp2(x) where -126 <= x <= 127; anything elsewhere. For callers that mask the rest (attention).
MOK_HD float exp2_normal(float x) {
  const float k = add(x, kRounder);
  const float p = exp2_fraction(sub(x, sub(k, kRounder)));
  return from_bits(bits(p) + ((bits(k) - kRounderBits) << 23));
}

MOK_HD float exp(float x) {
  const float upper = x < 89.0f ? x : 89.0f;
  const float y = upper > -104.0f ? upper : -104.0f;
  const float k = fma(y, 0x1.715476p+0f, kRounder);  // log2(e)
  const float n = sub(k, kRounder);
  float r = fma(n, -0x1.62e430p-1f, y);  // ln 2, high part: exact
  r = fma(n, 0x1.05c610p-29f, r);        // ln 2, low part
  float q = fma(r, 0x1.6ac744p-10f, 0x1.123de0p-7f);
  q = fma(r, q, 0x1.555858p-5f);
  q = fma(r, q, 0x1.55548cp-3f);
  q = fma(r, q, 0x1.fffffcp-2f);
  const float high = add(1.0f, r);
  const float low = sub(r, sub(high, 1.0f));
  const float p = add(high, fma(mul(r, r), q, low));
  const float value = scale(p, static_cast<int32_t>(bits(k) - kRounderBits));
  return x == x ? value : nan();
}

MOK_HD float log(float x) {
  const bool subnormal = x < 0x1p-126f;
  const float y = subnormal ? mul(x, 0x1p+23f) : x;
  // y = m * 2^k with m in [sqrt(1/2), sqrt(2))
  const int32_t k = static_cast<int32_t>(bits(y) - 0x3F3504F3u) >> 23;
  const float m = from_bits(bits(y) - (static_cast<uint32_t>(k) << 23));
  const float n = static_cast<float>(subnormal ? k - 23 : k);
  const float f = sub(m, 1.0f);
  float q = fma(f, 0x1.1c9a36p-4f, -0x1.e49bb0p-4f);
  q = fma(f, q, 0x1.e67408p-4f);
  q = fma(f, q, -0x1.fadd0cp-4f);
  q = fma(f, q, 0x1.2327c8p-3f);
  q = fma(f, q, -0x1.55664cp-3f);
  q = fma(f, q, 0x1.99a626p-3f);
  q = fma(f, q, -0x1.ffffe0p-3f);
  q = fma(f, q, 0x1.555544p-2f);
  q = fma(f, q, -0.5f);
  const float tail = fma(n, 0x1.0bfbe8p-15f, mul(mul(f, f), q));  // ln 2, low part
  const float whole = mul(n, 0x1.62e000p-1f);                     // ln 2, high part: an exact product
  const float high = add(whole, f);
  const float low = sub(f, sub(high, whole));
  const float value = add(high, add(low, tail));
  const float positive = x == infinity() ? x : value;
  return x > 0.0f ? positive : (x == 0.0f ? -infinity() : nan());
}

MOK_HD float sqrt(float x) { return canonical(root(x)); }
MOK_HD float recip(float x) { return canonical(div(1.0f, x)); }
MOK_HD float rsqrt(float x) { return canonical(div(1.0f, root(x))); }

MOK_HD float sigmoid(float x) {
  const float e = exp(-absolute(x));
  return canonical(div(x < 0.0f ? e : 1.0f, add(1.0f, e)));
}

MOK_HD float silu(float x) { return canonical(mul(x, sigmoid(x))); }

MOK_HD float silu_grad(float x) {
  const float s = sigmoid(x);
  return canonical(mul(s, fma(x, sub(1.0f, s), 1.0f)));
}

}  // namespace f32

namespace f64 {

constexpr double kRounder = 0x1.8p+52;  // as above, for |a| <= 2^51
constexpr double kPiHalf = 0x1.921fb54442d18p+0;
constexpr double kPiHalfLow = 0x1.1a62633145c07p-54;
constexpr double kTwoOverPi = 0x1.45f306dc9c883p-1;
constexpr double kTwoPi = 0x1.921fb54442d18p+2;
constexpr double kCircleMax = 0x1p+31;  // sin and cos are defined for |x| <= 2^31

// Taylor series; each coefficient is the quotient of exact integers rounded once.
MOK_HD double exp(double x) {
  const double upper = x < 710.0 ? x : 710.0;
  const double y = upper > -746.0 ? upper : -746.0;
  const double k = fma(y, 0x1.71547652b82fep+0, kRounder);  // log2(e)
  const double n = sub(k, kRounder);
  double r = fma(n, -0x1.62e42fefa39efp-1, y);  // ln 2, high part: exact
  r = fma(n, -0x1.abc9e3b39803fp-56, r);        // ln 2, low part
  double q = fma(r, 1.0 / 6227020800.0, 1.0 / 479001600.0);
  q = fma(r, q, 1.0 / 39916800.0);
  q = fma(r, q, 1.0 / 3628800.0);
  q = fma(r, q, 1.0 / 362880.0);
  q = fma(r, q, 1.0 / 40320.0);
  q = fma(r, q, 1.0 / 5040.0);
  q = fma(r, q, 1.0 / 720.0);
  q = fma(r, q, 1.0 / 120.0);
  q = fma(r, q, 1.0 / 24.0);
  q = fma(r, q, 1.0 / 6.0);
  q = fma(r, q, 0.5);
  const double p = add(1.0, fma(mul(r, r), q, r));
  const int64_t whole = static_cast<int64_t>(bits(k) - bits(kRounder));
  const int64_t half = whole >> 1;
  const double first = from_bits(static_cast<uint64_t>(half + 1023) << 52);
  const double second = from_bits(static_cast<uint64_t>(whole - half + 1023) << 52);
  const double value = mul(mul(p, first), second);
  return x == x ? value : nan();
}

// log(m) = 2 atanh(s) with s = (m - 1)/(m + 1), as f - (f^2/2 - s (f^2/2 + R(s^2))), f = m - 1, R(z) = 2 (z/3 + z^2/5 + ...).
MOK_HD double log(double x) {
  const bool subnormal = x < 0x1p-1022;
  const double y = subnormal ? mul(x, 0x1p+52) : x;
  const int64_t k = static_cast<int64_t>(bits(y) - 0x3FE6A09E667F3BCDu) >> 52;
  const double m = from_bits(bits(y) - (static_cast<uint64_t>(k) << 52));
  const double n = static_cast<double>(subnormal ? k - 52 : k);
  const double f = sub(m, 1.0);
  const double s = div(f, add(m, 1.0));
  const double z = mul(s, s);
  double q = fma(z, 2.0 / 25.0, 2.0 / 23.0);
  q = fma(z, q, 2.0 / 21.0);
  q = fma(z, q, 2.0 / 19.0);
  q = fma(z, q, 2.0 / 17.0);
  q = fma(z, q, 2.0 / 15.0);
  q = fma(z, q, 2.0 / 13.0);
  q = fma(z, q, 2.0 / 11.0);
  q = fma(z, q, 2.0 / 9.0);
  q = fma(z, q, 2.0 / 7.0);
  q = fma(z, q, 2.0 / 5.0);
  q = fma(z, q, 2.0 / 3.0);
  const double square = mul(0.5, mul(f, f));
  const double low = fma(s, fma(z, q, square), mul(n, 0x1.ef35793c76730p-45));  // ln 2, low part
  const double whole = mul(n, 0x1.62e42fefa3800p-1);                            // ln 2, high part: an exact product
  const double value = add(whole, sub(f, sub(square, low)));
  const double positive = x == infinity() ? x : value;
  return x > 0.0 ? positive : (x == 0.0 ? -infinity() : nan());
}

MOK_HD double pow(double x, double y) { return exp(mul(y, log(x))); }

// |r| <= pi/4 and a little more.
MOK_HD double sin_kernel(double r) {
  const double z = mul(r, r);
  double q = fma(z, 1.0 / 355687428096000.0, -1.0 / 1307674368000.0);
  q = fma(z, q, 1.0 / 6227020800.0);
  q = fma(z, q, -1.0 / 39916800.0);
  q = fma(z, q, 1.0 / 362880.0);
  q = fma(z, q, -1.0 / 5040.0);
  q = fma(z, q, 1.0 / 120.0);
  q = fma(z, q, -1.0 / 6.0);
  return fma(mul(r, z), q, r);
}

MOK_HD double cos_kernel(double r) {
  const double z = mul(r, r);
  double q = fma(z, 1.0 / 20922789888000.0, -1.0 / 87178291200.0);
  q = fma(z, q, 1.0 / 479001600.0);
  q = fma(z, q, -1.0 / 3628800.0);
  q = fma(z, q, 1.0 / 40320.0);
  q = fma(z, q, -1.0 / 720.0);
  q = fma(z, q, 1.0 / 24.0);
  q = fma(z, q, -0.5);
  return fma(z, q, 1.0);
}

// sin(r + quarter * pi/2)
MOK_HD double sin_of_quarter(double r, uint32_t quarter) {
  const double value = (quarter & 1u) ? cos_kernel(r) : sin_kernel(r);
  return from_bits(bits(value) ^ (static_cast<uint64_t>(quarter & 2u) << 62));
}

// |x| = quarter * pi/2 + r
MOK_HD double reduce(double x, uint32_t *quarter) {
  const double k = fma(absolute(x), kTwoOverPi, kRounder);
  const double n = sub(k, kRounder);
  *quarter = static_cast<uint32_t>(bits(k));
  return fma(n, -kPiHalfLow, fma(n, -kPiHalf, absolute(x)));  // the inner one is exact
}

MOK_HD double sin(double x) {
  uint32_t quarter;
  const double r = reduce(x, &quarter);
  const double value = sin_of_quarter(r, quarter + (x < 0.0 ? 2u : 0u));
  return absolute(x) <= kCircleMax ? (x == 0.0 ? x : value) : nan();
}

MOK_HD double cos(double x) {
  uint32_t quarter;
  const double r = reduce(x, &quarter);
  const double value = sin_of_quarter(r, quarter + 1u);
  return absolute(x) <= kCircleMax ? value : nan();
}

}  // namespace f64

namespace f32 {

// |x| = quarter * pi/2 + r for finite |x| >= 1/2, from the bits of 2/pi that matter: |x| = m 2^e, and m times the 96 bits of
// 2^e 2/pi from weight 2 down to 2^-94 is |x| 2/pi modulo 4.
MOK_HD double reduce(float x, uint32_t *quarter) {
  constexpr uint32_t kTwoOverPi[8] = {0u,          0xA2F9836Eu, 0x4E441529u, 0xFC2757D1u,
                                      0xF534DDC0u, 0xDB629599u, 0x3C439041u, 0xFE5163ABu};
  const uint32_t u = bits(x) & 0x7FFFFFFFu;
  const uint64_t m = (u & 0x007FFFFFu) | 0x00800000u;
  const uint32_t start = (u >> 23) - 120u;  // e + 30, the first of the 96 bits; e = (u >> 23) - 150
  const uint32_t word = start >> 5, shift = start & 31u;
  uint64_t window[3];
  for (uint32_t i = 0; i < 3; ++i) {
    const uint64_t pair = (static_cast<uint64_t>(kTwoOverPi[word + i]) << 32) | kTwoOverPi[word + i + 1];
    window[i] = (pair << shift) >> 32;
  }
  const uint64_t turns = ((m * window[0]) << 32) + m * window[1] + ((m * window[2]) >> 32);  // 2^62 is a quarter turn
  *quarter = static_cast<uint32_t>((turns + (uint64_t{1} << 61)) >> 62);
  const int64_t rest = static_cast<int64_t>(turns - (static_cast<uint64_t>(*quarter) << 62));
  return f64::mul(static_cast<double>(rest), 0x1.921fb54442d18p-62);  // pi/2 2^-62
}

MOK_HD float circle(float x, uint32_t quarters) {
  const float magnitude = absolute(x);
  uint32_t quarter = 0;
  double r = static_cast<double>(magnitude);
  if (magnitude >= 0.75f) r = reduce(finite(x) ? x : 1.0f, &quarter);
  const float value = static_cast<float>(f64::sin_of_quarter(r, quarter + quarters));
  return finite(x) ? value : nan();
}

MOK_HD float sin(float x) {
  const float value = circle(x, x < 0.0f ? 2u : 0u);
  return x == 0.0f ? x : value;
}

MOK_HD float cos(float x) { return circle(x, 1u); }

}  // namespace f32

}  // namespace mok

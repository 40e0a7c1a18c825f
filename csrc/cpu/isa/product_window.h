// Precision bf16, the fast way (AVX2, AVX-512): the tensor-core rule in fp32 and int32 lanes, exact within a window of exponents.
//
// A panel of B and a chunk of rows of A are each scaled by a power of two, so that their largest element lies in [1/2, 1): its
// exponent field is 126. Elements with a field of lowA (lowB) or more are in the window; lowA + lowB - 127 >= 29. Beside the
// scaled fp32 value a byte holds the exponent: byte(a) + byte(b) is field(a) + field(b) - 127, which lies in 29 .. 125, and is
// below 29 where one is zero or outside the window.
// A block of 16 products for one row and a vector of columns, c scaled like the products:
//   E = max(bytes, field of c); unit u = 2^(E - 25);  sum = trunc(c / u) + each trunc(a * b / u) in int32;  c = sum * u, toward
//   zero.
// a * b is exact in fp32; dividing by u adds 25 - E to the exponent field, and 25 - E >= 0, so that a zero stays tiny.
// Why the bits are those of 4.2, which has more cases:
//   - an element outside the window: its products are cut to zero and don't set E if E is at least their exponent + 27. That is
//     tested where a block has such elements (product_bf16.h); a subnormal operand always counts as outside;
//   - int32 overflows only if the 16 significands of a row and of a column both sum to 3983 or more (of 16 * 255): flagged;
//   - E below 29: every c that arises is a multiple of the unit for 29, so a floor of 29 cuts nothing;
//   - subnormal c, zero terms counting as -133: in the window all terms are multiples of 2^-149 (the windows are cut for that),
//   so
//     that nothing is cut there, whatever E; and the result in 24 bits is exact where fp32 is subnormal;
//   - infinity: the sums of a chain stay below 2^127 (product_bf16.h), infinite and NaN elements are flagged.
#pragma once

#include "cpu/isa/product_operand.h"

namespace MOK_ISA_NS {
namespace {

constexpr int kBlock = 16;                               // depths of a step
constexpr int kLargestField = 126;                       // exponent field of the largest scaled element
constexpr int kFloorField = 29;                          // of the scaled exponent of the smallest product in the window
constexpr int kRowOffset = 1, kColumnOffset = 126;       // byte = field - offset in the window
constexpr int kRowOutside = -20, kColumnOutside = -100;  // the bytes of what is zero or outside

constexpr uint8_t kOutside = 1, kNonFinite = 2, kHeavy = 4;  // flags of a block

// What is in 16 depths of 16 rows or of a panel's columns. Fields are those of scaled elements.
struct BlockInfo {
  uint8_t flags;
  uint8_t largest;  // field of the largest finite element, 0 if all are zero
  uint8_t outside;  // of the largest element outside the window, as an exponent of 4.2
};

#if MOK_ISA_LEVEL >= 3
constexpr int kGroup = 4, kPanel = 64;
#elif MOK_ISA_LEVEL >= 2
constexpr int kGroup = 3, kPanel = 32;
#else
constexpr int kGroup = 4, kPanel = 32;
#endif
constexpr int kVectors = kPanel / kTile;  // of 16 columns

// Rows are packed by groups, columns by panels; `exponent` of a row is its byte four times over.
struct alignas(64) RowBlock {
  float value[kBlock][4];
  int32_t exponent[kBlock][4];
};
struct alignas(64) ColumnBlock {
  float value[kBlock][kPanel];
  int8_t exponent[kBlock][kPanel];
};

#if MOK_ISA_LEVEL >= 3

// The first half of a step: the exponents E but for those of c, as fields, 29 at least.
void window_exponents(const RowBlock *a, const ColumnBlock *b, uint8_t (*largest)[kPanel]) {
  __m512i top[kGroup];
#pragma GCC unroll 4
  for (int i = 0; i < kGroup; ++i) top[i] = _mm512_set1_epi8(kFloorField);
#pragma GCC unroll 16
  for (int p = 0; p < kBlock; ++p) {
    const __m512i y = _mm512_load_si512(b->exponent[p]);
#pragma GCC unroll 4
    for (int i = 0; i < kGroup; ++i) {
      top[i] = _mm512_max_epi8(top[i], _mm512_add_epi8(y, _mm512_set1_epi32(a->exponent[p][i])));
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kGroup; ++i) _mm512_store_si512(largest[i], top[i]);
}

// The second half: c[kGroup][kPanel], scaled, goes on by one block. MXCSR is that of window_rounding(): not inlined, so that
// nothing moves past it.
__attribute__((noinline)) void window_sums(const RowBlock *a, const ColumnBlock *b, const uint8_t (*largest)[kPanel], float *c) {
  const __m512i field_mask = _mm512_set1_epi32(0x7F800000), base = _mm512_set1_epi32((25 + 127) << 23),
                one = _mm512_set1_epi32(127 << 23);
  for (int half = 0; half < kPanel; half += 32) {
    __m512i scale[kGroup][2], sum[kGroup][2];
#pragma GCC unroll 4
    for (int i = 0; i < kGroup; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const __m512i bytes = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i *>(&largest[i][half + 16 * v])));
        const __m512i old = _mm512_castps_si512(_mm512_load_ps(c + i * kPanel + half + 16 * v));
        const __m512i field = _mm512_max_epi32(_mm512_slli_epi32(bytes, 23), _mm512_and_si512(old, field_mask));
        scale[i][v] = _mm512_sub_epi32(base, field);
        __asm__("" : "+v"(scale[i][v]));  // forget field: it would be kept in memory to spare a subtraction
        sum[i][v] = _mm512_cvttps_epi32(_mm512_castsi512_ps(_mm512_add_epi32(old, scale[i][v])));
      }
    }
#pragma GCC unroll 16
    for (int p = 0; p < kBlock; ++p) {
      const __m512 y0 = _mm512_load_ps(&b->value[p][half]), y1 = _mm512_load_ps(&b->value[p][half + 16]);
#pragma GCC unroll 4
      for (int i = 0; i < kGroup; ++i) {
        const __m512 x = _mm512_set1_ps(a->value[p][i]);
        const __m512i t0 = _mm512_add_epi32(_mm512_castps_si512(_mm512_mul_ps(x, y0)), scale[i][0]);
        const __m512i t1 = _mm512_add_epi32(_mm512_castps_si512(_mm512_mul_ps(x, y1)), scale[i][1]);
        sum[i][0] = _mm512_add_epi32(sum[i][0], _mm512_cvttps_epi32(_mm512_castsi512_ps(t0)));
        sum[i][1] = _mm512_add_epi32(sum[i][1], _mm512_cvttps_epi32(_mm512_castsi512_ps(t1)));
        __asm__("" : "+v"(sum[i][0]), "+v"(sum[i][1]));  // or g++ sums the terms in another order, through memory
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kGroup; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const __m512 unit = _mm512_castsi512_ps(_mm512_sub_epi32(one, scale[i][v]));
        const __m512 cut = _mm512_cvt_roundepi32_ps(sum[i][v], _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
        _mm512_store_ps(c + i * kPanel + half + 16 * v, _mm512_mul_ps(cut, unit));
      }
    }
  }
}

#elif MOK_ISA_LEVEL >= 2

void window_exponents(const RowBlock *a, const ColumnBlock *b, uint8_t (*largest)[kPanel]) {
  __m256i top[kGroup];
#pragma GCC unroll 3
  for (int i = 0; i < kGroup; ++i) top[i] = _mm256_set1_epi8(kFloorField);
#pragma GCC unroll 16
  for (int p = 0; p < kBlock; ++p) {
    const __m256i y = _mm256_load_si256(reinterpret_cast<const __m256i *>(b->exponent[p]));
#pragma GCC unroll 3
    for (int i = 0; i < kGroup; ++i) {
      top[i] = _mm256_max_epi8(top[i], _mm256_add_epi8(y, _mm256_set1_epi32(a->exponent[p][i])));
    }
  }
#pragma GCC unroll 3
  for (int i = 0; i < kGroup; ++i) _mm256_store_si256(reinterpret_cast<__m256i *>(largest[i]), top[i]);
}

// MXCSR rounds toward zero, which only the conversion of the sum notices: everything else is exact.
__attribute__((noinline)) void window_sums(const RowBlock *a, const ColumnBlock *b, const uint8_t (*largest)[kPanel], float *c) {
  const __m256i field_mask = _mm256_set1_epi32(0x7F800000), base = _mm256_set1_epi32((25 + 127) << 23),
                one = _mm256_set1_epi32(127 << 23);
  for (int half = 0; half < kPanel; half += 16) {
    __m256i scale[kGroup][2], sum[kGroup][2];
#pragma GCC unroll 3
    for (int i = 0; i < kGroup; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(&largest[i][half + 8 * v])));
        const __m256i old = _mm256_castps_si256(_mm256_load_ps(c + i * kPanel + half + 8 * v));
        const __m256i field = _mm256_max_epi32(_mm256_slli_epi32(bytes, 23), _mm256_and_si256(old, field_mask));
        scale[i][v] = _mm256_sub_epi32(base, field);
        __asm__("" : "+v"(scale[i][v]));  // forget field: it would be kept in memory to spare a subtraction
        sum[i][v] = _mm256_cvttps_epi32(_mm256_castsi256_ps(_mm256_add_epi32(old, scale[i][v])));
      }
    }
#pragma GCC unroll 16
    for (int p = 0; p < kBlock; ++p) {
      const __m256 y0 = _mm256_load_ps(&b->value[p][half]), y1 = _mm256_load_ps(&b->value[p][half + 8]);
#pragma GCC unroll 3
      for (int i = 0; i < kGroup; ++i) {
        const __m256 x = _mm256_broadcast_ss(&a->value[p][i]);
        const __m256i t0 = _mm256_add_epi32(_mm256_castps_si256(_mm256_mul_ps(x, y0)), scale[i][0]);
        const __m256i t1 = _mm256_add_epi32(_mm256_castps_si256(_mm256_mul_ps(x, y1)), scale[i][1]);
        sum[i][0] = _mm256_add_epi32(sum[i][0], _mm256_cvttps_epi32(_mm256_castsi256_ps(t0)));
        sum[i][1] = _mm256_add_epi32(sum[i][1], _mm256_cvttps_epi32(_mm256_castsi256_ps(t1)));
        __asm__("" : "+v"(sum[i][0]), "+v"(sum[i][1]));  // or g++ sums the terms in another order, through memory
      }
    }
#pragma GCC unroll 3
    for (int i = 0; i < kGroup; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const __m256 unit = _mm256_castsi256_ps(_mm256_sub_epi32(one, scale[i][v]));
        _mm256_store_ps(c + i * kPanel + half + 8 * v, _mm256_mul_ps(_mm256_cvtepi32_ps(sum[i][v]), unit));
      }
    }
  }
}

#endif

}  // namespace
}  // namespace MOK_ISA_NS

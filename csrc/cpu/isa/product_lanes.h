// Vectors of kLanes floats or int32 for the packing and the kernels of products: one name for each operation on each instruction
// set.
#pragma once

#include "common/platform.h"
#include "cpu/isa/isa.h"

namespace MOK_ISA_NS {
namespace {

#if MOK_ISA_LEVEL >= 3

typedef __m512 Floats;
typedef __m512i Ints;
constexpr int kLanes = 16;

Floats load_floats(const float *from) { return _mm512_loadu_ps(from); }
void store_floats(float *to, Floats x) { _mm512_storeu_ps(to, x); }
Floats all_lanes(const float *from) { return _mm512_set1_ps(*from); }
Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
Ints as_ints(Floats x) { return _mm512_castps_si512(x); }
Floats as_floats(Ints x) { return _mm512_castsi512_ps(x); }
Ints all_ints(int32_t x) { return _mm512_set1_epi32(x); }
Ints both(Ints a, Ints b) { return _mm512_and_si512(a, b); }
Ints either(Ints a, Ints b) { return _mm512_or_si512(a, b); }
Ints subtract(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
Ints larger(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
Ints where_less(Ints a, Ints b, Ints yes, Ints no) { return _mm512_mask_mov_epi32(no, _mm512_cmplt_epi32_mask(a, b), yes); }
Ints shift_right(Ints x, int count) { return _mm512_srli_epi32(x, static_cast<unsigned>(count)); }
int32_t largest_lane(Ints x) { return _mm512_reduce_max_epi32(x); }
void store_ints(int32_t *to, Ints x) { _mm512_storeu_si512(to, x); }
// The low byte of each lane: 16 of them in a row, or each four times over in its lane.
void store_bytes(int8_t *to, const Ints *x) { _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm512_cvtepi32_epi8(*x)); }
Ints repeat_bytes(Ints x) {
  return _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(_mm_setr_epi32(0x00000000, 0x04040404, 0x08080808, 0x0C0C0C0C)));
}
bool all_at_least(Ints a, Ints b) { return _mm512_cmplt_epi32_mask(a, b) == 0; }

// As signed bytes, four times as many.
Ints load_bytes(const int8_t *from) { return _mm512_loadu_si512(from); }
void store_all_bytes(int8_t *to, Ints x) { _mm512_storeu_si512(to, x); }
Ints widen_bytes(const int8_t *from) { return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from))); }
Ints add_bytes(Ints a, Ints b) { return _mm512_add_epi8(a, b); }
Ints larger_bytes(Ints a, Ints b) { return _mm512_max_epi8(a, b); }

// As unsigned 16-bit numbers, twice as many.
Ints load_words(const uint16_t *from) { return _mm512_loadu_si512(from); }
void store_words(uint16_t *to, Ints x) { _mm512_storeu_si512(to, x); }
Ints all_words(uint16_t x) { return _mm512_set1_epi16(static_cast<int16_t>(x)); }
Ints add_words(Ints a, Ints b) { return _mm512_add_epi16(a, b); }
Ints larger_words(Ints a, Ints b) { return _mm512_max_epu16(a, b); }
Ints smaller_words(Ints a, Ints b) { return _mm512_min_epu16(a, b); }
Ints words_below(Ints x, Ints bound) { return _mm512_maskz_mov_epi16(_mm512_cmplt_epu16_mask(x, bound), x); }  // else 0

#elif MOK_ISA_LEVEL >= 2

typedef __m256 Floats;
typedef __m256i Ints;
constexpr int kLanes = 8;

Floats load_floats(const float *from) { return _mm256_loadu_ps(from); }
void store_floats(float *to, Floats x) { _mm256_storeu_ps(to, x); }
Floats all_lanes(const float *from) { return _mm256_broadcast_ss(from); }
Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
Ints as_ints(Floats x) { return _mm256_castps_si256(x); }
Floats as_floats(Ints x) { return _mm256_castsi256_ps(x); }
Ints all_ints(int32_t x) { return _mm256_set1_epi32(x); }
Ints both(Ints a, Ints b) { return _mm256_and_si256(a, b); }
Ints either(Ints a, Ints b) { return _mm256_or_si256(a, b); }
Ints subtract(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
Ints larger(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
Ints where_less(Ints a, Ints b, Ints yes, Ints no) { return _mm256_blendv_epi8(no, yes, _mm256_cmpgt_epi32(b, a)); }
Ints shift_right(Ints x, int count) { return _mm256_srli_epi32(x, count); }
int32_t largest_lane(Ints x) {
  __m128i half = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(half, _mm_shuffle_epi32(half, 0xB1)));
}
void store_ints(int32_t *to, Ints x) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), x); }
void store_bytes(int8_t *to, const Ints *x) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x[0], x[1]), 0xD8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i *>(to), bytes);
}
Ints repeat_bytes(Ints x) {
  return _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(_mm_setr_epi32(0x00000000, 0x04040404, 0x08080808, 0x0C0C0C0C)));
}
bool all_at_least(Ints a, Ints b) { return _mm256_testz_si256(_mm256_cmpgt_epi32(b, a), _mm256_cmpgt_epi32(b, a)) != 0; }

// As signed bytes, four times as many.
Ints load_bytes(const int8_t *from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)); }
void store_all_bytes(int8_t *to, Ints x) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), x); }
Ints widen_bytes(const int8_t *from) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from))); }
Ints add_bytes(Ints a, Ints b) { return _mm256_add_epi8(a, b); }
Ints larger_bytes(Ints a, Ints b) { return _mm256_max_epi8(a, b); }

// As unsigned 16-bit numbers, twice as many; words_below() takes numbers of at most 15 bits.
Ints load_words(const uint16_t *from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)); }
void store_words(uint16_t *to, Ints x) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), x); }
Ints all_words(uint16_t x) { return _mm256_set1_epi16(static_cast<int16_t>(x)); }
Ints add_words(Ints a, Ints b) { return _mm256_add_epi16(a, b); }
Ints larger_words(Ints a, Ints b) { return _mm256_max_epu16(a, b); }
Ints smaller_words(Ints a, Ints b) { return _mm256_min_epu16(a, b); }
Ints words_below(Ints x, Ints bound) { return _mm256_and_si256(_mm256_cmpgt_epi16(bound, x), x); }  // else 0

#else

struct Floats {
  float lane[4];
};
constexpr int kLanes = 4;

Floats load_floats(const float *from) { return {{from[0], from[1], from[2], from[3]}}; }
void store_floats(float *to, Floats x) {
  for (int i = 0; i < kLanes; ++i) to[i] = x.lane[i];
}
Floats all_lanes(const float *from) { return {{*from, *from, *from, *from}}; }
Floats multiply(Floats a, Floats b) {
  for (int i = 0; i < kLanes; ++i) a.lane[i] *= b.lane[i];
  return a;
}
Floats multiply_add(Floats a, Floats b, Floats c) {
  for (int i = 0; i < kLanes; ++i) c.lane[i] = mok::f32::fma(a.lane[i], b.lane[i], c.lane[i]);
  return c;
}

#endif

}  // namespace
}  // namespace MOK_ISA_NS

// Reading operands for packing: squares of 16 x 16 elements as fp32, from lines that run either way.
#pragma once

#include <cstring>

#include "common/platform.h"
#include "cpu/isa/product.h"

namespace MOK_ISA_NS {
namespace {

constexpr int kTile = 16;

// at[p][i]: depth p, row of A or column of B i. Elements outside the matrix are +0.
struct alignas(64) Tile {
  float at[kTile][kTile];
};

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t blocks_of(int64_t count, int64_t block) { return (count + block - 1) / block; }

// The rows of an output that a tile will be written to: asked for while the last products are computed.
struct Output {
  const unsigned char *first;  // nullptr: not yet
  int64_t row_bytes, used_bytes, rows;
};

void prefetch_output(const Output *output, int64_t row, int64_t rows) {
  if (output->first == nullptr) return;
  for (int64_t i = row; i < least(row + rows, output->rows); ++i) {
    const unsigned char *const line = output->first + i * output->row_bytes;
    for (int64_t at = 0; at < output->used_bytes; at += 64) __builtin_prefetch(line + at, 1);
  }
}

// Asks for part `part` of `parts` of `bytes` bytes that will be read soon; memory behind the last of them may not exist.
void prefetch_part(const void *from, int64_t bytes, int64_t part, int64_t parts) {
  const int64_t lines = bytes / 64;
  for (int64_t line = part * lines / parts; line < (part + 1) * lines / parts; ++line) {
    __builtin_prefetch(static_cast<const unsigned char *>(from) + line * 64);
  }
}

// Line `line` from its element `first` on, or nullptr for a line of zeros.
const void *operand_line(const mok::ProductOperand *operand, int32_t precision, int64_t line, int64_t first) {
  if (operand->lines != nullptr) line = operand->lines[line];
  if (line < 0) return nullptr;
  const int64_t offset = line * operand->ld + first;
  return static_cast<const unsigned char *>(operand->data) + offset * (precision == MOK_BF16 ? 2 : 4);
}

#if MOK_ISA_LEVEL >= 3

typedef __m512 Line;

Line load_line(int32_t precision, const void *from, __mmask16 mask) {
  if (precision == MOK_BF16) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16));
  }
  return _mm512_maskz_loadu_ps(mask, from);
}

// Rows become columns: pairs, quads, then 128-bit lanes.
void transpose(Line *x) {
  Line y[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(x[i], x[i + 1])),
                  high01 = _mm512_castps_pd(_mm512_unpackhi_ps(x[i], x[i + 1]));
    const __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(x[i + 2], x[i + 3]));
    const __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(x[i + 2], x[i + 3]));
    y[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(low01, low23));
    y[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low01, low23));
    y[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high01, high23));
    y[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high01, high23));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Line low = _mm512_shuffle_f32x4(y[i], y[i + 4], 0x88), high = _mm512_shuffle_f32x4(y[i], y[i + 4], 0xDD);
    const Line low2 = _mm512_shuffle_f32x4(y[i + 8], y[i + 12], 0x88), high2 = _mm512_shuffle_f32x4(y[i + 8], y[i + 12], 0xDD);
    x[i] = _mm512_shuffle_f32x4(low, low2, 0x88);
    x[i + 8] = _mm512_shuffle_f32x4(low, low2, 0xDD);
    x[i + 4] = _mm512_shuffle_f32x4(high, high2, 0x88);
    x[i + 12] = _mm512_shuffle_f32x4(high, high2, 0xDD);
  }
}

// `lines` lines from `line`, `elements` elements from `first`.
void load_tile_lines(const mok::ProductOperand *operand, int32_t precision, int64_t line, int lines, int64_t first, int elements,
                     bool turn, Tile *tile) {
  const __mmask16 mask = static_cast<__mmask16>((1u << elements) - 1);
  Line x[kTile];
#pragma GCC unroll 16
  for (int l = 0; l < kTile; ++l) {
    const void *const from = l < lines ? operand_line(operand, precision, line + l, first) : nullptr;
    if (turn && from != nullptr) __builtin_prefetch(static_cast<const char *>(from) + 256);  // the lines are far apart
    x[l] = from != nullptr ? load_line(precision, from, mask) : _mm512_setzero_ps();
  }
  if (turn) transpose(x);
#pragma GCC unroll 16
  for (int l = 0; l < kTile; ++l) _mm512_store_ps(tile->at[l], x[l]);
}

#else

// One line as fp32; elements from `elements` on are +0.
void load_line(int32_t precision, const void *from, int elements, float *out) {
  if (from == nullptr) elements = 0;
  if (precision == MOK_BF16) {
    uint16_t bits[kTile] = {};
    if (elements == kTile) {
      memcpy(bits, from, sizeof bits);
    } else if (elements > 0) {
      memcpy(bits, from, static_cast<size_t>(elements) * sizeof(uint16_t));
    }
    for (int i = 0; i < kTile; ++i) out[i] = mok::f32::from_bits(static_cast<uint32_t>(bits[i]) << 16);
  } else if (elements == kTile) {
    memcpy(out, from, kTile * sizeof(float));
  } else {
    memset(out, 0, kTile * sizeof(float));
    if (elements > 0) memcpy(out, from, static_cast<size_t>(elements) * sizeof(float));
  }
}

#if MOK_ISA_LEVEL >= 2
// A square of 8 x 8 from rows `stride` floats apart, turned, to rows of a tile.
void transpose8(const float *from, float *to) {
  __m256 x[8], y[8];
  for (int i = 0; i < 8; ++i) x[i] = _mm256_load_ps(from + i * kTile);
  for (int i = 0; i < 8; i += 4) {
    const __m256d low01 = _mm256_castps_pd(_mm256_unpacklo_ps(x[i], x[i + 1])),
                  high01 = _mm256_castps_pd(_mm256_unpackhi_ps(x[i], x[i + 1]));
    const __m256d low23 = _mm256_castps_pd(_mm256_unpacklo_ps(x[i + 2], x[i + 3]));
    const __m256d high23 = _mm256_castps_pd(_mm256_unpackhi_ps(x[i + 2], x[i + 3]));
    y[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(low01, low23));
    y[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low01, low23));
    y[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(high01, high23));
    y[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(high01, high23));
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_store_ps(to + i * kTile, _mm256_permute2f128_ps(y[i], y[i + 4], 0x20));
    _mm256_store_ps(to + (i + 4) * kTile, _mm256_permute2f128_ps(y[i], y[i + 4], 0x31));
  }
}
#endif

void load_tile_lines(const mok::ProductOperand *operand, int32_t precision, int64_t line, int lines, int64_t first, int elements,
                     bool turn, Tile *tile) {
  Tile straight;
  Tile *const to = turn ? &straight : tile;
  for (int l = 0; l < kTile; ++l) {
    load_line(precision, l < lines ? operand_line(operand, precision, line + l, first) : nullptr, elements, to->at[l]);
  }
  if (!turn) return;
#if MOK_ISA_LEVEL >= 2
  for (int i = 0; i < kTile; i += 8) {
    for (int j = 0; j < kTile; j += 8) transpose8(&straight.at[i][j], &tile->at[j][i]);
  }
#else
  for (int i = 0; i < kTile; ++i) {
    for (int j = 0; j < kTile; ++j) tile->at[j][i] = straight.at[i][j];
  }
#endif
}

#endif

// Depth [depth, depth + depths) of rows or columns [outer, outer + outers), each at most 16.
void load_tile(const mok::ProductOperand *operand, int32_t precision, int64_t outer, int outers, int64_t depth, int depths,
               Tile *tile) {
  if (operand->along_depth != 0) {
    load_tile_lines(operand, precision, outer, outers, depth, depths, true, tile);
  } else {
    load_tile_lines(operand, precision, depth, depths, outer, outers, false, tile);
  }
}

}  // namespace
}  // namespace MOK_ISA_NS

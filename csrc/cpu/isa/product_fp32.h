// Precision fp32: each element acc = fma(a[k], b[k], acc), k ascending; vectors run over columns, never over k.
//
// Packed B: a panel of kFp32Columns columns (half as many if no more are left), depth by depth. Packed A: for each block of
// kFp32Depth depths, groups of rows, depth by depth.
#pragma once

#include "cpu/isa/product_lanes.h"
#include "cpu/isa/product_operand.h"

namespace MOK_ISA_NS {
namespace {

constexpr int kFp32Rows = MOK_ISA_LEVEL >= 3 ? 12 : 6;  // of a kernel: accumulators fill the registers
constexpr int kFp32Columns = 2 * kLanes;
constexpr int64_t kFp32Depth = 256;  // a block of a panel (32 KiB with AVX-512) stays in the first cache

// c[ROWS][VECTORS * kLanes] goes on over `depth` depths; rows of c are kFp32Columns floats apart. `soon`: 64 bytes a depth of
// what will be read next, to be fetched by then.
template <int ROWS, int VECTORS>
void fp32_kernel(int64_t depth, const float *a, const float *b, const unsigned char *soon, float *c) {
  Floats acc[ROWS][VECTORS];
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) acc[i][v] = load_floats(c + i * kFp32Columns + v * kLanes);
  }
  for (int64_t p = 0; p < depth; ++p) {
    Floats y[VECTORS];
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) y[v] = load_floats(b + v * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
      const Floats x = all_lanes(a + i);
#pragma GCC unroll 2
      for (int v = 0; v < VECTORS; ++v) acc[i][v] = multiply_add(x, y[v], acc[i][v]);
    }
    __builtin_prefetch(soon, 0, 2);
    a += ROWS;
    b += VECTORS * kLanes;
    soon += 64;
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; ++v) store_floats(c + i * kFp32Columns + v * kLanes, acc[i][v]);
  }
}

typedef void (*Fp32Kernel)(int64_t depth, const float *a, const float *b, const unsigned char *soon, float *c);

constexpr Fp32Kernel kFp32Kernels[][2] = {
    {fp32_kernel<1, 1>, fp32_kernel<1, 2>},   {fp32_kernel<2, 1>, fp32_kernel<2, 2>},   {fp32_kernel<3, 1>, fp32_kernel<3, 2>},
    {fp32_kernel<4, 1>, fp32_kernel<4, 2>},   {fp32_kernel<5, 1>, fp32_kernel<5, 2>},   {fp32_kernel<6, 1>, fp32_kernel<6, 2>},
#if MOK_ISA_LEVEL >= 3
    {fp32_kernel<7, 1>, fp32_kernel<7, 2>},   {fp32_kernel<8, 1>, fp32_kernel<8, 2>},   {fp32_kernel<9, 1>, fp32_kernel<9, 2>},
    {fp32_kernel<10, 1>, fp32_kernel<10, 2>}, {fp32_kernel<11, 1>, fp32_kernel<11, 2>}, {fp32_kernel<12, 1>, fp32_kernel<12, 2>},
#endif
};
static_assert(sizeof kFp32Kernels / sizeof kFp32Kernels[0] == kFp32Rows);

int fp32_vectors(int64_t columns) { return columns <= kLanes ? 1 : 2; }

// Elements [first, first + count) of the line of one depth, count at most kTile, and +0 up to kTile. nullptr is a line of zeros.
void copy_across(const float *line, int64_t first, int64_t count, float *to) {
  if (line != nullptr && count == kTile) {
    memcpy(to, line + first, kTile * sizeof(float));
  } else {
    memset(to, 0, kTile * sizeof(float));
    if (line != nullptr && count > 0) memcpy(to, line + first, static_cast<size_t>(count) * sizeof(float));
  }
}

// The line of depth `depth` from element `outer` on; asks for `outers` elements of a later one, since lines are far apart.
const float *line_across(const mok::ProductOperand *operand, int64_t outer, int64_t outers, int64_t depth, int64_t last) {
  constexpr int64_t kAhead = 16;
  if (depth + kAhead < last) {
    const void *const later = operand_line(operand, MOK_FP32, depth + kAhead, outer);
    if (later != nullptr) prefetch_part(later, outers * 4 + 63, 0, 1);
  }
  return static_cast<const float *>(operand_line(operand, MOK_FP32, depth, outer));
}

// `outers` rows or columns from `outer`, depth by depth, `width` >= outers floats apart; the rest of the width is +0.
// Writes whole rows of 16: up to 15 floats behind the end are lost, and rows must be packed in order.
void fp32_pack(const mok::ProductOperand *operand, int64_t outer, int64_t outers, int64_t width, int64_t depth, int64_t depths,
               float *to) {
  if (operand->along_depth == 0) {
    for (int64_t p = 0; p < depths; ++p) {
      const float *const line = line_across(operand, outer, outers, depth + p, depth + depths);
      for (int64_t i = 0; i < width; i += kTile) copy_across(line, i, least(kTile, outers - i), to + p * width + i);
    }
    return;
  }
  Tile tile;
  for (int64_t p = 0; p < depths; p += kTile) {
    const int p_count = static_cast<int>(least(kTile, depths - p));
    for (int64_t i = 0; i < width; i += kTile) {
      const int i_count = static_cast<int>(most(0, least(kTile, outers - i)));
      load_tile(operand, MOK_FP32, outer + i, i_count, depth + p, p_count, &tile);
      for (int q = 0; q < p_count; ++q) memcpy(to + (p + q) * width + i, tile.at[q], sizeof tile.at[q]);
    }
  }
}

// Groups of rows as equal as they can be: group g of `groups` begins here.
int64_t fp32_group(int64_t m, int64_t groups, int64_t g) { return g * (m / groups) + least(g, m % groups); }

// Floats of `rows` packed rows and `depths` depths; fp32_pack loses some behind them.
int64_t fp32_packed(int64_t rows, int64_t depths) { return rows * depths + kTile; }

// Packed rows of A for depths [depth, depth + depths), in blocks of `block` depths. Lines that run along the depth are read group
// by group; others once for all groups.
void fp32_pack_rows(const mok::ProductOperand *a, int64_t first_row, int64_t m, int64_t depth, int64_t depths, int64_t block,
                    float *to) {
  const int64_t groups = blocks_of(m, kFp32Rows);
  for (int64_t p = 0; p < depths; p += block) {
    const int64_t p_count = least(block, depths - p);
    for (int64_t q = 0; q < p_count && a->along_depth == 0; ++q) {
      const float *const line = line_across(a, first_row, m, depth + p + q, depth + depths);
      float *group = to;
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t row = fp32_group(m, groups, g), rows = fp32_group(m, groups, g + 1) - row;
        copy_across(line, row, least(kTile, m - row), group + q * rows);  // some of the next group too: overwritten or lost
        group += fp32_packed(rows, p_count);
      }
    }
    float *group = to;
    for (int64_t g = 0; g < groups && a->along_depth != 0; ++g) {
      const int64_t row = fp32_group(m, groups, g), rows = fp32_group(m, groups, g + 1) - row;
      fp32_pack(a, first_row + row, rows, rows, depth + p, p_count, group);
      group += fp32_packed(rows, p_count);
    }
    to += m * p_count + groups * kTile;
  }
}

// c[m][kFp32Columns] goes on over `depths` depths of a panel of `columns` columns.
void fp32_multiply(int64_t m, int64_t columns, int64_t depths, int64_t block, const float *a, const float *b,
                   const Output *output, float *c) {
  const int64_t groups = blocks_of(m, kFp32Rows);
  const int64_t vectors = fp32_vectors(columns), width = vectors * kLanes;
  for (int64_t p = 0; p < depths; p += block) {
    const int64_t p_count = least(block, depths - p);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t row = fp32_group(m, groups, g), rows = fp32_group(m, groups, g + 1) - row;
      if (p + block >= depths) prefetch_output(output, row, rows);
      // The first groups ask for the block of the panel, or the panel, that comes after this one.
      const float *const soon = g * 64 < width * 4 ? b + p_count * width + g * p_count * 16 : b;
      kFp32Kernels[rows - 1][vectors - 1](p_count, a, b, reinterpret_cast<const unsigned char *>(soon), c + row * kFp32Columns);
      a += fp32_packed(rows, p_count);
    }
    b += p_count * width;
  }
}

}  // namespace
}  // namespace MOK_ISA_NS

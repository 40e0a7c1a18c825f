// Sums of squares and AdamW (docs/arithmetic.md section 13).
#pragma once

#include "cpu/isa/isa.h"

constexpr int64_t kSquareBlock = 64;   // rows and columns of a block of 13.1
constexpr int64_t kSquareBlocks = 32;  // at most so many blocks side by side in one call

struct UpdateTable {
  // Blocks [first, last) of row `block_row` of blocks of a matrix [rows, columns]: sums[0 .. last - first).
  void (*square_blocks)(int64_t rows, int64_t columns, const float *matrix, int64_t block_row, int64_t first, int64_t last,
                        float *sums);
  float (*tree)(int64_t count, float *x);  // uses x up
  void (*adamw)(const mok_adamw_args *args, int64_t begin, int64_t end);
};
MOK_ISA_DECLARE(UpdateTable, update_table)

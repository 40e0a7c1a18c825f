// Query/key norm and rotary embedding (docs/arithmetic.md section 8).
#pragma once

#include "cpu/isa/isa.h"

// A "norm row" is what is normed together: one head of one token (norm `head`) or all heads of one token (`full`; also used where
// there is no norm). Row r of `row_heads` heads belongs to token r / (heads / row_heads).
struct QkTable {
  size_t (*scratch)(int64_t columns);
  void (*forward)(const mok_qk_forward_args *args, int64_t begin, int64_t end, mok::Scratch *scratch);
  // weight_sum [columns], or NULL: the ascending chain of g*xh over these rows (a block of 5.3).
  void (*backward)(const mok_qk_backward_args *args, int64_t begin, int64_t end, float *weight_sum, mok::Scratch *scratch);
  // grad_weight += Tree over the blocks, sums [blocks, columns], which it uses up.
  void (*add_weight_sums)(int64_t blocks, int64_t columns, float *sums, float *grad_weight);
};
MOK_ISA_DECLARE(QkTable, qk_table)

// Heads in a norm row.
static inline int64_t qk_row_heads(int32_t norm, int64_t heads) { return norm == MOK_QK_NORM_HEAD ? 1 : heads; }

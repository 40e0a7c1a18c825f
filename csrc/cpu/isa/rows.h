// Embedding and RMSNorm (docs/arithmetic.md sections 6 and 7).
#pragma once

#include "cpu/isa/isa.h"

struct RowsTable {
  void (*embedding_forward)(const mok_embedding_forward_args *args, int64_t begin, int64_t end);  // tokens
  // Columns [begin, end) of the row of one id; tokens[count] are its positions, ascending.
  void (*embedding_backward)(const mok_embedding_backward_args *args, const int32_t *tokens, int64_t count, int64_t begin,
                             int64_t end);
  void (*rmsnorm_forward)(const mok_rmsnorm_forward_args *args, int64_t begin, int64_t end);  // rows
  void (*rmsnorm_backward)(const mok_rmsnorm_backward_args *args, int64_t begin, int64_t end);
  // Columns [begin, end) of the weight's sums over rows [first, last), one block of 5.3, into sums[begin, end).
  void (*rmsnorm_weight_block)(const mok_rmsnorm_backward_args *args, int64_t first, int64_t last, int64_t begin, int64_t end,
                               float *sums);
  // Columns [begin, end): grad_weight += Tree over the blocks; sums [blocks, columns] is used up.
  void (*rmsnorm_weight_join)(const mok_rmsnorm_backward_args *args, int64_t blocks, int64_t begin, int64_t end, float *sums);
};
MOK_ISA_DECLARE(RowsTable, rows_table)

// The router's softmax, top-k and their gradients (docs/arithmetic.md section 10).
#pragma once

#include "cpu/isa/isa.h"

struct RouterTable {
  // Tokens [begin, end). Returns whether a logit was infinite or NaN.
  bool (*forward)(const mok_router_forward_args *args, int64_t begin, int64_t end);
  size_t (*backward_scratch)(int64_t experts);
  void (*backward)(const mok_router_backward_args *args, int64_t begin, int64_t end, mok::Scratch *scratch);
  // Adds the real tokens of [begin, end) to probability_sum [experts] and z_sum.
  void (*sums)(const mok_router_sums_args *args, int64_t begin, int64_t end, int64_t *probability_sum, int64_t *z_sum);
};
MOK_ISA_DECLARE(RouterTable, router_table)

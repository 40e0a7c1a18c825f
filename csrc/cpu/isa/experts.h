// SwiGLU and the sum over a token's experts (docs/arithmetic.md section 11).
#pragma once

#include "cpu/isa/isa.h"

struct ExpertsTable {
  // Rows [begin, end).
  size_t (*swiglu_scratch)(int64_t intermediate);
  void (*swiglu_forward)(const mok_swiglu_forward_args *args, int64_t begin, int64_t end, mok::Scratch *scratch);
  void (*swiglu_backward)(const mok_swiglu_backward_args *args, int64_t begin, int64_t end, mok::Scratch *scratch);
  // Tokens [begin, end).
  size_t (*combine_scratch)(int64_t hidden);
  void (*combine)(const mok_combine_args *args, int64_t begin, int64_t end, mok::Scratch *scratch);
};
MOK_ISA_DECLARE(ExpertsTable, experts_table)

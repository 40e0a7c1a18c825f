// Elementwise add and conversion to bf16 (docs/arithmetic.md 2.2).
#pragma once

#include "cpu/isa/isa.h"

struct ConvertTable {
  void (*add)(int64_t count, const float *a, const float *b, float *out);  // out may be a or b
  void (*to_bf16)(int64_t count, const float *in, uint16_t *out);
};
MOK_ISA_DECLARE(ConvertTable, convert_table)

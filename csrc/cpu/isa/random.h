// Normal deviates and the rotary table (docs/arithmetic.md sections 14 and 8): binary64 with our own functions.
#pragma once

#include "cpu/isa/isa.h"

struct RandomTable {
  void (*normal)(const mok_random_normal_args *args, int64_t begin, int64_t end);
  void (*rope_frequencies)(int64_t head_size, double base, double *frequency);  // [head_size / 2]
  void (*rope_rows)(const mok_rope_table_args *args, const double *frequency, int64_t begin, int64_t end);  // positions
};
MOK_ISA_DECLARE(RandomTable, random_table)

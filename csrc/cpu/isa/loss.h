// Cross entropy (docs/arithmetic.md section 12).
#pragma once

#include "cpu/isa/isa.h"

struct LossTable {
  // One row with a label: its loss as a multiple of 2^-32, and its gradient. room: [vocabulary] floats. False: the row is not
  // finite, *loss is 0.
  bool (*row)(const mok_cross_entropy_args *args, int64_t row, int64_t *loss, float *room);
  void (*ignored_row)(const mok_cross_entropy_args *args, int64_t row);  // gradient +0
};
MOK_ISA_DECLARE(LossTable, loss_table)

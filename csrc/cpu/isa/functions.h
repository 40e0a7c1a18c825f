// The one-argument functions of docs/arithmetic.md section 3 over arrays.
#pragma once

#include "cpu/isa/isa.h"

// Name by name the entries of FunctionsTable::apply.
constexpr const char *kFunctionNames[] = {"exp",   "exp2", "log",  "sigmoid", "silu", "silu_grad",
                                          "rsqrt", "sqrt", "recip", "sin",     "cos"};
constexpr int kFunctions = sizeof kFunctionNames / sizeof *kFunctionNames;

struct FunctionsTable {
  void (*apply[kFunctions])(int64_t count, const float *in, float *out);  // out may be in
};
MOK_ISA_DECLARE(FunctionsTable, functions_table)

// Matrix products (docs/arithmetic.md section 4) on one thread.
#pragma once

#include "cpu/isa/isa.h"

namespace mok {

// C[i,j] = (chain over p ascending of A[i,p] * B[p,j], from initial[i,j] or +0) + 0.0f, fp32, i < m, j < n, p < k.
// For use inside a pool task. Operands are float (MOK_FP32) or bfloat16 as uint16_t (MOK_BF16); element A[i,p] is
// a[i*a_row + p*a_depth], B[p,j] is b[p*b_depth + j*b_column]; C[i,j] is c[i*c_row + j], and initial the same with c_row.
// In each pair of strides one is 1 (where the size is above 1). initial may be NULL or c itself.
// k = 0 writes the initial value + 0.0f, or +0. Sizes of 0 write nothing.
struct SerialProduct {
  int32_t precision;
  int64_t tile_limit;  // of the context: 0 is off
  int64_t m, n, k;
  const void *a;
  int64_t a_row, a_depth;
  const void *b;
  int64_t b_depth, b_column;
  float *c;
  int64_t c_row;
  const float *initial;
};

}  // namespace mok

struct ProductTable {
  // Bytes that serial_product takes from the scratch and gives back; grows with each size, so the largest sizes serve all.
  size_t (*serial_product_scratch)(int32_t precision, int64_t m, int64_t n, int64_t k);
  void (*serial_product)(const mok::SerialProduct *product, mok::Scratch *scratch);
};
MOK_ISA_DECLARE(ProductTable, product_table)

#ifdef MOK_ISA_LEVEL
// The same for other files of cpu/isa.
namespace MOK_ISA_NS {
size_t serial_product_scratch(int32_t precision, int64_t m, int64_t n, int64_t k);
void serial_product(const mok::SerialProduct *product, mok::Scratch *scratch);
}  // namespace MOK_ISA_NS
#endif

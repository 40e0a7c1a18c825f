// Matrix products (docs/arithmetic.md section 4) on one thread, and the pieces that the parallel ones are made of.
//
// The columns of B are packed into panels, once; then any thread multiplies any run of rows of A with any run of panels. An
// output element is one chain in one task, so no choice of blocks shows in the bits.
#pragma once

#include "cpu/isa/isa.h"

namespace mok {

// One operand as memory: lines of contiguous elements. Line l begins at data + l * ld elements, or, with `lines`, at
// data + lines[l] * ld, and is a line of +0 where lines[l] is -1. along_depth = 1: a line is a row of A or a column of B and runs
// along k; along_depth = 0: line l holds the elements of depth k = l.
struct ProductOperand {
  const void *data;
  int64_t ld;
  const int32_t *lines;
  int32_t along_depth;
};

// Rows [first_row, first_row + m) of A times n packed columns of B, to `c`.
struct ProductRows {
  int32_t precision, out_bf16;
  int64_t tile_limit;  // of the context: 0 is off
  int64_t m, n, k;
  ProductOperand a;
  int64_t first_row;
  const unsigned char *panels;  // of B: the first of `n` columns
  int64_t panel_columns;        // that each of them holds, but the last
  void *c;                      // the element of first_row and of the first column; row i begins at c + i * ldc,
  int64_t ldc;                  // or with `turned` column j at c + j * ldc
  int32_t turned;
  const float *initial, *addend;  // or NULL; as c
};

// C[i,j] = (chain over p ascending of A[i,p] * B[p,j], from initial[i,j] or +0) + 0.0f, fp32, i < m, j < n, p < k.
// For use inside a pool task. Operands are float (MOK_FP32) or bfloat16 as uint16_t (MOK_BF16); element A[i,p] is
// a[i*a_row + p*a_depth], B[p,j] is b[p*b_depth + j*b_column]; C[i,j] is c[i*c_row + j], and initial the same with c_row.
// In each pair of strides one is 1. initial may be NULL or c itself.
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

  // Columns of a panel: as many as fit, or fewer with a tile limit. The last panel of a matrix may hold less.
  int64_t (*panel_columns)(int32_t precision, int64_t tile_limit);
  size_t (*panel_bytes)(int32_t precision, int64_t k);  // a multiple of 64
  void (*pack_panel)(int32_t precision, const mok::ProductOperand *b, int64_t k, int64_t first_column, int64_t columns,
                     void *panel);

  // Rows of A of a task that are a good size, if there are many; and what product_rows takes from the scratch.
  int64_t (*rows_block)(int32_t precision, int64_t k, int64_t tile_limit);
  size_t (*rows_scratch)(int32_t precision, int64_t m, int64_t n, int64_t k, int64_t tile_limit);
  void (*product_rows)(const mok::ProductRows *rows, mok::Scratch *scratch);
};
MOK_ISA_DECLARE(ProductTable, product_table)

#ifdef MOK_ISA_LEVEL
// The same for other files of cpu/isa.
namespace MOK_ISA_NS {
size_t serial_product_scratch(int32_t precision, int64_t m, int64_t n, int64_t k);
void serial_product(const mok::SerialProduct *product, mok::Scratch *scratch);
}  // namespace MOK_ISA_NS
#endif

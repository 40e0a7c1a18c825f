// What the host side of the matrix products hands to the kernels, and the table of kernels.
#pragma once

#include "cuda/context.h"
#include "cuda/epilogue.cuh"
#include "cuda/schedule.cuh"

namespace mok::cuda {

inline bool multiple_of_16_bytes(const void *pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// An operand as a stack of row-major matrices [rows, columns]; `pitch` and `group_elements` in elements.
struct Matrices {
  const void *base;
  int64_t rows, columns, pitch, groups, group_elements;

  // Whether TMA can read it as bf16.
  bool aligned() const { return multiple_of_16_bytes(base) && pitch % 8 == 0 && (groups == 1 || group_elements % 8 == 0); }
};

// An operand for threads that load it themselves.
struct ProductOperand {
  const uint16_t *base;
  int64_t pitch;           // elements between rows
  int64_t group_elements;  // from one group's matrix to the next
  const int32_t *rows;     // gathered rows, or NULL
  int32_t share;           // neighbouring output matrices of a batch that read the same matrix
};

// Matrix of an operand that output matrix (or run) `group` reads: group / share of a batch, the run's B by rows, the only one by
// depth.
__host__ __device__ constexpr int32_t operand_matrix(ProductForm form, bool is_b, int32_t group, int32_t share) {
  return form == ProductForm::kDense ? group / share : form == ProductForm::kByRows && is_b ? group : 0;
}

struct ProductArguments {
  ProductShape shape;
  ProductOperand a, b;
  ProductOutput out;
};

struct ProductLaunch {
  ProductArguments arguments;
  CUtensorMap map_a, map_b;
  int64_t tiles;  // an upper bound: CTAs (clusters) beyond the tiles have nothing to do
};

// What fills the stages of a bf16 product: TMA both operands, the producer threads A, B or both.
enum class Loading : int32_t { kEngine, kGatherA, kGatherB, kThreads };

// One function a tile and kind of loading (product_bf16_*.cu): launches the kernel for this majorness. MOK_INTERNAL if there is
// none.
using LaunchProduct = mok_status (*)(const mok_context &, const ProductLaunch &, Loading, bool a_mn, bool b_mn);
mok_status launch_128x256_pair(const mok_context &, const ProductLaunch &, Loading, bool a_mn, bool b_mn);
mok_status launch_128x256(const mok_context &, const ProductLaunch &, Loading, bool a_mn, bool b_mn);
mok_status launch_128x128(const mok_context &, const ProductLaunch &, Loading, bool a_mn, bool b_mn);
mok_status launch_64x256(const mok_context &, const ProductLaunch &, Loading, bool a_mn, bool b_mn);
mok_status launch_64x128(const mok_context &, const ProductLaunch &, Loading, bool a_mn, bool b_mn);
mok_status launch_128x256_pair_rows(const mok_context &, const ProductLaunch &, Loading, bool a_mn, bool b_mn);
mok_status launch_128x256_rows(const mok_context &, const ProductLaunch &, Loading, bool a_mn, bool b_mn);
mok_status launch_64x128_rows(const mok_context &, const ProductLaunch &, Loading, bool a_mn, bool b_mn);
constexpr int kTileKinds = 5;  // rows of the table of tiles in product.cu

// fp32 operands: FFMA chains (product_fp32.cu). Operands' base pointers are float.
struct ProductFp32 {
  ProductShape shape;
  const float *a, *b;
  int64_t a_pitch, b_pitch, a_group_elements, b_group_elements;
  const int32_t *a_rows, *b_rows;
  int32_t b_share;
  int32_t a_aligned, b_aligned;
  ProductOutput out;
};
mok_status launch_product_fp32(const mok_context &, const ProductFp32 &, bool a_mn, bool b_mn);

// A map for TMA of `groups` row-major bf16 matrices, in boxes of 64 columns by box_rows, swizzled by 128 bytes, zeros outside.
// Rows and matrices start at multiples of 16 bytes.
mok_status encode_map(const mok_context &, const Matrices &, int64_t box_rows, CUtensorMap *);

// A batch of products of one shape: matrix i of an operand starts i * step elements after its base (b: i / b_share). What
// mok_product calls with a batch of one, and what attention calls for its heads.
struct BatchedProduct {
  int32_t precision, out_bf16;
  bool trans_a, trans_b;
  int64_t m, n, k, lda, ldb, ldc;
  const void *a, *b;
  void *c;
  const float *initial, *addend;
  int64_t batch, a_step, b_step, c_step;
  int64_t b_share;
};
mok_status run_batched(const mok_context &, const BatchedProduct &);

}  // namespace mok::cuda

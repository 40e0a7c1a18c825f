// What the host side of the matrix products hands to the kernels, and the table of kernels.
#pragma once

#include "cuda/context.h"
#include "cuda/epilogue.cuh"
#include "cuda/schedule.cuh"

namespace mok::cuda {

// An operand for threads that load it themselves.
struct ProductOperand {
  const uint16_t *base;
  int64_t pitch;           // elements between rows
  int64_t group_elements;  // from one group's matrix to the next
  const int32_t *rows;     // gathered rows, or NULL
  int32_t aligned;         // every row starts at a multiple of 16 bytes
};

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

// The tiles, one struct a tile in product_bf16_*.cu. The order is the table's (product.cu).
enum class TileKind : int32_t { k128x256Pair, k128x256, k128x128, k64x256, k64x128 };

// One function a tile: launches the kernel for this majorness, or MOK_INTERNAL if the table has no such kernel.
using LaunchProduct = mok_status (*)(const mok_context &, const ProductLaunch &, bool a_mn, bool b_mn);
mok_status launch_128x256_pair(const mok_context &, const ProductLaunch &, bool a_mn, bool b_mn);
mok_status launch_128x256(const mok_context &, const ProductLaunch &, bool a_mn, bool b_mn);
mok_status launch_128x128(const mok_context &, const ProductLaunch &, bool a_mn, bool b_mn);
mok_status launch_64x256(const mok_context &, const ProductLaunch &, bool a_mn, bool b_mn);
mok_status launch_64x128(const mok_context &, const ProductLaunch &, bool a_mn, bool b_mn);
mok_status launch_gather_128x256(const mok_context &, const ProductLaunch &, bool a_mn, bool b_mn);
mok_status launch_gather_64x128(const mok_context &, const ProductLaunch &, bool a_mn, bool b_mn);
mok_status launch_threads_128x256(const mok_context &, const ProductLaunch &, bool a_mn, bool b_mn);
mok_status launch_threads_64x128(const mok_context &, const ProductLaunch &, bool a_mn, bool b_mn);

// fp32 operands: FFMA chains (product_fp32.cu). Operands' base pointers are float.
struct ProductFp32 {
  ProductShape shape;
  const float *a, *b;
  int64_t a_pitch, b_pitch, b_group_elements;
  const int32_t *a_rows, *b_rows;
  int32_t a_aligned, b_aligned;
  ProductOutput out;
};
mok_status launch_product_fp32(const mok_context &, const ProductFp32 &, bool a_mn, bool b_mn);

}  // namespace mok::cuda

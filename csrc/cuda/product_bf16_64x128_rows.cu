// Kernels of the bf16 products with tiles of 64 x 128 whose operands are loaded by threads.
#include "cuda/product_bf16.cuh"

namespace mok::cuda {
namespace {

using Tile = ProductTile<64, 128, 1, 8, 1>;

}  // namespace

mok_status launch_gather_64x128(const mok_context &context, const ProductLaunch &launch, bool a_mn, bool b_mn) {
  if (a_mn) MOK_FAIL(MOK_INTERNAL, "rows of A are gathered in K-major operands only");
  return (b_mn ? launch_product<Tile, false, true, Loading::kGatherA> : launch_product<Tile, false, false, Loading::kGatherA>)(context, launch);
}

mok_status launch_threads_64x128(const mok_context &context, const ProductLaunch &launch, bool a_mn, bool b_mn) {
  if (a_mn) {
    return (b_mn ? launch_product<Tile, true, true, Loading::kThreads> : launch_product<Tile, true, false, Loading::kThreads>)(context, launch);
  }
  return (b_mn ? launch_product<Tile, false, true, Loading::kThreads> : launch_product<Tile, false, false, Loading::kThreads>)(context, launch);
}

}  // namespace mok::cuda

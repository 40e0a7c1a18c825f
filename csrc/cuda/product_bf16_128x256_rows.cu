// Kernels of the bf16 products with tiles of 128 x 256 whose operands are loaded by threads.
#include "cuda/product_bf16.cuh"

namespace mok::cuda {
namespace {

using Tile = ProductTile<128, 256, 2, 4, 1>;

}  // namespace

mok_status launch_gather_128x256(const mok_context &context, const ProductLaunch &launch, bool a_mn, bool b_mn) {
  if (a_mn) MOK_FAIL(MOK_INTERNAL, "rows of A are gathered in K-major operands only");
  return (b_mn ? launch_product<Tile, false, true, Loading::kGatherA> : launch_product<Tile, false, false, Loading::kGatherA>)(context, launch);
}

mok_status launch_threads_128x256(const mok_context &context, const ProductLaunch &launch, bool a_mn, bool b_mn) {
  if (!a_mn || !b_mn) MOK_FAIL(MOK_INTERNAL, "this tile serves MN-major operands only");
  return launch_product<Tile, true, true, Loading::kThreads>(context, launch);
}

}  // namespace mok::cuda

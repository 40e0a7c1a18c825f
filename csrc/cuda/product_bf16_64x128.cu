// Kernels of the bf16 products with tiles of 64 x 128.
#include "cuda/product_bf16.cuh"

namespace mok::cuda {
namespace {

using Tile = ProductTile<64, 128, 1, 8, 1>;

}  // namespace

mok_status launch_64x128(const mok_context &context, const ProductLaunch &launch, bool a_mn, bool b_mn) {
  if (a_mn) {
    return (b_mn ? launch_product<Tile, true, true, Loading::kEngine> : launch_product<Tile, true, false, Loading::kEngine>)(context, launch);
  }
  return (b_mn ? launch_product<Tile, false, true, Loading::kEngine> : launch_product<Tile, false, false, Loading::kEngine>)(context, launch);
}

}  // namespace mok::cuda

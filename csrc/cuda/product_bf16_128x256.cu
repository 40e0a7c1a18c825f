// Kernels of the bf16 products with tiles of 128 x 256.
#include "cuda/product_bf16.cuh"

namespace mok::cuda {
namespace {

using Tile = ProductTile<128, 256, 2, 4, 1>;

}  // namespace

mok_status launch_128x256(const mok_context &context, const ProductLaunch &launch, bool a_mn, bool b_mn) {
  if (a_mn) {
    return (b_mn ? launch_product<Tile, true, true, Loading::kEngine> : launch_product<Tile, true, false, Loading::kEngine>)(context, launch);
  }
  return (b_mn ? launch_product<Tile, false, true, Loading::kEngine> : launch_product<Tile, false, false, Loading::kEngine>)(context, launch);
}

}  // namespace mok::cuda

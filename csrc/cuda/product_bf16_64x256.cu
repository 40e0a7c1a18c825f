// Kernels of the bf16 products with tiles of 64 x 256.
#include "cuda/product_bf16.cuh"

namespace mok::cuda {
namespace {

using Tile = ProductTile<64, 256, 1, 5, 1>;

}  // namespace

mok_status launch_64x256(const mok_context &context, const ProductLaunch &launch, Loading, bool a_mn, bool b_mn) {
  return launch_engine<Tile>(context, launch, a_mn, b_mn);
}

}  // namespace mok::cuda

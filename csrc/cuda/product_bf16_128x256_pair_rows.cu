// Kernels of the bf16 products with tiles of 128 x 256, two CTAs sharing B; the threads load operands.
#include "cuda/product_bf16.cuh"

namespace mok::cuda {
namespace {

using Tile = ProductTile<128, 256, 2, 4, 2>;

}  // namespace

mok_status launch_128x256_pair_rows(const mok_context &context, const ProductLaunch &launch, Loading loading, bool a_mn,
                                    bool b_mn) {
  return launch_gather<Tile>(context, launch, loading, a_mn, b_mn);
}

}  // namespace mok::cuda

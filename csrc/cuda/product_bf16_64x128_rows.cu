// Kernels of the bf16 products with tiles of 64 x 128; the threads load operands.
#include "cuda/product_bf16.cuh"

namespace mok::cuda {
namespace {

using Tile = ProductTile<64, 128, 1, 8, 1>;

}  // namespace

mok_status launch_64x128_rows(const mok_context &context, const ProductLaunch &launch, Loading loading, bool a_mn, bool b_mn) {
  if (loading != Loading::kThreads) return launch_gather<Tile>(context, launch, loading, a_mn, b_mn);
  constexpr Loading threads = Loading::kThreads;
  if (a_mn) {
    return (b_mn ? launch_product<Tile, true, true, threads> : launch_product<Tile, true, false, threads>)(context, launch);
  }
  return (b_mn ? launch_product<Tile, false, true, threads> : launch_product<Tile, false, false, threads>)(context, launch);
}

}  // namespace mok::cuda

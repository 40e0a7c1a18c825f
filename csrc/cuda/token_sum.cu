#include "cuda/token_sum.cuh"

namespace mok::cuda {
namespace {

// A warp a column.
__global__ void __launch_bounds__(kRowThreads)
    token_join_kernel(int64_t blocks, int64_t columns, const float *partial, float *grad) {
  const int64_t column = warp_row();
  if (column >= columns) return;
  const float sum = warp_tree(blocks, [&](int64_t block) { return partial[block * columns + column]; });
  if (lane_index() == 0) grad[column] = f32::canonical(f32::add(grad[column], sum));
}

}  // namespace

mok_status join_token_blocks(const mok_context *context, int64_t blocks, int64_t columns, const float *partial, float *grad) {
  token_join_kernel<<<grid_of(columns, kRowWarps), kRowThreads, 0, context->stream>>>(blocks, columns, partial, grad);
  MOK_LAUNCHED();
  return MOK_OK;
}

}  // namespace mok::cuda

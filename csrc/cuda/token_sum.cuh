// Token sums (docs/arithmetic.md 5.3): the gradients of norm weights.
#pragma once

#include "cuda/rows.cuh"

namespace mok::cuda {

// partial[block, column]: the ascending chain sum = fma(a, b, sum) over the block's rows, where term(row, column) = (a, b).
template <typename Term>
__global__ void __launch_bounds__(kRowThreads) token_blocks_kernel(Term term, int64_t rows, int64_t columns, float *partial) {
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kTokenBlock;
  if (column >= columns) return;
  const int64_t last = min(rows, first + kTokenBlock);
  float sum = 0.0f;
#pragma unroll 4
  for (int64_t row = first; row < last; ++row) {
    const float2 pair = term(row, column);
    sum = f32::fma(pair.x, pair.y, sum);
  }
  partial[blockIdx.y * columns + column] = sum;
}

// grad[column] += Tree over the blocks of partial [blocks, columns].
mok_status join_token_blocks(const mok_context *context, int64_t blocks, int64_t columns, const float *partial, float *grad);

// grad_weight += TokenSum over `rows`.
template <typename Term>
mok_status add_token_sum(const mok_context *context, const Term &term, int64_t rows, int64_t columns, float *grad_weight) {
  const int64_t blocks = divide_up(rows, kTokenBlock);
  MOK_REQUIRE(blocks <= 65535, "a norm's gradient has %" PRId64 " rows; allowed: at most %" PRId64, rows, 65535 * kTokenBlock);
  Scratch partial(context->stream);
  MOK_TRY(partial.take(static_cast<size_t>(blocks * columns) * sizeof(float)));
  if (blocks > 0) {
    const dim3 grid(grid_of(columns, kRowThreads), static_cast<unsigned>(blocks));
    token_blocks_kernel<<<grid, kRowThreads, 0, context->stream>>>(term, rows, columns, partial.as<float>());
    MOK_LAUNCHED();
  }
  return join_token_blocks(context, blocks, columns, partial.as<float>(), grad_weight);
}

}  // namespace mok::cuda

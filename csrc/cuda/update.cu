// The gradient's norm and AdamW (docs/arithmetic.md section 13).
#include "cuda/rows.cuh"

namespace mok::cuda {
namespace {

constexpr int64_t kSquare = 64;  // rows and columns of a block of the sum of squares
constexpr int kJoinThreads = 1024;

// A CTA a block: 8 threads a row, 32 rows at a time, then a tree over the rows.
__global__ void __launch_bounds__(kRowThreads)
    square_kernel(const __grid_constant__ mok_sum_squares_args args, int64_t across, float *sums) {
  __shared__ float row_sums[kSquare];
  const int64_t down = (args.rows + kSquare - 1) / kSquare;
  const int64_t block = blockIdx.x;
  const int64_t top = block / across % down * kSquare;
  const int64_t left = block % across * kSquare;
  const float *const matrix = args.in + block / (across * down) * args.rows * args.columns;
  const int64_t width = min(kSquare, args.columns - left);
  const int32_t height = static_cast<int32_t>(min(kSquare, args.rows - top));
#pragma unroll
  for (int32_t part = 0; part < 2; ++part) {
    const int32_t row = static_cast<int32_t>(threadIdx.x) / 8 + part * 32;
    float sum = 0.0f;
    if (row < height) {
      const float *const x = matrix + (top + row) * args.columns + left;
#pragma unroll
      for (int32_t j = 0; j < kSquare; j += kLanes) {
        const int64_t i = j + threadIdx.x % 8;
        const float value = i < width ? x[i] : 0.0f;
        if (i < width) sum = f32::fma(value, value, sum);
      }
    }
    sum = fold_threads(sum);
    if (threadIdx.x % 8 == 0) row_sums[row] = sum;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const float sum = warp_tree(height, [&](int64_t row) { return row_sums[row]; });
    if (threadIdx.x == 0) sums[block] = sum;
  }
}

// out[matrix] = Tree over its blocks: a CTA a matrix, a thread an aligned run.
__global__ void __launch_bounds__(kJoinThreads) square_join_kernel(int64_t blocks, const float *sums, float *out) {
  __shared__ float runs[kJoinThreads];
  const float *const own = sums + blockIdx.x * blocks;
  int64_t run = 1;
  while (run * kJoinThreads < blocks) run *= 2;
  TreeSum tree;
  tree_start(&tree);
  for (int64_t i = threadIdx.x * run; i < (threadIdx.x + 1) * run && i < blocks; ++i) tree_add(&tree, own[i]);
  runs[threadIdx.x] = tree_result(&tree);
  __syncthreads();
  if (threadIdx.x < 32) {
    const float sum = warp_tree((blocks + run - 1) / run, [&](int64_t i) { return runs[i]; });
    if (threadIdx.x == 0) out[blockIdx.x] = f32::canonical(sum);
  }
}

__global__ void __launch_bounds__(kRowThreads) adamw_kernel(const __grid_constant__ mok_adamw_args a) {
  if (*a.status != 0) return;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (i >= a.count) return;
  const float g = f32::mul(f32::mul(a.grad[i], a.grad_scale), a.clip_scale);
  const float m = f32::fma(a.beta1, a.first[i], f32::mul(a.one_minus_beta1, g));
  const float v = f32::fma(a.beta2, a.second[i], f32::mul(a.one_minus_beta2, f32::mul(g, g)));
  const float u = f32::div(f32::mul(m, a.correction1), f32::add(f32::root(f32::mul(v, a.correction2)), a.epsilon));
  const float w = f32::canonical(f32::fma(-a.lr, f32::fma(a.weight_decay, a.weight[i], u), a.weight[i]));
  a.first[i] = f32::canonical(m);
  a.second[i] = f32::canonical(v);
  a.weight[i] = w;
  if (a.operand != nullptr) a.operand[i] = to_bf16(w);
}

mok_status sum_squares(const mok_context *context, const mok_sum_squares_args *args) {
  MOK_REQUIRE(args->matrices >= 0 && args->rows >= 0 && args->columns >= 0,
              "matrices, rows, columns are %" PRId64 ", %" PRId64 ", %" PRId64 "; allowed: 0 or more", args->matrices, args->rows,
              args->columns);
  int64_t elements = 0;
  MOK_REQUIRE(!__builtin_mul_overflow(args->rows, args->columns, &elements) &&
                  !__builtin_mul_overflow(elements, args->matrices, &elements) && elements <= INT64_MAX / 4,
              "matrices, rows, columns are %" PRId64 ", %" PRId64 ", %" PRId64 "; allowed: a product that fits memory",
              args->matrices, args->rows, args->columns);
  MOK_REQUIRE_POINTER(args->in, elements);
  MOK_REQUIRE_POINTER(args->out, args->matrices);
  if (args->matrices == 0) return MOK_OK;
  const int64_t across = divide_up(args->columns, kSquare);
  const int64_t blocks = divide_up(args->rows, kSquare) * across;
  MOK_REQUIRE(args->matrices <= kRowsMax && args->matrices * blocks <= kRowsMax,
              "%" PRId64 " matrices of %" PRId64 " blocks; allowed: at most %" PRId64 " blocks in all", args->matrices, blocks,
              kRowsMax);
  Scratch sums(context->stream);
  MOK_TRY(sums.take(static_cast<size_t>(args->matrices * blocks) * sizeof(float)));
  if (blocks > 0) {
    square_kernel<<<static_cast<unsigned>(args->matrices * blocks), kRowThreads, 0, context->stream>>>(*args, across,
                                                                                                       sums.as<float>());
    MOK_LAUNCHED();
  }
  square_join_kernel<<<static_cast<unsigned>(args->matrices), kJoinThreads, 0, context->stream>>>(blocks, sums.as<float>(),
                                                                                                  args->out);
  MOK_LAUNCHED();
  return MOK_OK;
}

mok_status adamw(const mok_context *context, const mok_adamw_args *args) {
  MOK_REQUIRE(args->count >= 0, "count is %" PRId64 "; allowed: 0 or more", args->count);
  MOK_REQUIRE_POINTER(args->weight, args->count);
  MOK_REQUIRE_POINTER(args->first, args->count);
  MOK_REQUIRE_POINTER(args->second, args->count);
  MOK_REQUIRE_POINTER(args->grad, args->count);
  MOK_REQUIRE(args->status != nullptr, "status is NULL; allowed: a pointer to the step's status");
  if (args->count == 0) return MOK_OK;
  adamw_kernel<<<grid_of(args->count, kRowThreads), kRowThreads, 0, context->stream>>>(*args);
  MOK_LAUNCHED();
  return MOK_OK;
}

}  // namespace
}  // namespace mok::cuda

extern "C" MOK_API mok_status mok_sum_squares(mok_context *context, const mok_sum_squares_args *args) {
  return mok::cuda::enter("mok_sum_squares", context, args, [&] { return mok::cuda::sum_squares(context, args); });
}

extern "C" MOK_API mok_status mok_adamw(mok_context *context, const mok_adamw_args *args) {
  return mok::cuda::enter("mok_adamw", context, args, [&] { return mok::cuda::adamw(context, args); });
}

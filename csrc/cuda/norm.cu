// RMSNorm (docs/arithmetic.md section 7): a warp a row.
#include "cuda/token_sum.cuh"

namespace mok::cuda {
namespace {

template <bool BF16>
__global__ void __launch_bounds__(kRowThreads) forward_kernel(const __grid_constant__ mok_rmsnorm_forward_args args) {
  const int64_t row = warp_row();
  if (row >= args.rows) return;
  const int64_t columns = args.columns;
  const float *const x = args.x + row * columns;
  const float squares = warp_row_sum(columns, [=](float sum, int64_t i) { return f32::fma(x[i], x[i], sum); });
  const float inverse = f32::div(1.0f, static_cast<float>(columns));
  const float rstd = f32::rsqrt(f32::fma(squares, inverse, args.epsilon));
  if (lane_index() == 0) args.rstd[row] = rstd;
#pragma unroll 8
  for (int64_t i = lane_index(); i < columns; i += 32) {
    store_operand<BF16>(args.out, row * columns + i, f32::mul(f32::mul(x[i], rstd), args.weight[i]));
  }
}

__global__ void __launch_bounds__(kRowThreads) backward_kernel(const __grid_constant__ mok_rmsnorm_backward_args args) {
  const int64_t row = warp_row();
  if (row >= args.rows) return;
  const int64_t columns = args.columns;
  const float *const x = args.x + row * columns;
  const float *const g = args.grad_out + row * columns;
  const float *const weight = args.weight;
  const float rstd = args.rstd[row];
  const float dot =
      warp_row_sum(columns, [=](float sum, int64_t i) { return f32::fma(f32::mul(g[i], weight[i]), f32::mul(x[i], rstd), sum); });
  const float mean = f32::mul(dot, f32::div(1.0f, static_cast<float>(columns)));
  float *const out = args.grad_x + row * columns;
#pragma unroll 4
  for (int64_t i = lane_index(); i < columns; i += 32) {
    const float gradient = f32::mul(rstd, f32::fma(-f32::mul(x[i], rstd), mean, f32::mul(g[i], weight[i])));
    out[i] = f32::canonical(args.addend != nullptr ? f32::add(args.addend[row * columns + i], gradient) : gradient);
  }
}

struct WeightTerm {
  const float *x, *grad_out, *rstd;
  int64_t columns;

  __device__ float2 operator()(int64_t row, int64_t column) const {
    const int64_t at = row * columns + column;
    return make_float2(grad_out[at], f32::mul(x[at], rstd[row]));
  }
};

mok_status forward(const mok_context *context, const mok_rmsnorm_forward_args *args) {
  MOK_TRY(check_precision(args->precision));
  MOK_REQUIRE_RANGE(args, rows, 0, kRowsMax);
  MOK_REQUIRE_RANGE(args, columns, 1, kWidthMax);
  MOK_REQUIRE(args->epsilon >= 0.0f, "epsilon is %g; allowed: 0 or more", static_cast<double>(args->epsilon));
  MOK_REQUIRE_POINTER(args->x, args->rows);
  MOK_REQUIRE_POINTER(args->weight, args->rows);
  MOK_REQUIRE_POINTER(args->out, args->rows);
  MOK_REQUIRE_POINTER(args->rstd, args->rows);
  if (args->rows == 0) return MOK_OK;
  for_precision(args->precision, [&](auto bf16) {
    forward_kernel<bf16.value><<<grid_of(args->rows, kRowWarps), kRowThreads, 0, context->stream>>>(*args);
  });
  MOK_LAUNCHED();
  return MOK_OK;
}

mok_status backward(const mok_context *context, const mok_rmsnorm_backward_args *args) {
  MOK_REQUIRE_RANGE(args, rows, 0, kRowsMax);
  MOK_REQUIRE_RANGE(args, columns, 1, kWidthMax);
  MOK_REQUIRE_POINTER(args->x, args->rows);
  MOK_REQUIRE_POINTER(args->weight, args->rows);
  MOK_REQUIRE_POINTER(args->rstd, args->rows);
  MOK_REQUIRE_POINTER(args->grad_out, args->rows);
  MOK_REQUIRE_POINTER(args->grad_x, args->rows);
  if (args->grad_weight != nullptr) {  // first: grad_x may be what it reads
    MOK_TRY(add_token_sum(context, WeightTerm{args->x, args->grad_out, args->rstd, args->columns}, args->rows, args->columns,
                          args->grad_weight));
  }
  if (args->rows == 0) return MOK_OK;
  backward_kernel<<<grid_of(args->rows, kRowWarps), kRowThreads, 0, context->stream>>>(*args);
  MOK_LAUNCHED();
  return MOK_OK;
}

}  // namespace
}  // namespace mok::cuda

extern "C" MOK_API mok_status mok_rmsnorm_forward(mok_context *context, const mok_rmsnorm_forward_args *args) {
  return mok::cuda::enter("mok_rmsnorm_forward", context, args, [&] { return mok::cuda::forward(context, args); });
}

extern "C" MOK_API mok_status mok_rmsnorm_backward(mok_context *context, const mok_rmsnorm_backward_args *args) {
  return mok::cuda::enter("mok_rmsnorm_backward", context, args, [&] { return mok::cuda::backward(context, args); });
}

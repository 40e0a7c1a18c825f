// RMSNorm (docs/arithmetic.md section 7): a warp a row.
#include "cuda/token_sum.cuh"

namespace mok::cuda {
namespace {

// RUNS: rows are read in runs of eight columns.
template <bool BF16, bool RUNS>
__global__ void __launch_bounds__(kRowThreads) forward_kernel(const __grid_constant__ mok_rmsnorm_forward_args args) {
  const int64_t row = warp_row();
  if (row >= args.rows) return;
  const int64_t columns = args.columns;
  const float *const x = args.x + row * columns;
  float squares;
  if constexpr (RUNS) {
    squares = warp_row_sum_runs(columns, [=](int64_t i, float (&a)[8], float (&b)[8]) {
      load_eight(a, x + i);
#pragma unroll
      for (int j = 0; j < 8; ++j) b[j] = a[j];
    });
  } else {
    squares = warp_row_sum(columns, [=](float sum, int64_t i) { return f32::fma(x[i], x[i], sum); });
  }
  const float inverse = f32::div(1.0f, static_cast<float>(columns));
  const float rstd = f32::rsqrt(f32::fma(squares, inverse, args.epsilon));
  if (lane_index() == 0) args.rstd[row] = rstd;
  if constexpr (RUNS) {
    for (int64_t i = 8 * lane_index(); i < columns; i += 256) {
      float value[8], weight[8];
      load_eight(value, x + i);
      load_eight(weight, args.weight + i);
#pragma unroll
      for (int j = 0; j < 8; ++j) value[j] = f32::mul(f32::mul(value[j], rstd), weight[j]);
      store_eight_operands<BF16>(args.out, row * columns + i, value);
    }
  } else {
    for (int64_t i = lane_index(); i < columns; i += 32) {
      store_operand<BF16>(args.out, row * columns + i, f32::mul(f32::mul(x[i], rstd), args.weight[i]));
    }
  }
}

// The gradient of x at one column.
__device__ __forceinline__ float gradient_of_x(float x, float weight, float g, float rstd, float mean) {
  return f32::mul(rstd, f32::fma(-f32::mul(x, rstd), mean, f32::mul(g, weight)));
}

template <bool RUNS>
__global__ void __launch_bounds__(kRowThreads) backward_kernel(const __grid_constant__ mok_rmsnorm_backward_args args) {
  const int64_t row = warp_row();
  if (row >= args.rows) return;
  const int64_t columns = args.columns;
  const float *const x = args.x + row * columns;
  const float *const g = args.grad_out + row * columns;
  const float *const weight = args.weight;
  const float *const addend = args.addend != nullptr ? args.addend + row * columns : nullptr;
  float *const out = args.grad_x + row * columns;
  const float rstd = args.rstd[row];
  float dot;
  if constexpr (RUNS) {
    dot = warp_row_sum_runs(columns, [=](int64_t i, float (&a)[8], float (&b)[8]) {
      float w[8];
      load_eight(a, g + i);
      load_eight(w, weight + i);
      load_eight(b, x + i);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        a[j] = f32::mul(a[j], w[j]);
        b[j] = f32::mul(b[j], rstd);
      }
    });
  } else {
    dot = warp_row_sum(columns,
                       [=](float sum, int64_t i) { return f32::fma(f32::mul(g[i], weight[i]), f32::mul(x[i], rstd), sum); });
  }
  const float mean = f32::mul(dot, f32::div(1.0f, static_cast<float>(columns)));
  if constexpr (RUNS) {
    for (int64_t i = 8 * lane_index(); i < columns; i += 256) {
      float xs[8], gs[8], ws[8], rest[8];
      load_eight(xs, x + i);
      load_eight(gs, g + i);
      load_eight(ws, weight + i);
      if (addend != nullptr) load_eight(rest, addend + i);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        xs[j] = gradient_of_x(xs[j], ws[j], gs[j], rstd, mean);
        if (addend != nullptr) xs[j] = f32::add(rest[j], xs[j]);
      }
      store_eight(out + i, xs);
    }
  } else {
    for (int64_t i = lane_index(); i < columns; i += 32) {
      const float gradient = gradient_of_x(x[i], weight[i], g[i], rstd, mean);
      out[i] = f32::canonical(addend != nullptr ? f32::add(addend[i], gradient) : gradient);
    }
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
  const bool runs = runs_of_eight(args->columns, args->x, args->weight, static_cast<const char *>(args->out));
  const unsigned grid = grid_of(args->rows, kRowWarps);
  for_precision(args->precision, [&](auto bf16) {
    for_condition(runs, [&](auto eight) {
      forward_kernel<decltype(bf16)::value, decltype(eight)::value><<<grid, kRowThreads, 0, context->stream>>>(*args);
    });
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
  const bool runs = runs_of_eight(args->columns, args->x, args->weight, args->grad_out, args->addend, args->grad_x);
  for_condition(runs, [&](auto eight) {
    backward_kernel<decltype(eight)::value><<<grid_of(args->rows, kRowWarps), kRowThreads, 0, context->stream>>>(*args);
  });
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

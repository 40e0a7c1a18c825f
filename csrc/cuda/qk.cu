// Query/key norm and rotary embedding (docs/arithmetic.md section 8): a warp a norm row, which is one head of a token (norm
// `head`) or all heads of a token (`full`, and where there is no norm).
#include "cuda/token_sum.cuh"

namespace mok::cuda {
namespace {

int64_t row_heads(int32_t norm, int64_t heads) { return norm == MOK_QK_NORM_HEAD ? 1 : heads; }

// Where norm row `row` lies.
struct NormRow {
  int64_t token, column;  // its first column in the token's row

  __device__ __forceinline__ NormRow(int64_t row, int64_t columns, int64_t token_columns) {
    const int64_t rows = token_columns / columns;
    token = row / rows;
    column = row % rows * columns;
  }
};

// Row of the cosine and sine table; the first one where the position is negative.
__device__ __forceinline__ const float *table_row(const float *cos_sin, const int32_t *positions, int64_t token,
                                                  int64_t head_size, FaultSlot fault) {
  const int64_t position = positions[token];
  return cos_sin + (allowed(fault, FaultKind::kPosition, token, position, 0, INT32_MAX) ? position * head_size : 0);
}

template <bool BF16>
__global__ void __launch_bounds__(kRowThreads)
    forward_kernel(const __grid_constant__ mok_qk_forward_args args, int64_t rows, int64_t columns, FaultSlot fault) {
  const int64_t row = warp_row();
  if (row >= rows) return;
  const int64_t size = args.head_size;
  const int64_t half = size / 2;
  const NormRow at(row, columns, args.heads * size);
  const int64_t in = at.token * args.ld_in + at.column;
  const float *const cos = table_row(args.cos_sin, args.positions, at.token, size, fault);
  const float *const sin = cos + half;
  const bool normed = args.norm != MOK_QK_NORM_NONE;
  float rstd = 1.0f;
  if (normed) {
    const float squares = warp_row_sum(columns, [&](float sum, int64_t i) {
      const float x = load_operand<BF16>(args.in, in + i);
      return f32::fma(x, x, sum);
    });
    rstd = f32::rsqrt(f32::fma(squares, f32::div(1.0f, static_cast<float>(columns)), args.epsilon));
    if (lane_index() == 0) args.rstd[row] = rstd;
  }
  const auto value = [&](int64_t i) {
    const float x = load_operand<BF16>(args.in, in + i);
    return normed ? f32::mul(f32::mul(x, rstd), args.weight[i]) : x;
  };
  for (int64_t pair = lane_index(); pair < columns / 2; pair += 32) {
    const int64_t i = pair % half;
    const int64_t low_column = pair / half * size + i;
    const float low = value(low_column);
    const float high = value(low_column + half);
    const int64_t out = row * columns + low_column;
    store_operand<BF16>(args.out, out, f32::fma(low, cos[i], -f32::mul(high, sin[i])));
    store_operand<BF16>(args.out, out + half, f32::fma(high, cos[i], f32::mul(low, sin[i])));
  }
}

// The gradient of the rotation's input at a column of a norm row whose gradients start at g.
__device__ __forceinline__ float rotated_back(const float *g, const float *cos, int64_t size, int64_t column) {
  const int64_t half = size / 2;
  const int64_t within = column % size;
  const int64_t i = within % half;
  const float *const head = g + column - within;
  const float low = head[i];
  const float high = head[i + half];
  const float sin = cos[half + i];
  return within < half ? f32::fma(low, cos[i], f32::mul(high, sin)) : f32::fma(high, cos[i], -f32::mul(low, sin));
}

template <bool BF16>
__global__ void __launch_bounds__(kRowThreads)
    backward_kernel(const __grid_constant__ mok_qk_backward_args args, int64_t rows, int64_t columns, FaultSlot fault) {
  const int64_t row = warp_row();
  if (row >= rows) return;
  const int64_t size = args.head_size;
  const NormRow at(row, columns, args.heads * size);
  const int64_t in = at.token * args.ld_in + at.column;
  const float *const g = args.grad_out + row * columns;
  const float *const cos = table_row(args.cos_sin, args.positions, at.token, size, fault);
  const bool normed = args.norm != MOK_QK_NORM_NONE;
  const float rstd = normed ? args.rstd[row] : 1.0f;
  float mean = 0.0f;
  if (normed) {
    const float dot = warp_row_sum(columns, [&](float sum, int64_t i) {
      const float xh = f32::mul(load_operand<BF16>(args.in, in + i), rstd);
      return f32::fma(f32::mul(rotated_back(g, cos, size, i), args.weight[i]), xh, sum);
    });
    mean = f32::mul(dot, f32::div(1.0f, static_cast<float>(columns)));
  }
  for (int64_t i = lane_index(); i < columns; i += 32) {
    float gradient = rotated_back(g, cos, size, i);
    if (normed) {
      const float xh = f32::mul(load_operand<BF16>(args.in, in + i), rstd);
      gradient = f32::mul(rstd, f32::fma(-xh, mean, f32::mul(gradient, args.weight[i])));
    }
    store_operand<BF16>(args.grad_in, at.token * args.ld_grad_in + at.column + i, gradient);
  }
}

template <bool BF16>
struct WeightTerm {
  mok_qk_backward_args args;
  int64_t columns;

  __device__ float2 operator()(int64_t row, int64_t column) const {
    const NormRow at(row, columns, args.heads * args.head_size);
    const float *const cos = args.cos_sin + max(0, args.positions[at.token]) * args.head_size;
    const float x = load_operand<BF16>(args.in, at.token * args.ld_in + at.column + column);
    return make_float2(rotated_back(args.grad_out + row * columns, cos, args.head_size, column), f32::mul(x, args.rstd[row]));
  }
};

template <typename Args>
mok_status check(const Args *args) {
  MOK_TRY(check_precision(args->precision));
  MOK_REQUIRE(args->norm >= MOK_QK_NORM_NONE && args->norm <= MOK_QK_NORM_FULL,
              "norm is %d; allowed: 0 (none), 1 (head), 2 (full)", args->norm);
  MOK_REQUIRE_RANGE(args, tokens, 0, kRowsMax);
  MOK_REQUIRE_RANGE(args, heads, 1, kWidthMax);
  MOK_REQUIRE_RANGE(args, head_size, 2, kWidthMax);
  MOK_REQUIRE(args->head_size % 2 == 0, "head_size is %" PRId64 "; allowed: even numbers", args->head_size);
  MOK_REQUIRE(args->ld_in >= args->heads * args->head_size,
              "ld_in is %" PRId64 "; allowed: heads * head_size = %" PRId64 " or more", args->ld_in,
              args->heads * args->head_size);
  MOK_REQUIRE_POINTER(args->in, args->tokens);
  MOK_REQUIRE_POINTER(args->positions, args->tokens);
  MOK_REQUIRE_POINTER(args->cos_sin, args->tokens);
  if (args->norm != MOK_QK_NORM_NONE) {
    MOK_REQUIRE_POINTER(args->weight, args->tokens);
    MOK_REQUIRE_POINTER(args->rstd, args->tokens);
  }
  return MOK_OK;
}

mok_status forward(const mok_context *context, const mok_qk_forward_args *args) {
  MOK_TRY(check(args));
  MOK_REQUIRE(args->epsilon >= 0.0f, "epsilon is %g; allowed: 0 or more", static_cast<double>(args->epsilon));
  MOK_REQUIRE_POINTER(args->out, args->tokens);
  if (args->tokens == 0) return MOK_OK;
  const int64_t heads = row_heads(args->norm, args->heads);
  const int64_t rows = args->tokens * (args->heads / heads);
  for_precision(args->precision, [&](auto bf16) {
    forward_kernel<bf16.value>
        <<<grid_of(rows, kRowWarps), kRowThreads, 0, context->stream>>>(*args, rows, heads * args->head_size, context->fault);
  });
  MOK_LAUNCHED();
  return MOK_OK;
}

mok_status backward(const mok_context *context, const mok_qk_backward_args *args) {
  MOK_TRY(check(args));
  MOK_REQUIRE(args->ld_grad_in >= args->heads * args->head_size,
              "ld_grad_in is %" PRId64 "; allowed: heads * head_size = %" PRId64 " or more", args->ld_grad_in,
              args->heads * args->head_size);
  MOK_REQUIRE_POINTER(args->grad_out, args->tokens);
  MOK_REQUIRE_POINTER(args->grad_in, args->tokens);
  const int64_t heads = row_heads(args->norm, args->heads);
  const int64_t rows = args->tokens * (args->heads / heads);
  const int64_t columns = heads * args->head_size;
  if (args->norm != MOK_QK_NORM_NONE && args->grad_weight != nullptr) {
    MOK_TRY(args->precision == MOK_BF16
                ? add_token_sum(context, WeightTerm<true>{*args, columns}, rows, columns, args->grad_weight)
                : add_token_sum(context, WeightTerm<false>{*args, columns}, rows, columns, args->grad_weight));
  }
  if (args->tokens == 0) return MOK_OK;
  for_precision(args->precision, [&](auto bf16) {
    backward_kernel<bf16.value>
        <<<grid_of(rows, kRowWarps), kRowThreads, 0, context->stream>>>(*args, rows, columns, context->fault);
  });
  MOK_LAUNCHED();
  return MOK_OK;
}

}  // namespace
}  // namespace mok::cuda

extern "C" MOK_API mok_status mok_qk_forward(mok_context *context, const mok_qk_forward_args *args) {
  return mok::cuda::enter("mok_qk_forward", context, args, [&] { return mok::cuda::forward(context, args); });
}

extern "C" MOK_API mok_status mok_qk_backward(mok_context *context, const mok_qk_backward_args *args) {
  return mok::cuda::enter("mok_qk_backward", context, args, [&] { return mok::cuda::backward(context, args); });
}

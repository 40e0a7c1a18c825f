#include "cpu/isa/qk.h"

#include <cstring>

#include "common/sums.h"
#include "cpu/isa/operand.h"

namespace MOK_ISA_NS {
namespace {

// Where a norm row lies.
struct NormRow {
  int64_t token, head;  // its first head
};

NormRow norm_row(int64_t row, int64_t heads, int64_t row_heads) {
  const int64_t rows = heads / row_heads;
  return {row / rows, row % rows * row_heads};
}

// n[i] = (x[i]*rstd) * w[i]; returns rstd.
float normalise(int64_t columns, float epsilon, const float *x, const float *weight, float *n) {
  const float squares = mok::row_sum(columns, [=](float lane, int64_t i) { return mok::f32::fma(x[i], x[i], lane); });
  const float inverse = 1.0f / static_cast<float>(columns);
  const float rstd = 1.0f / mok::f32::root(mok::f32::fma(squares, inverse, epsilon));
  for (int64_t i = 0; i < columns; ++i) n[i] = (x[i] * rstd) * weight[i];
  return rstd;
}

void rotate(int64_t half, const float *cos, const float *sin, const float *__restrict n, float *__restrict out) {
  const float *const low = n, *const high = n + half;
  for (int64_t i = 0; i < half; ++i) {
    out[i] = mok::f32::fma(low[i], cos[i], -(high[i] * sin[i]));
    out[i + half] = mok::f32::fma(high[i], cos[i], low[i] * sin[i]);
  }
}

void rotate_back(int64_t half, const float *cos, const float *sin, const float *__restrict gradient, float *__restrict out) {
  const float *const low = gradient, *const high = gradient + half;
  for (int64_t i = 0; i < half; ++i) {
    out[i] = mok::f32::fma(low[i], cos[i], high[i] * sin[i]);
    out[i + half] = mok::f32::fma(high[i], cos[i], -(low[i] * sin[i]));
  }
}

// From the gradient g of n to the gradient of x, in place; weight_sum[i] = fma(g, xh, weight_sum[i]).
void norm_backward(int64_t columns, float rstd, const float *__restrict x, const float *__restrict weight, float *__restrict g,
                   float *__restrict normed, float *__restrict weight_sum) {
  for (int64_t i = 0; i < columns; ++i) normed[i] = x[i] * rstd;
  if (weight_sum != nullptr) {
    for (int64_t i = 0; i < columns; ++i) weight_sum[i] = mok::f32::fma(g[i], normed[i], weight_sum[i]);
  }
  for (int64_t i = 0; i < columns; ++i) g[i] = g[i] * weight[i];
  const float sum = mok::row_sum(columns, [=](float lane, int64_t i) { return mok::f32::fma(g[i], normed[i], lane); });
  const float mean = sum * (1.0f / static_cast<float>(columns));
  for (int64_t i = 0; i < columns; ++i) g[i] = rstd * mok::f32::fma(-normed[i], mean, g[i]);
}

size_t scratch_size(int64_t columns) { return 3 * mok::float_bytes(columns); }

void forward(const mok_qk_forward_args *args, int64_t begin, int64_t end, mok::Scratch *scratch) {
  const int64_t size = args->head_size, row_heads = qk_row_heads(args->norm, args->heads), columns = row_heads * size;
  float *const room = mok::take_floats(scratch, columns), *const n = mok::take_floats(scratch, columns);
  float *const out = mok::take_floats(scratch, columns);
  for (int64_t row = begin; row < end; ++row) {
    const NormRow at = norm_row(row, args->heads, row_heads);
    const void *const in = mok::operand_at(args->precision, args->in, at.token * args->ld_in + at.head * size);
    const float *const x = mok::widen_row(args->precision, columns, in, room);
    const float *const cos = args->cos_sin + args->positions[at.token] * size;
    if (args->norm != MOK_QK_NORM_NONE) {
      args->rstd[row] = mok::f32::canonical(normalise(columns, args->epsilon, x, args->weight, n));
    }
    const float *const normed = args->norm != MOK_QK_NORM_NONE ? n : x;
    for (int64_t i = 0; i < columns; i += size) rotate(size / 2, cos, cos + size / 2, normed + i, out + i);
    mok::store_row(args->precision, columns, out, mok::operand_at(args->precision, args->out, row * columns));
  }
}

void backward(const mok_qk_backward_args *args, int64_t begin, int64_t end, float *weight_sum, mok::Scratch *scratch) {
  const int64_t size = args->head_size, row_heads = qk_row_heads(args->norm, args->heads), columns = row_heads * size;
  float *const room = mok::take_floats(scratch, columns), *const g = mok::take_floats(scratch, columns);
  float *const normed = mok::take_floats(scratch, columns);
  if (weight_sum != nullptr) memset(weight_sum, 0, static_cast<size_t>(columns) * sizeof(float));
  for (int64_t row = begin; row < end; ++row) {
    const NormRow at = norm_row(row, args->heads, row_heads);
    const float *const cos = args->cos_sin + args->positions[at.token] * size;
    for (int64_t i = 0; i < columns; i += size) {
      rotate_back(size / 2, cos, cos + size / 2, args->grad_out + row * columns + i, g + i);
    }
    if (args->norm != MOK_QK_NORM_NONE) {
      const void *const in = mok::operand_at(args->precision, args->in, at.token * args->ld_in + at.head * size);
      const float *const x = mok::widen_row(args->precision, columns, in, room);
      norm_backward(columns, args->rstd[row], x, args->weight, g, normed, weight_sum);
    }
    mok::store_row(args->precision, columns, g,
                   mok::operand_at(args->precision, args->grad_in, at.token * args->ld_grad_in + at.head * size));
  }
}

void add_weight_sums(int64_t blocks, int64_t columns, float *sums, float *grad_weight) {
  for (int64_t step = 1; step < blocks; step *= 2) {
    for (int64_t block = 0; block + step < blocks; block += 2 * step) {
      float *const left = sums + block * columns;
      const float *const right = sums + (block + step) * columns;
      for (int64_t i = 0; i < columns; ++i) left[i] = left[i] + right[i];
    }
  }
  for (int64_t i = 0; i < columns; ++i) grad_weight[i] = mok::f32::canonical(grad_weight[i] + sums[i]);
}

}  // namespace

extern const QkTable qk_table = {scratch_size, forward, backward, add_weight_sums};

}  // namespace MOK_ISA_NS

#include "cpu/isa/rows.h"

#include <cstring>

#include "common/bf16.h"
#include "common/functions.h"
#include "common/sums.h"

namespace MOK_ISA_NS {
namespace {

namespace f32 = mok::f32;

void embedding_forward(const mok_embedding_forward_args *args, int64_t begin, int64_t end) {
  const int64_t hidden = args->hidden;
  for (int64_t token = begin; token < end; ++token) {
    float *const out = args->out + token * hidden;
    const int64_t start = args->ids[token] * hidden;
    if (args->precision == MOK_BF16) {
      const uint16_t *const row = static_cast<const uint16_t *>(args->table) + start;
      for (int64_t i = 0; i < hidden; ++i) out[i] = mok::from_bf16(row[i]);
    } else {
      memcpy(out, static_cast<const float *>(args->table) + start, static_cast<size_t>(hidden) * sizeof(float));
    }
  }
}

void embedding_backward(const mok_embedding_backward_args *args, const int32_t *tokens, int64_t count, int64_t begin,
                        int64_t end) {
  constexpr int64_t kWidth = 64;
  float *const row = args->grad_table + args->ids[tokens[0]] * args->hidden;
  for (int64_t start = begin; start < end; start += kWidth) {
    const int64_t width = end - start < kWidth ? end - start : kWidth;
    float sum[kWidth] = {};
    for (int64_t t = 0; t < count; ++t) {
      const float *const gradient = args->grad_out + tokens[t] * args->hidden + start;
      for (int64_t i = 0; i < width; ++i) sum[i] = f32::add(sum[i], gradient[i]);
    }
    for (int64_t i = 0; i < width; ++i) row[start + i] = f32::canonical(f32::add(row[start + i], sum[i]));
  }
}

void rmsnorm_forward(const mok_rmsnorm_forward_args *args, int64_t begin, int64_t end) {
  const int64_t columns = args->columns;
  const float inverse = f32::div(1.0f, static_cast<float>(columns));
  const float *const weight = args->weight;
  for (int64_t r = begin; r < end; ++r) {
    const float *const x = args->x + r * columns;
    const float squares = mok::row_sum(columns, [=](float lane, int64_t i) { return f32::fma(x[i], x[i], lane); });
    const float rstd = f32::rsqrt(f32::fma(squares, inverse, args->epsilon));
    args->rstd[r] = rstd;
    if (args->precision == MOK_BF16) {
      uint16_t *const out = static_cast<uint16_t *>(args->out) + r * columns;
      for (int64_t i = 0; i < columns; ++i) out[i] = mok::to_bf16(f32::mul(f32::mul(x[i], rstd), weight[i]));
    } else {
      float *const out = static_cast<float *>(args->out) + r * columns;
      for (int64_t i = 0; i < columns; ++i) out[i] = f32::canonical(f32::mul(f32::mul(x[i], rstd), weight[i]));
    }
  }
}

void rmsnorm_backward(const mok_rmsnorm_backward_args *args, int64_t begin, int64_t end) {
  const int64_t columns = args->columns;
  const float inverse = f32::div(1.0f, static_cast<float>(columns));
  const float *const weight = args->weight;
  for (int64_t r = begin; r < end; ++r) {
    const float *const x = args->x + r * columns, *const g = args->grad_out + r * columns;
    const float rstd = args->rstd[r];
    const float dot = mok::row_sum(columns, [=](float lane, int64_t i) {
      return f32::fma(f32::mul(g[i], weight[i]), f32::mul(x[i], rstd), lane);
    });
    const float mean = f32::mul(dot, inverse);
    float *const out = args->grad_x + r * columns;
    const auto gradient = [=](int64_t i) {
      return f32::mul(rstd, f32::fma(-f32::mul(x[i], rstd), mean, f32::mul(g[i], weight[i])));
    };
    if (args->addend != nullptr) {
      const float *const addend = args->addend + r * columns;
      for (int64_t i = 0; i < columns; ++i) out[i] = f32::canonical(f32::add(addend[i], gradient(i)));
    } else {
      for (int64_t i = 0; i < columns; ++i) out[i] = f32::canonical(gradient(i));
    }
  }
}

void rmsnorm_weight_block(const mok_rmsnorm_backward_args *args, int64_t first, int64_t last, int64_t begin, int64_t end,
                          float *sums) {
  memset(sums + begin, 0, static_cast<size_t>(end - begin) * sizeof(float));
  for (int64_t r = first; r < last; ++r) {
    const float *const x = args->x + r * args->columns, *const g = args->grad_out + r * args->columns;
    const float rstd = args->rstd[r];
    for (int64_t i = begin; i < end; ++i) sums[i] = f32::fma(g[i], f32::mul(x[i], rstd), sums[i]);
  }
}

void rmsnorm_weight_join(const mok_rmsnorm_backward_args *args, int64_t blocks, int64_t begin, int64_t end, float *sums) {
  for (int64_t step = 1; step < blocks; step *= 2) {
    for (int64_t block = 0; block + step < blocks; block += 2 * step) {
      float *const left = sums + block * args->columns;
      const float *const right = left + step * args->columns;
      for (int64_t i = begin; i < end; ++i) left[i] = f32::add(left[i], right[i]);
    }
  }
  for (int64_t i = begin; i < end; ++i) args->grad_weight[i] = f32::canonical(f32::add(args->grad_weight[i], sums[i]));
}

}  // namespace

extern const RowsTable rows_table = {embedding_forward, embedding_backward,   rmsnorm_forward,
                                     rmsnorm_backward,  rmsnorm_weight_block, rmsnorm_weight_join};

}  // namespace MOK_ISA_NS

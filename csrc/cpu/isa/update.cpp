#include "cpu/isa/update.h"

#include "common/bf16.h"
#include "common/functions.h"
#include "common/sums.h"

namespace MOK_ISA_NS {
namespace {

namespace f32 = mok::f32;

void square_blocks(int64_t rows, int64_t columns, const float *matrix, int64_t block_row, int64_t first, int64_t last,
                   float *sums) {
  float row_sums[kSquareBlock][kSquareBlocks];
  const int64_t top = block_row * kSquareBlock, blocks = last - first;
  const int64_t height = rows - top < kSquareBlock ? rows - top : kSquareBlock;
  for (int64_t r = 0; r < height; ++r) {
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t left = (first + b) * kSquareBlock;
      const int64_t width = columns - left < kSquareBlock ? columns - left : kSquareBlock;
      const float *const x = matrix + (top + r) * columns + left;
      row_sums[r][b] = mok::row_sum(width, [=](float lane, int64_t i) { return f32::fma(x[i], x[i], lane); });
    }
  }
  for (int64_t step = 1; step < height; step *= 2) {
    for (int64_t r = 0; r + step < height; r += 2 * step) {
      for (int64_t b = 0; b < blocks; ++b) row_sums[r][b] = f32::add(row_sums[r][b], row_sums[r + step][b]);
    }
  }
  for (int64_t b = 0; b < blocks; ++b) sums[b] = row_sums[0][b];
}

float tree(int64_t count, float *x) {
  for (int64_t step = 1; step < count; step *= 2) {
    for (int64_t i = 0; i + step < count; i += 2 * step) x[i] = f32::add(x[i], x[i + step]);
  }
  return count == 0 ? 0.0f : f32::canonical(x[0]);
}

void adamw(const mok_adamw_args *args, int64_t begin, int64_t end) {
  const mok_adamw_args a = *args;  // a copy, so that stores to the arrays can't change it
  float *const __restrict weight = a.weight, *const __restrict first = a.first, *const __restrict second = a.second;
  const float *const __restrict grad = a.grad;
  for (int64_t i = begin; i < end; ++i) {
    const float g = f32::mul(f32::mul(grad[i], a.grad_scale), a.clip_scale);
    const float m = f32::fma(a.beta1, first[i], f32::mul(a.one_minus_beta1, g));
    const float v = f32::fma(a.beta2, second[i], f32::mul(a.one_minus_beta2, f32::mul(g, g)));
    const float u = f32::div(f32::mul(m, a.correction1), f32::add(f32::root(f32::mul(v, a.correction2)), a.epsilon));
    const float w = weight[i];
    first[i] = f32::canonical(m);
    second[i] = f32::canonical(v);
    weight[i] = f32::canonical(f32::fma(-a.lr, f32::fma(a.weight_decay, w, u), w));
  }
  if (a.operand == nullptr) return;
  for (int64_t i = begin; i < end; ++i) a.operand[i] = mok::to_bf16(weight[i]);
}

}  // namespace

extern const UpdateTable update_table = {square_blocks, tree, adamw};

}  // namespace MOK_ISA_NS

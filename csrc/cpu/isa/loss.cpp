#include "cpu/isa/loss.h"

#include <cstring>

#include "common/functions.h"
#include "common/sums.h"
#include "cpu/isa/operand.h"

namespace MOK_ISA_NS {
namespace {

namespace f32 = mok::f32;

constexpr int64_t kPanel = 4096;         // columns of one panel of the exponentials' sum
constexpr float kLossLimit = 0x1p+20f;   // a loss not below it counts as not finite

// The bits of a float as an integer of the same order, -0 below +0. It is its own inverse.
int32_t ordered(int32_t bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }

// The exact maximum; false if some value is infinite or a NaN.
bool maximum(int64_t count, const float *x, float *out) {
  int32_t high = INT32_MIN, low = INT32_MAX;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t key = ordered(static_cast<int32_t>(f32::bits(x[i])));
    high = key > high ? key : high;
    low = key < low ? key : low;
  }
  *out = f32::from_bits(static_cast<uint32_t>(ordered(high)));
  return high < 0x7F800000 && low > ordered(static_cast<int32_t>(0xFF800000u));
}

// e[i] = exp(x[i] - largest); returns their sum.
float exponentials(int64_t count, const float *x, float largest, float *e) {
  mok::TreeSum tree;
  mok::tree_start(&tree);
  for (int64_t start = 0; start < count; start += kPanel) {
    const int64_t width = count - start < kPanel ? count - start : kPanel;
    float *const panel = e + start;
    for (int64_t i = 0; i < width; ++i) panel[i] = f32::exp(f32::sub(x[start + i], largest));
    mok::tree_add(&tree, mok::row_sum(width, [=](float lane, int64_t i) { return f32::add(lane, panel[i]); }));
  }
  return mok::tree_result(&tree);
}

void ignored_row(const mok_cross_entropy_args *args, int64_t row) {
  if (args->grad_logits == nullptr) return;
  void *const gradient = mok::operand_at(args->precision, args->grad_logits, row * args->vocabulary);
  memset(gradient, 0, static_cast<size_t>(args->vocabulary) * mok::operand_bytes(args->precision));
}

bool loss_row(const mok_cross_entropy_args *args, int64_t row, int64_t *loss, float *e) {
  const int64_t count = args->vocabulary, label = args->labels[row];
  const float *const x = args->logits + row * count;
  float largest;
  *loss = 0;
  if (!maximum(count, x, &largest)) {
    ignored_row(args, row);
    return false;
  }
  const float sum = exponentials(count, x, largest, e);
  const float value = f32::sub(f32::add(largest, f32::log(sum)), x[label]);
  const bool finite = f32::absolute(value) < kLossLimit;
  if (finite) *loss = mok::fixed_point(value);
  if (args->grad_logits == nullptr) return finite;
  const float r = f32::div(1.0f, sum);
  const float at_label = f32::fma(e[label], r, -1.0f);
  void *const gradient = mok::operand_at(args->precision, args->grad_logits, row * count);
  for (int64_t i = 0; i < count; ++i) e[i] = f32::mul(e[i], r);
  e[label] = at_label;
  mok::store_row(args->precision, count, e, gradient);
  return finite;
}

}  // namespace

extern const LossTable loss_table = {loss_row, ignored_row};

}  // namespace MOK_ISA_NS

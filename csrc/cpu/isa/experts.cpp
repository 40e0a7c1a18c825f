#include "cpu/isa/experts.h"

#include <cstring>

#include "common/functions.h"
#include "common/sums.h"
#include "cpu/isa/operand.h"

namespace MOK_ISA_NS {
namespace {

namespace f32 = mok::f32;
using mok::float_bytes, mok::operand_at, mok::store_row, mok::take_floats, mok::widen_row;

size_t swiglu_scratch(int64_t intermediate) { return 5 * float_bytes(intermediate); }

void swiglu_forward(const mok_swiglu_forward_args *args, int64_t begin, int64_t end, mok::Scratch *scratch) {
  const int64_t width = args->intermediate;
  float *const gate_room = take_floats(scratch, width), *const up_room = take_floats(scratch, width);
  float *const act = take_floats(scratch, width);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = row * 2 * width;
    const float *const gate = widen_row(args->precision, width, operand_at(args->precision, args->gate_up, at), gate_room);
    const float *const up = widen_row(args->precision, width, operand_at(args->precision, args->gate_up, at + width), up_room);
    for (int64_t i = 0; i < width; ++i) act[i] = f32::silu(gate[i]) * up[i];
    store_row(args->precision, width, act, operand_at(args->precision, args->out, row * width));
  }
}

// The activation again, and the gradients of gate and up for grad_act * weight.
void activation_backward(int32_t precision, int64_t width, float weight, const float *__restrict gate, const float *__restrict up,
                         const float *__restrict grad_act, float *__restrict act, float *__restrict grad_gate,
                         float *__restrict grad_up) {
  for (int64_t i = 0; i < width; ++i) {
    const float s = f32::sigmoid(gate[i]), silu = gate[i] * s, weighted = weight * grad_act[i];
    act[i] = silu * up[i];
    grad_up[i] = weighted * silu;
    grad_gate[i] = (weighted * up[i]) * (s * f32::fma(gate[i], 1.0f - s, 1.0f));  // silu_grad
  }
  if (precision != MOK_BF16) return;
  for (int64_t i = 0; i < width; ++i) act[i] = mok::from_bf16(mok::to_bf16(act[i]));
}

void swiglu_backward(const mok_swiglu_backward_args *args, int64_t begin, int64_t end, mok::Scratch *scratch) {
  const int32_t precision = args->precision;
  const int64_t width = args->intermediate;
  float *const gate_room = take_floats(scratch, width), *const up_room = take_floats(scratch, width);
  float *const act = take_floats(scratch, width);
  float *const grad_gate = take_floats(scratch, width), *const grad_up = take_floats(scratch, width);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = row * 2 * width, slot = args->row_slot != nullptr ? args->row_slot[row] : 0;
    void *const out = operand_at(precision, args->grad_gate_up, at);
    void *const weighted_act = args->weighted_act != nullptr ? operand_at(precision, args->weighted_act, row * width) : nullptr;
    if (slot < 0) {
      memset(out, 0, static_cast<size_t>(2 * width) * mok::operand_bytes(precision));
      if (weighted_act != nullptr) memset(weighted_act, 0, static_cast<size_t>(width) * mok::operand_bytes(precision));
      continue;
    }
    const float weight = args->slot_weight != nullptr ? args->slot_weight[slot] : 1.0f;
    const float *const gate = widen_row(precision, width, operand_at(precision, args->gate_up, at), gate_room);
    const float *const up = widen_row(precision, width, operand_at(precision, args->gate_up, at + width), up_room);
    const float *const grad_act = args->grad_act + row * width;
    activation_backward(precision, width, weight, gate, up, grad_act, act, grad_gate, grad_up);
    if (args->grad_slot_weight != nullptr) {
      const float sum = mok::row_sum(width, [=](float lane, int64_t i) { return f32::fma(grad_act[i], act[i], lane); });
      args->grad_slot_weight[slot] = f32::canonical(sum);
    }
    store_row(precision, width, grad_gate, out);
    store_row(precision, width, grad_up, operand_at(precision, args->grad_gate_up, at + width));
    if (weighted_act != nullptr) {
      for (int64_t i = 0; i < width; ++i) act[i] = weight * act[i];
      store_row(precision, width, act, weighted_act);
    }
  }
}

size_t combine_scratch(int64_t hidden) { return 2 * float_bytes(hidden); }

void combine(const mok_combine_args *args, int64_t begin, int64_t end, mok::Scratch *scratch) {
  const int64_t hidden = args->hidden;
  float *const __restrict sum = take_floats(scratch, hidden);
  float *const room = take_floats(scratch, hidden);
  for (int64_t t = begin; t < end; ++t) {
    memset(sum, 0, static_cast<size_t>(hidden) * sizeof(float));
    for (int64_t slot = t * args->top_k; slot < (t + 1) * args->top_k; ++slot) {
      const int64_t row = args->slot_row[slot];
      if (row < 0) continue;
      const float *const y = widen_row(args->precision, hidden, operand_at(args->precision, args->rows, row * hidden), room);
      if (args->weight != nullptr) {
        const float weight = args->weight[slot];
        for (int64_t i = 0; i < hidden; ++i) sum[i] = f32::fma(weight, y[i], sum[i]);
      } else {
        for (int64_t i = 0; i < hidden; ++i) sum[i] = sum[i] + y[i];
      }
    }
    float *const out = args->out + t * hidden;
    if (args->addend != nullptr) {
      const float *const addend = args->addend + t * hidden;
      for (int64_t i = 0; i < hidden; ++i) sum[i] = addend[i] + sum[i];
    }
    for (int64_t i = 0; i < hidden; ++i) out[i] = f32::canonical(sum[i]);
  }
}

}  // namespace

extern const ExpertsTable experts_table = {swiglu_scratch, swiglu_forward, swiglu_backward, combine_scratch, combine};

}  // namespace MOK_ISA_NS

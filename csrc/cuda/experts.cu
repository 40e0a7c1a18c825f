// What lies between the experts' products (docs/arithmetic.md section 11).
#include "cuda/rows.cuh"

namespace mok::cuda {
namespace {

template <bool BF16>
__global__ void __launch_bounds__(kRowThreads) swiglu_forward_kernel(const __grid_constant__ mok_swiglu_forward_args args) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (at >= args.rows * args.intermediate) return;
  const int64_t gate = at / args.intermediate * 2 * args.intermediate + at % args.intermediate;
  const float g = load_operand<BF16>(args.gate_up, gate);
  const float u = load_operand<BF16>(args.gate_up, gate + args.intermediate);
  store_operand<BF16>(args.out, at, f32::mul(f32::silu(g), u));
}

// A warp a row.
template <bool BF16>
__global__ void __launch_bounds__(kRowThreads)
    swiglu_backward_kernel(const __grid_constant__ mok_swiglu_backward_args args, Fault *fault) {
  const int64_t row = warp_row();
  if (row >= args.rows) return;
  const int64_t width = args.intermediate;
  const int64_t gate = row * 2 * width;
  const int64_t up = gate + width;
  int64_t slot = args.row_slot != nullptr ? args.row_slot[row] : 0;
  if (args.row_slot != nullptr && !allowed(fault, FaultKind::kSlot, row, slot, -1, args.slots - 1)) slot = -1;
  if (slot < 0) {
    for (int64_t i = lane_index(); i < 2 * width; i += 32) store_operand<BF16>(args.grad_gate_up, gate + i, 0.0f);
    for (int64_t i = lane_index(); i < width && args.weighted_act != nullptr; i += 32)
      store_operand<BF16>(args.weighted_act, row * width + i, 0.0f);
    return;
  }
  const float weight = args.slot_weight != nullptr ? args.slot_weight[slot] : 1.0f;
  const float *const grad_act = args.grad_act + row * width;
  if (args.grad_slot_weight != nullptr) {
    const float sum = warp_row_sum(width, [&](float lane, int64_t i) {
      const float act = rounded<BF16>(
          f32::mul(f32::silu(load_operand<BF16>(args.gate_up, gate + i)), load_operand<BF16>(args.gate_up, up + i)));
      return f32::fma(grad_act[i], act, lane);
    });
    if (lane_index() == 0) args.grad_slot_weight[slot] = f32::canonical(sum);
  }
#pragma unroll 2
  for (int64_t i = lane_index(); i < width; i += 32) {
    const float g = load_operand<BF16>(args.gate_up, gate + i);
    const float u = load_operand<BF16>(args.gate_up, up + i);
    const float s = f32::sigmoid(g);
    const float silu = f32::mul(g, s);
    const float weighted = f32::mul(weight, grad_act[i]);
    const float slope = f32::mul(s, f32::fma(g, f32::sub(1.0f, s), 1.0f));
    store_operand<BF16>(args.grad_gate_up, gate + i, f32::mul(f32::mul(weighted, u), slope));
    store_operand<BF16>(args.grad_gate_up, up + i, f32::mul(weighted, silu));
    if (args.weighted_act != nullptr) {
      store_operand<BF16>(args.weighted_act, row * width + i, f32::mul(weight, rounded<BF16>(f32::mul(silu, u))));
    }
  }
}

template <bool BF16>
__global__ void __launch_bounds__(kRowThreads) combine_kernel(const __grid_constant__ mok_combine_args args) {
  const int64_t token = blockIdx.x;
  for (int64_t i = threadIdx.x; i < args.hidden; i += kRowThreads) {
    float sum = 0.0f;
    for (int64_t slot = token * args.top_k; slot < (token + 1) * args.top_k; ++slot) {
      const int64_t row = args.slot_row[slot];
      if (row < 0) continue;
      const float y = load_operand<BF16>(args.rows, row * args.hidden + i);
      sum = args.weight != nullptr ? f32::fma(args.weight[slot], y, sum) : f32::add(sum, y);
    }
    if (args.addend != nullptr) sum = f32::add(args.addend[token * args.hidden + i], sum);
    args.out[token * args.hidden + i] = f32::canonical(sum);
  }
}

mok_status check_swiglu(int32_t precision, int64_t rows, int64_t intermediate) {
  MOK_TRY(check_precision(precision));
  MOK_TRY(check_range("rows", rows, 0, kRowsMax));
  return check_range("intermediate", intermediate, 1, kWidthMax);
}

mok_status swiglu_forward(const mok_context *context, const mok_swiglu_forward_args *args) {
  MOK_TRY(check_swiglu(args->precision, args->rows, args->intermediate));
  MOK_REQUIRE_POINTER(args->gate_up, args->rows);
  MOK_REQUIRE_POINTER(args->out, args->rows);
  if (args->rows == 0) return MOK_OK;
  for_precision(args->precision, [&](auto bf16) {
    swiglu_forward_kernel<bf16.value>
        <<<grid_of(args->rows * args->intermediate, kRowThreads), kRowThreads, 0, context->stream>>>(*args);
  });
  MOK_LAUNCHED();
  return MOK_OK;
}

mok_status swiglu_backward(const mok_context *context, const mok_swiglu_backward_args *args) {
  MOK_TRY(check_swiglu(args->precision, args->rows, args->intermediate));
  MOK_REQUIRE_RANGE(args, slots, 0, kRowsMax);
  MOK_REQUIRE_POINTER(args->gate_up, args->rows);
  MOK_REQUIRE_POINTER(args->grad_act, args->rows);
  MOK_REQUIRE_POINTER(args->grad_gate_up, args->rows);
  MOK_REQUIRE(args->row_slot != nullptr || (args->slot_weight == nullptr && args->grad_slot_weight == nullptr),
              "row_slot is NULL; allowed with slot_weight or grad_slot_weight: a pointer to each row's slot");
  if (args->grad_slot_weight != nullptr) {
    MOK_CUDA(cudaMemsetAsync(args->grad_slot_weight, 0, static_cast<size_t>(args->slots) * sizeof(float), context->stream));
  }
  if (args->rows == 0) return MOK_OK;
  for_precision(args->precision, [&](auto bf16) {
    swiglu_backward_kernel<bf16.value>
        <<<grid_of(args->rows, kRowWarps), kRowThreads, 0, context->stream>>>(*args, context->fault);
  });
  MOK_LAUNCHED();
  return MOK_OK;
}

mok_status combine(const mok_context *context, const mok_combine_args *args) {
  MOK_TRY(check_precision(args->precision));
  MOK_REQUIRE_RANGE(args, tokens, 0, kRowsMax);
  MOK_REQUIRE_RANGE(args, top_k, 0, kWidthMax);
  MOK_REQUIRE_RANGE(args, hidden, 1, kWidthMax);
  MOK_REQUIRE_POINTER(args->rows, args->tokens * args->top_k);
  MOK_REQUIRE_POINTER(args->slot_row, args->tokens * args->top_k);
  MOK_REQUIRE_POINTER(args->out, args->tokens);
  if (args->tokens == 0) return MOK_OK;
  for_precision(args->precision, [&](auto bf16) {
    combine_kernel<bf16.value><<<static_cast<unsigned>(args->tokens), kRowThreads, 0, context->stream>>>(*args);
  });
  MOK_LAUNCHED();
  return MOK_OK;
}

}  // namespace
}  // namespace mok::cuda

extern "C" MOK_API mok_status mok_swiglu_forward(mok_context *context, const mok_swiglu_forward_args *args) {
  return mok::cuda::enter("mok_swiglu_forward", context, args, [&] { return mok::cuda::swiglu_forward(context, args); });
}

extern "C" MOK_API mok_status mok_swiglu_backward(mok_context *context, const mok_swiglu_backward_args *args) {
  return mok::cuda::enter("mok_swiglu_backward", context, args, [&] { return mok::cuda::swiglu_backward(context, args); });
}

extern "C" MOK_API mok_status mok_combine(mok_context *context, const mok_combine_args *args) {
  return mok::cuda::enter("mok_combine", context, args, [&] { return mok::cuda::combine(context, args); });
}

// What lies between the experts' products (docs/arithmetic.md section 11).
#include "cuda/rows.cuh"

namespace mok::cuda {
namespace {

// What a kernel reads and writes at once: eight columns, or one where sizes or addresses don't allow it.
template <bool BF16, bool RUNS>
struct Columns {
  static constexpr int kCount = RUNS ? 8 : 1;
  float value[kCount];

  static __device__ __forceinline__ Columns load(const void *base, int64_t i) {
    Columns columns;
    if constexpr (RUNS) {
      load_eight_operands<BF16>(columns.value, base, i);
    } else {
      columns.value[0] = load_operand<BF16>(base, i);
    }
    return columns;
  }
  __device__ __forceinline__ void store(void *base, int64_t i) const {
    if constexpr (RUNS) {
      store_eight_operands<BF16>(base, i, value);
    } else {
      store_operand<BF16>(base, i, value[0]);
    }
  }
};

template <bool BF16, bool RUNS>
__global__ void __launch_bounds__(kRowThreads)
    swiglu_forward_kernel(const __grid_constant__ mok_swiglu_forward_args args, int64_t row_parts) {
  using Part = Columns<BF16, RUNS>;
  const int64_t row = blockIdx.x / row_parts;
  const int64_t column = (blockIdx.x % row_parts * kRowThreads + threadIdx.x) * Part::kCount;
  if (column >= args.intermediate) return;
  const int64_t gate = row * 2 * args.intermediate + column;
  Part act = Part::load(args.gate_up, gate);
  const Part up = Part::load(args.gate_up, gate + args.intermediate);
#pragma unroll
  for (int j = 0; j < Part::kCount; ++j) act.value[j] = f32::mul(f32::silu(act.value[j]), up.value[j]);
  act.store(args.out, row * args.intermediate + column);
}

// The gradients at one column; `act` becomes op(silu(gate) * up).
template <bool BF16>
__device__ __forceinline__ void swiglu_gradients(float gate, float up, float grad_act, float weight, float &grad_gate,
                                                 float &grad_up, float &act) {
  const float s = f32::sigmoid(gate);
  const float silu = f32::mul(gate, s);
  const float weighted = f32::mul(weight, grad_act);
  act = rounded<BF16>(f32::mul(silu, up));
  grad_up = f32::mul(weighted, silu);
  grad_gate = f32::mul(f32::mul(weighted, up), f32::mul(s, f32::fma(gate, f32::sub(1.0f, s), 1.0f)));
}

// Where the rows of a swiglu_backward call lie.
struct SwigluRow {
  int64_t gate, act;  // elements before gate_up's and the activation's row
  float weight;
};

// Gradients of the columns from `column`; returns the activation there.
template <bool BF16, bool RUNS>
__device__ __forceinline__ Columns<BF16, RUNS> swiglu_columns(const mok_swiglu_backward_args &args, const SwigluRow &row,
                                                              int64_t column) {
  using Part = Columns<BF16, RUNS>;
  const Part gate = Part::load(args.gate_up, row.gate + column);
  const Part up = Part::load(args.gate_up, row.gate + args.intermediate + column);
  const auto grad_act = Columns<false, RUNS>::load(args.grad_act, row.act + column);
  Part act, grad_gate, grad_up, weighted;
#pragma unroll
  for (int j = 0; j < Part::kCount; ++j) {
    swiglu_gradients<BF16>(gate.value[j], up.value[j], grad_act.value[j], row.weight, grad_gate.value[j], grad_up.value[j],
                           act.value[j]);
    weighted.value[j] = f32::mul(row.weight, act.value[j]);
  }
  grad_gate.store(args.grad_gate_up, row.gate + column);
  grad_up.store(args.grad_gate_up, row.gate + args.intermediate + column);
  if (args.weighted_act != nullptr) weighted.store(args.weighted_act, row.act + column);
  return act;
}

template <bool BF16>
__device__ __forceinline__ void clear_row(const mok_swiglu_backward_args &args, const SwigluRow &row) {
  for (int64_t i = lane_index(); i < 2 * args.intermediate; i += 32) store_operand<BF16>(args.grad_gate_up, row.gate + i, 0.0f);
  if (args.weighted_act == nullptr) return;
  for (int64_t i = lane_index(); i < args.intermediate; i += 32) store_operand<BF16>(args.weighted_act, row.act + i, 0.0f);
}

// A warp a row: the gradients, and on the way the row sum of grad_act * act.
template <bool BF16, bool RUNS>
__global__ void __launch_bounds__(kRowThreads)
    swiglu_backward_kernel(const __grid_constant__ mok_swiglu_backward_args args, FaultSlot fault) {
  const int64_t index = warp_row();
  if (index >= args.rows) return;
  SwigluRow row{index * 2 * args.intermediate, index * args.intermediate, 1.0f};
  int64_t slot = args.row_slot != nullptr ? args.row_slot[index] : 0;
  if (args.row_slot != nullptr && !allowed(fault, FaultKind::kSlot, index, slot, -1, args.slots - 1)) slot = -1;
  if (slot < 0) {
    clear_row<BF16>(args, row);
    return;
  }
  if (args.slot_weight != nullptr) row.weight = args.slot_weight[slot];
  const float *const grad_act = args.grad_act + row.act;
  float sum;
  if constexpr (RUNS) {
    sum = warp_row_sum_runs(args.intermediate, [&](int64_t column, float (&a)[8], float (&b)[8]) {
      const auto act = swiglu_columns<BF16, RUNS>(args, row, column);
      load_eight(a, grad_act + column);
#pragma unroll
      for (int j = 0; j < 8; ++j) b[j] = act.value[j];
    });
  } else {
    sum = warp_row_sum(args.intermediate, [&](float lane, int64_t column) {
      return f32::fma(grad_act[column], swiglu_columns<BF16, RUNS>(args, row, column).value[0], lane);
    });
  }
  if (args.grad_slot_weight != nullptr && lane_index() == 0) args.grad_slot_weight[slot] = f32::canonical(sum);
}

// A CTA a token: a thread takes some columns of all its rows.
template <bool BF16, bool RUNS>
__global__ void __launch_bounds__(kRowThreads) combine_kernel(const __grid_constant__ mok_combine_args args) {
  using Part = Columns<BF16, RUNS>;
  const int64_t token = blockIdx.x;
  const int32_t *const slot_row = args.slot_row + token * args.top_k;
  for (int64_t i = static_cast<int64_t>(threadIdx.x) * Part::kCount; i < args.hidden; i += kRowThreads * Part::kCount) {
    Columns<false, RUNS> sum = {};
#pragma unroll 4
    for (int64_t k = 0; k < args.top_k; ++k) {
      const int64_t row = slot_row[k];
      if (row < 0) continue;
      const Part y = Part::load(args.rows, row * args.hidden + i);
#pragma unroll
      for (int j = 0; j < Part::kCount; ++j) {
        sum.value[j] = args.weight != nullptr ? f32::fma(args.weight[token * args.top_k + k], y.value[j], sum.value[j])
                                              : f32::add(sum.value[j], y.value[j]);
      }
    }
    if (args.addend != nullptr) {
      const auto addend = Columns<false, RUNS>::load(args.addend, token * args.hidden + i);
#pragma unroll
      for (int j = 0; j < Part::kCount; ++j) sum.value[j] = f32::add(addend.value[j], sum.value[j]);
    }
    sum.store(args.out, token * args.hidden + i);
  }
}

// Calls body(bf16, runs) with the two as types.
template <typename Body>
void for_columns(int32_t precision, bool runs, const Body &body) {
  for_precision(precision, [&](auto bf16) { for_condition(runs, [&](auto eight) { body(bf16, eight); }); });
}

// An array of operands as bytes, for runs_of_eight.
const char *bytes_of(const void *pointer) { return static_cast<const char *>(pointer); }

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
  const bool runs = runs_of_eight(args->intermediate, bytes_of(args->gate_up), bytes_of(args->out));
  const int64_t row_parts = divide_up<int64_t>(args->intermediate, kRowThreads * (runs ? 8 : 1));
  MOK_REQUIRE(args->rows * row_parts <= kRowsMax, "rows and intermediate are %" PRId64 " and %" PRId64 "; allowed: fewer",
              args->rows, args->intermediate);
  for_columns(args->precision, runs, [&](auto bf16, auto eight) {
    swiglu_forward_kernel<decltype(bf16)::value, decltype(eight)::value>
        <<<static_cast<unsigned>(args->rows * row_parts), kRowThreads, 0, context->stream>>>(*args, row_parts);
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
  const bool runs = runs_of_eight(args->intermediate, bytes_of(args->gate_up), args->grad_act, bytes_of(args->grad_gate_up),
                                  bytes_of(args->weighted_act));
  for_columns(args->precision, runs, [&](auto bf16, auto eight) {
    swiglu_backward_kernel<decltype(bf16)::value, decltype(eight)::value>
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
  const bool runs = runs_of_eight(args->hidden, bytes_of(args->rows), args->addend, args->out);
  for_columns(args->precision, runs, [&](auto bf16, auto eight) {
    combine_kernel<decltype(bf16)::value, decltype(eight)::value>
        <<<static_cast<unsigned>(args->tokens), kRowThreads, 0, context->stream>>>(*args);
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

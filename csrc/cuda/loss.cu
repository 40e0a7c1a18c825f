// Cross entropy (docs/arithmetic.md section 12): a CTA a row.
#include "cuda/rows.cuh"

namespace mok::cuda {
namespace {

constexpr int64_t kPanel = 4096;        // columns of one panel of the exponentials' sum
constexpr float kLossLimit = 0x1p+20f;  // a loss not below it counts as not finite
constexpr int64_t kVocabularyMax = 1 << 24;

__device__ __forceinline__ int32_t block_maximum(int32_t value, int32_t *shared) {
  value = __reduce_max_sync(kAllLanes, value);
  __syncthreads();
  if (lane_index() == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  for (int warp = 0; warp < kRowWarps; ++warp) value = max(value, shared[warp]);
  return value;
}

template <bool BF16>
__global__ void __launch_bounds__(kRowThreads) loss_kernel(const __grid_constant__ mok_cross_entropy_args args, FaultSlot fault) {
  extern __shared__ float panels[];  // one sum a panel
  __shared__ int32_t maxima[kRowWarps];
  __shared__ float total;
  const int64_t row = blockIdx.x;
  const int64_t count = args.vocabulary;
  const float *const x = args.logits + row * count;
  int64_t label = args.labels[row];
  if (label < -1 || label >= count) {
    if (threadIdx.x == 0) allowed(fault, FaultKind::kLabel, row, label, -1, count - 1);
    label = -1;
  }
  int32_t high = INT32_MIN;
  int32_t negated_low = INT32_MIN;  // of the complement, so that both are maxima
  for (int64_t i = threadIdx.x; i < count && label >= 0; i += kRowThreads) {
    const int32_t key = ordered(x[i]);
    high = max(high, key);
    negated_low = max(negated_low, ~key);
  }
  high = block_maximum(high, maxima);
  negated_low = block_maximum(negated_low, maxima);
  const bool finite = label < 0 || (high < kOrderedInfinity && ~negated_low > kOrderedMinusInfinity);
  if (label < 0 || !finite) {
    if (threadIdx.x == 0 && !finite) *args.status = 1;
    for (int64_t i = threadIdx.x; i < count && args.grad_logits != nullptr; i += kRowThreads) {
      store_operand<BF16>(args.grad_logits, row * count + i, 0.0f);
    }
    return;
  }
  const float maximum = from_ordered(high);
  const int64_t panel_count = (count + kPanel - 1) / kPanel;
  for (int64_t panel = threadIdx.x / 32; panel < panel_count; panel += kRowWarps) {
    const float *const from = x + panel * kPanel;
    const float sum = warp_row_sum(min(kPanel, count - panel * kPanel),
                                   [=](float lane, int64_t i) { return f32::add(lane, f32::exp(f32::sub(from[i], maximum))); });
    if (lane_index() == 0) panels[panel] = sum;
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const float sum = warp_tree(panel_count, [&](int64_t panel) { return panels[panel]; });
    if (threadIdx.x == 0) {
      total = sum;
      const float value = f32::sub(f32::add(maximum, f32::log(sum)), x[label]);
      if (f32::absolute(value) < kLossLimit) {
        atomicAdd(reinterpret_cast<unsigned long long *>(args.loss_sum), static_cast<unsigned long long>(fixed_point(value)));
      } else {
        *args.status = 1;
      }
    }
  }
  if (args.grad_logits == nullptr) return;
  __syncthreads();
  const float r = f32::div(1.0f, total);
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < count; i += kRowThreads) {
    const float e = f32::exp(f32::sub(x[i], maximum));
    store_operand<BF16>(args.grad_logits, row * count + i, i == label ? f32::fma(e, r, -1.0f) : f32::mul(e, r));
  }
}

mok_status cross_entropy(const mok_context *context, const mok_cross_entropy_args *args) {
  MOK_TRY(check_precision(args->precision));
  MOK_REQUIRE_RANGE(args, rows, 0, kRowsMax);
  MOK_REQUIRE_RANGE(args, vocabulary, 1, kVocabularyMax);
  MOK_REQUIRE_POINTER(args->logits, args->rows);
  MOK_REQUIRE_POINTER(args->labels, args->rows);
  MOK_REQUIRE_POINTER(args->loss_sum, args->rows);
  MOK_REQUIRE_POINTER(args->status, args->rows);
  if (args->rows == 0) return MOK_OK;
  const size_t shared = static_cast<size_t>(divide_up(args->vocabulary, kPanel)) * sizeof(float);
  for_precision(args->precision, [&](auto bf16) {
    loss_kernel<bf16.value><<<static_cast<unsigned>(args->rows), kRowThreads, shared, context->stream>>>(*args, context->fault);
  });
  MOK_LAUNCHED();
  return MOK_OK;
}

}  // namespace
}  // namespace mok::cuda

extern "C" MOK_API mok_status mok_cross_entropy(mok_context *context, const mok_cross_entropy_args *args) {
  return mok::cuda::enter("mok_cross_entropy", context, args, [&] { return mok::cuda::cross_entropy(context, args); });
}

// Embedding (docs/arithmetic.md section 6).
#include "cuda/rows.cuh"

namespace mok::cuda {
namespace {

template <bool BF16>
__global__ void __launch_bounds__(kRowThreads)
    forward_kernel(const __grid_constant__ mok_embedding_forward_args args, FaultSlot fault) {
  const int64_t token = blockIdx.x;
  const int64_t id = args.ids[token];
  const bool valid = id >= 0 && id < args.vocabulary;
  if (threadIdx.x == 0) allowed(fault, FaultKind::kId, token, id, 0, args.vocabulary - 1);
  for (int64_t i = threadIdx.x; i < args.hidden; i += kRowThreads) {
    args.out[token * args.hidden + i] = valid ? load_operand<BF16>(args.table, id * args.hidden + i) : 0.0f;
  }
}

constexpr int kColumnsEach = 4;                            // of a thread
constexpr int kSliceColumns = kColumnsEach * kRowThreads;  // of a CTA

// One CTA a token and slice of columns. The CTA of an id's first token finds the later ones, in order, and adds all their
// gradients.
__global__ void __launch_bounds__(kRowThreads)
    backward_kernel(const __grid_constant__ mok_embedding_backward_args args, FaultSlot fault) {
  __shared__ int32_t matches[kRowThreads];
  __shared__ int32_t before[kRowWarps + 1];
  const int64_t token = blockIdx.x;
  const int32_t id = args.ids[token];
  if (id < 0 || id >= args.vocabulary) {
    if (threadIdx.x == 0) allowed(fault, FaultKind::kId, token, id, 0, args.vocabulary - 1);
    return;
  }
  int found = 0;
  for (int64_t t = threadIdx.x; t < token && found == 0; t += kRowThreads) found = args.ids[t] == id;
  if (__syncthreads_or(found)) return;
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kSliceColumns + threadIdx.x;
  float sum[kColumnsEach] = {};
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32);
  for (int64_t start = token; start < args.tokens; start += kRowThreads) {
    const int64_t t = start + threadIdx.x;
    const bool match = t < args.tokens && args.ids[t] == id;
    const uint32_t votes = __ballot_sync(kAllLanes, match);
    if (lane_index() == 0) before[warp + 1] = __popc(votes);
    __syncthreads();
    if (threadIdx.x == 0) {
      before[0] = 0;
      for (int w = 0; w < kRowWarps; ++w) before[w + 1] += before[w];
    }
    __syncthreads();
    if (match) matches[before[warp] + __popc(votes & ((1u << lane_index()) - 1))] = static_cast<int32_t>(t);
    __syncthreads();
    const int32_t count = before[kRowWarps];
    for (int32_t i = 0; i < count; ++i) {
      const float *const gradient = args.grad_out + static_cast<int64_t>(matches[i]) * args.hidden;
#pragma unroll
      for (int c = 0; c < kColumnsEach; ++c) {
        if (column + c * kRowThreads < args.hidden) sum[c] = f32::add(sum[c], gradient[column + c * kRowThreads]);
      }
    }
    __syncthreads();
  }
  float *const row = args.grad_table + static_cast<int64_t>(id) * args.hidden;
#pragma unroll
  for (int c = 0; c < kColumnsEach; ++c) {
    const int64_t i = column + c * kRowThreads;
    if (i < args.hidden) row[i] = f32::canonical(f32::add(row[i], sum[c]));
  }
}

template <typename Args>
mok_status check(const Args *args) {
  MOK_REQUIRE_RANGE(args, tokens, 0, kRowsMax);
  MOK_REQUIRE_RANGE(args, vocabulary, 1, kRowsMax);
  MOK_REQUIRE_RANGE(args, hidden, 1, kWidthMax);
  MOK_REQUIRE_POINTER(args->ids, args->tokens);
  return MOK_OK;
}

}  // namespace
}  // namespace mok::cuda

extern "C" MOK_API mok_status mok_embedding_forward(mok_context *context, const mok_embedding_forward_args *args) {
  using namespace mok::cuda;
  return enter("mok_embedding_forward", context, args, [&] {
    MOK_TRY(mok::check_precision(args->precision));
    MOK_TRY(check(args));
    MOK_REQUIRE_POINTER(args->table, args->tokens);
    MOK_REQUIRE_POINTER(args->out, args->tokens);
    if (args->tokens == 0) return MOK_OK;
    for_precision(args->precision, [&](auto bf16) {
      forward_kernel<bf16.value><<<static_cast<unsigned>(args->tokens), kRowThreads, 0, context->stream>>>(*args, context->fault);
    });
    MOK_LAUNCHED();
    return MOK_OK;
  });
}

extern "C" MOK_API mok_status mok_embedding_backward(mok_context *context, const mok_embedding_backward_args *args) {
  using namespace mok::cuda;
  return enter("mok_embedding_backward", context, args, [&] {
    MOK_TRY(check(args));
    MOK_REQUIRE_POINTER(args->grad_out, args->tokens);
    MOK_REQUIRE_POINTER(args->grad_table, args->tokens);
    if (args->tokens == 0) return MOK_OK;
    const dim3 grid(static_cast<unsigned>(args->tokens), grid_of(args->hidden, kSliceColumns));
    backward_kernel<<<grid, kRowThreads, 0, context->stream>>>(*args, context->fault);
    MOK_LAUNCHED();
    return MOK_OK;
  });
}

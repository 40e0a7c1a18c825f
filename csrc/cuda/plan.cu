// The routing plan (docs/arithmetic.md 10.3): rows for the experts, expert-major, then group, then token, from device data.
#include <algorithm>

#include "cuda/rows.cuh"

namespace mok::cuda {
namespace {

constexpr int32_t kSegmentRows = 16;  // (expert, group) segments are padded to multiples of it
constexpr int kScanThreads = 1024;
constexpr int64_t kPartSlots = 2048;  // of a part of a group: what one CTA assigns, about

// Parts of a group, so that slots are counted and assigned by many CTAs; and scratch memory.
struct PlanParts {
  int64_t part_tokens, parts;  // of a group
  int32_t *routed;             // [slots] expert, -1: not routed
  int32_t *part_counts;        // [groups, parts, experts] routed slots; then those of the group's earlier parts
  int32_t *starts;             // [experts, groups] first row of a segment
};

__global__ void __launch_bounds__(kRowThreads)
    count_kernel(const __grid_constant__ mok_routing_plan_args args, const __grid_constant__ PlanParts parts, FaultSlot fault) {
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (slot >= args.tokens * args.top_k) return;
  const int64_t token = slot / args.top_k;
  int32_t expert = -1;
  if (args.token_mask[token] != 0) {
    expert = args.expert_index[slot];
    if (!allowed(fault, FaultKind::kExpert, slot, expert, 0, args.experts - 1)) expert = -1;
  }
  parts.routed[slot] = expert;
  if (expert < 0) return;
  const int64_t part = token / args.group_tokens * parts.parts + token % args.group_tokens / parts.part_tokens;
  atomicAdd(parts.part_counts + part * args.experts + expert, 1);
}

// A thread a segment: its count, and for each part how many slots the earlier parts have.
__global__ void __launch_bounds__(kRowThreads)
    sum_parts_kernel(const __grid_constant__ mok_routing_plan_args args, const __grid_constant__ PlanParts parts) {
  const int64_t segment = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (segment >= args.experts * args.groups) return;
  const int64_t group = segment / args.experts;
  int32_t *const own = parts.part_counts + group * parts.parts * args.experts + segment % args.experts;
  int32_t sum = 0;
#pragma unroll 8
  for (int64_t part = 0; part < parts.parts; ++part) {
    const int32_t count = own[part * args.experts];
    own[part * args.experts] = sum;
    sum += count;
  }
  args.counts[segment] = sum;
}

// starts[expert * groups + group] = rows of the segments before; expert_offsets. One CTA: a thread takes a run of segments.
__global__ void __launch_bounds__(kScanThreads)
    scan_kernel(const __grid_constant__ mok_routing_plan_args args, int32_t *starts, FaultSlot fault) {
  __shared__ int64_t sums[kScanThreads];
  const int64_t segments = args.experts * args.groups;
  const int64_t each = (segments + kScanThreads - 1) / kScanThreads;
  const int64_t first = threadIdx.x * each;
  const int64_t last = min(segments, first + each);
  const auto rows = [&](int64_t segment) {
    const int32_t count = args.counts[segment % args.groups * args.experts + segment / args.groups];
    return static_cast<int64_t>((count + kSegmentRows - 1) / kSegmentRows * kSegmentRows);
  };
  int64_t sum = 0;
  for (int64_t segment = first; segment < last; ++segment) sum += rows(segment);
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int distance = 1; distance < kScanThreads; distance *= 2) {
    const int64_t left = static_cast<int>(threadIdx.x) >= distance ? sums[threadIdx.x - distance] : 0;
    __syncthreads();
    sums[threadIdx.x] += left;
    __syncthreads();
  }
  for (int64_t expert = threadIdx.x; expert < args.experts && args.groups == 0; expert += kScanThreads) {
    args.expert_offsets[expert] = 0;
  }
  int64_t row = sums[threadIdx.x] - sum;
  for (int64_t segment = first; segment < last; ++segment) {
    starts[segment] = static_cast<int32_t>(row);
    if (segment % args.groups == 0) args.expert_offsets[segment / args.groups] = static_cast<int32_t>(row);
    row += rows(segment);
  }
  if (threadIdx.x == 0) {
    const int64_t total = sums[kScanThreads - 1];
    args.expert_offsets[args.experts] = static_cast<int32_t>(total);
    allowed(fault, FaultKind::kRows, args.experts, total, 0, args.rows_capacity);
  }
}

// A CTA a part, a warp an expert: goes through the part's slots in order and gives those of the expert the next rows.
__global__ void __launch_bounds__(kRowThreads)
    assign_kernel(const __grid_constant__ mok_routing_plan_args args, const __grid_constant__ PlanParts parts) {
  const int64_t group = blockIdx.x / parts.parts;
  const int64_t first_token = group * args.group_tokens + blockIdx.x % parts.parts * parts.part_tokens;
  const int64_t last_token = min(min(args.tokens, (group + 1) * args.group_tokens), first_token + parts.part_tokens);
  const int64_t end = last_token * args.top_k;
  for (int64_t expert = threadIdx.x / 32; expert < args.experts; expert += kRowWarps) {
    const int64_t row_end = parts.starts[expert * args.groups + group] + args.counts[group * args.experts + expert];
    int64_t row = parts.starts[expert * args.groups + group] + parts.part_counts[blockIdx.x * args.experts + expert];
    for (int64_t first = first_token * args.top_k; first < end && row < row_end; first += 32) {
      const int64_t slot = first + lane_index();
      const bool mine = slot < end && parts.routed[slot] == expert;
      const uint32_t votes = __ballot_sync(kAllLanes, mine);
      const int64_t own = row + __popc(votes & ((1u << lane_index()) - 1));
      if (mine && own < args.rows_capacity) {
        args.row_token[own] = static_cast<int32_t>(slot / args.top_k);
        args.row_slot[own] = static_cast<int32_t>(slot);
        args.slot_row[slot] = static_cast<int32_t>(own);
      }
      row += __popc(votes);
    }
  }
}

mok_status check(const mok_routing_plan_args *args) {
  MOK_REQUIRE_RANGE(args, tokens, 0, kRowsMax);
  MOK_REQUIRE_RANGE(args, experts, 1, kWidthMax);
  MOK_REQUIRE_RANGE(args, top_k, 1, args->experts);
  MOK_REQUIRE(args->tokens * args->top_k <= kRowsMax, "tokens * top_k is %" PRId64 "; allowed: at most %" PRId64,
              args->tokens * args->top_k, kRowsMax);
  MOK_REQUIRE_RANGE(args, group_tokens, 1, kRowsMax);
  const int64_t groups = divide_up(args->tokens, args->group_tokens);
  MOK_REQUIRE(args->groups == groups, "groups is %" PRId64 "; allowed: %" PRId64 " for %" PRId64 " tokens in groups of %" PRId64,
              args->groups, groups, args->tokens, args->group_tokens);
  MOK_REQUIRE_RANGE(args, rows_capacity, 0, kRowsMax);
  MOK_REQUIRE_POINTER(args->expert_index, args->tokens);
  MOK_REQUIRE_POINTER(args->token_mask, args->tokens);
  MOK_REQUIRE_POINTER(args->row_token, args->rows_capacity);
  MOK_REQUIRE_POINTER(args->row_slot, args->rows_capacity);
  MOK_REQUIRE_POINTER(args->slot_row, args->tokens);
  MOK_REQUIRE_POINTER(args->expert_offsets, 1);
  MOK_REQUIRE_POINTER(args->counts, args->groups);
  return MOK_OK;
}

mok_status plan(const mok_context *context, const mok_routing_plan_args *args) {
  MOK_TRY(check(args));
  const cudaStream_t stream = context->stream;
  const int64_t segments = args->experts * args->groups;
  const int64_t slots = args->tokens * args->top_k;
  PlanParts parts = {};
  parts.part_tokens = std::max<int64_t>(1, kPartSlots / args->top_k);
  parts.parts = divide_up(std::min(args->group_tokens, std::max<int64_t>(1, args->tokens)), parts.part_tokens);
  const int64_t part_counts = segments * parts.parts;
  Scratch scratch(stream);
  MOK_TRY(scratch.take(static_cast<size_t>(slots + part_counts + segments) * sizeof(int32_t)));
  parts.routed = scratch.as<int32_t>();
  parts.part_counts = parts.routed + slots;
  parts.starts = parts.part_counts + part_counts;
  MOK_CUDA(cudaMemsetAsync(args->row_token, 0xFF, static_cast<size_t>(args->rows_capacity) * sizeof(int32_t), stream));
  MOK_CUDA(cudaMemsetAsync(args->row_slot, 0xFF, static_cast<size_t>(args->rows_capacity) * sizeof(int32_t), stream));
  MOK_CUDA(cudaMemsetAsync(args->slot_row, 0xFF, static_cast<size_t>(slots) * sizeof(int32_t), stream));
  if (slots > 0) {
    MOK_CUDA(cudaMemsetAsync(parts.part_counts, 0, static_cast<size_t>(part_counts) * sizeof(int32_t), stream));
    count_kernel<<<grid_of(slots, kRowThreads), kRowThreads, 0, stream>>>(*args, parts, context->fault);
    MOK_LAUNCHED();
    sum_parts_kernel<<<grid_of(segments, kRowThreads), kRowThreads, 0, stream>>>(*args, parts);
    MOK_LAUNCHED();
  }
  scan_kernel<<<1, kScanThreads, 0, stream>>>(*args, parts.starts, context->fault);
  MOK_LAUNCHED();
  if (slots > 0) {
    assign_kernel<<<static_cast<unsigned>(args->groups * parts.parts), kRowThreads, 0, stream>>>(*args, parts);
    MOK_LAUNCHED();
  }
  return MOK_OK;
}

}  // namespace
}  // namespace mok::cuda

extern "C" MOK_API mok_status mok_routing_plan(mok_context *context, const mok_routing_plan_args *args) {
  return mok::cuda::enter("mok_routing_plan", context, args, [&] { return mok::cuda::plan(context, args); });
}

// What row operations share: a warp's sums in the orders of docs/arithmetic.md section 5, operands of either precision, launches.
#pragma once

#include <type_traits>

#include "common/bf16.h"
#include "common/functions.h"
#include "common/sums.h"
#include "cpu/checks.h"
#include "cuda/context.h"
#include "cuda/ptx.cuh"

namespace mok::cuda {

constexpr int kRowThreads = 256;
constexpr int kRowWarps = kRowThreads / 32;  // rows of a CTA where a warp takes one
constexpr uint32_t kAllLanes = 0xFFFFFFFF;

__device__ __forceinline__ int32_t lane_index() { return static_cast<int32_t>(threadIdx.x % 32); }
// The row of this warp.
__device__ __forceinline__ int64_t warp_row() { return static_cast<int64_t>(blockIdx.x) * kRowWarps + threadIdx.x / 32; }

// Element i of an operand array as fp32, and op(x) stored (a NaN as the one pattern of 2.3).
template <bool BF16>
__device__ __forceinline__ float load_operand(const void *base, int64_t i) {
  if constexpr (BF16) {
    return from_bf16(static_cast<const uint16_t *>(base)[i]);
  } else {
    return static_cast<const float *>(base)[i];
  }
}
template <bool BF16>
__device__ __forceinline__ void store_operand(void *base, int64_t i, float value) {
  if constexpr (BF16) {
    static_cast<uint16_t *>(base)[i] = to_bf16(value);
  } else {
    static_cast<float *>(base)[i] = f32::canonical(value);
  }
}
// op(x) as a value.
template <bool BF16>
__device__ __forceinline__ float rounded(float value) {
  return BF16 ? from_bf16(to_bf16(value)) : value;
}

// Tree (5.1) over the values of lanes 0..count-1; the result in every lane (+0 for count = 0).
__device__ __forceinline__ float lanes_tree(float value, int32_t count) {
  const int32_t lane = lane_index();
#pragma unroll
  for (int32_t step = 1; step < 32; step *= 2) {
    const float right = __shfl_down_sync(kAllLanes, value, step);
    if (lane % (2 * step) == 0 && lane + step < count) {
      value = f32::add(value, right);
    }
  }
  value = __shfl_sync(kAllLanes, value, 0);
  return count > 0 ? value : 0.0f;
}

// Tree over value(0..count-1) by one warp: a lane takes an aligned run whose length is a power of two, then the lanes are joined.
template <typename Value>
__device__ __forceinline__ float warp_tree(int64_t count, const Value &value) {
  int64_t run = 1;
  while (run * 32 < count) run *= 2;
  const int64_t first = lane_index() * run;
  TreeSum tree;
  tree_start(&tree);
  for (int64_t i = first; i < first + run && i < count; ++i) tree_add(&tree, value(i));
  return lanes_tree(tree_result(&tree), static_cast<int32_t>((count + run - 1) / run));
}

// The fold of 5.2 over 8 neighbouring threads; the result in all of them.
__device__ __forceinline__ float fold_threads(float value) {
  value = f32::add(value, __shfl_xor_sync(kAllLanes, value, 1));
  value = f32::add(value, __shfl_xor_sync(kAllLanes, value, 2));
  return f32::add(value, __shfl_xor_sync(kAllLanes, value, 4));
}

// RowSum (5.2) of at most 32 segments from column `start`, four at a time, 8 threads each. lane_sum(column) gives the calling
// thread's lane of the segment that starts at `column`.
template <typename LaneSum>
__device__ __forceinline__ float warp_segments(int64_t start, int64_t columns, const LaneSum &lane_sum) {
  const int32_t lane = lane_index();
  const auto segments = static_cast<int32_t>(min((columns - start + kSegmentColumns - 1) / kSegmentColumns, int64_t{32}));
  float mine = 0.0f;  // lane s keeps segment s
  for (int32_t first = 0; first < segments; first += 4) {
    const float sum = fold_threads(lane_sum(start + (first + lane / 8) * kSegmentColumns));
    const float segment = __shfl_sync(kAllLanes, sum, lane % 4 * 8);
    mine = lane / 4 * 4 == first ? segment : mine;
  }
  return lanes_tree(mine, segments);
}

// RowSum by one warp from lane sums; the result in every lane.
template <typename LaneSum>
__device__ __forceinline__ float warp_sum_of_lanes(int64_t columns, const LaneSum &lane_sum) {
  constexpr int64_t part = 32 * kSegmentColumns;
  if (columns <= part) return warp_segments(0, columns, lane_sum);
  TreeSum tree;
  tree_start(&tree);
  for (int64_t start = 0; start < columns; start += part) tree_add(&tree, warp_segments(start, columns, lane_sum));
  return tree_result(&tree);
}

// RowSum by one warp: enter(sum, column) returns the sum with that column's term.
template <typename Enter>
__device__ __forceinline__ float warp_row_sum(int64_t columns, const Enter &enter) {
  return warp_sum_of_lanes(columns, [&](int64_t segment) {
    const int64_t column = segment + lane_index() % 8;
    float sum = 0.0f;
    if (segment + kSegmentColumns <= columns) {
#pragma unroll
      for (int32_t j = 0; j < kSegmentColumns; j += kLanes) sum = enter(sum, column + j);
    } else {
      for (int32_t j = 0; j < kSegmentColumns; j += kLanes) {
        if (column + j < columns) sum = enter(sum, column + j);
      }
    }
    return sum;
  });
}

// Value i of thread t becomes value t of thread i, among 8 neighbouring threads.
__device__ __forceinline__ void transpose_eight(float (&value)[8]) {
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
    const bool upper = (threadIdx.x & step) != 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if ((i & step) != 0) continue;
      const float other = __shfl_xor_sync(kAllLanes, upper ? value[i] : value[i + step], step);
      (upper ? value[i] : value[i + step]) = other;
    }
  }
}

// RowSum of products for rows that are read in runs of eight columns: terms(column, a, b) gives those of columns column .. column
// + 7. `columns` is a multiple of 8. A thread's run is one term of each lane; columns that aren't there count as 0 * 0, which
// changes nothing.
template <typename Terms>
__device__ __forceinline__ float warp_row_sum_runs(int64_t columns, const Terms &terms) {
  return warp_sum_of_lanes(columns, [&](int64_t segment) {
    const int64_t column = segment + lane_index() % 8 * 8;
    float a[8] = {};
    float b[8] = {};
    if (column < columns) terms(column, a, b);
    transpose_eight(a);
    transpose_eight(b);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = f32::fma(a[i], b[i], sum);
    return sum;
  });
}

// Eight fp32, or eight operands as fp32, at a multiple of 8 elements of an array that starts at a multiple of 16 bytes.
__device__ __forceinline__ void load_eight(float (&value)[8], const float *from) {
  const float4 low = *reinterpret_cast<const float4 *>(from);
  const float4 high = *reinterpret_cast<const float4 *>(from + 4);
  value[0] = low.x, value[1] = low.y, value[2] = low.z, value[3] = low.w;
  value[4] = high.x, value[5] = high.y, value[6] = high.z, value[7] = high.w;
}
template <bool BF16>
__device__ __forceinline__ void load_eight_operands(float (&value)[8], const void *base, int64_t i) {
  if constexpr (BF16) {
    const uint4 words = *reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(base) + i);
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) value[j] = from_bf16(static_cast<uint16_t>(word[j / 2] >> (j % 2 * 16)));
  } else {
    load_eight(value, static_cast<const float *>(base) + i);
  }
}
__device__ __forceinline__ void store_eight(float *to, const float (&value)[8]) {
  *reinterpret_cast<float4 *>(to) =
      make_float4(f32::canonical(value[0]), f32::canonical(value[1]), f32::canonical(value[2]), f32::canonical(value[3]));
  *reinterpret_cast<float4 *>(to + 4) =
      make_float4(f32::canonical(value[4]), f32::canonical(value[5]), f32::canonical(value[6]), f32::canonical(value[7]));
}
template <bool BF16>
__device__ __forceinline__ void store_eight_operands(void *base, int64_t i, const float (&value)[8]) {
  if constexpr (BF16) {
    *reinterpret_cast<uint4 *>(static_cast<uint16_t *>(base) + i) =
        make_uint4(packed_bf16(value[0], value[1]), packed_bf16(value[2], value[3]), packed_bf16(value[4], value[5]),
                   packed_bf16(value[6], value[7]));
  } else {
    store_eight(static_cast<float *>(base) + i, value);
  }
}

// A float's bits as an integer of the same order, -0 below +0. It is its own inverse on the bits.
__device__ __forceinline__ int32_t ordered(float value) {
  const auto bits = static_cast<int32_t>(f32::bits(value));
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}
__device__ __forceinline__ float from_ordered(int32_t key) {
  return f32::from_bits(static_cast<uint32_t>(key ^ ((key >> 31) & 0x7FFFFFFF)));
}
constexpr int32_t kOrderedInfinity = 0x7F800000;                             // ordered(+inf)
constexpr int32_t kOrderedMinusInfinity = static_cast<int32_t>(0x807FFFFF);  // ordered(-inf)

// ---- launches -----------------------------------------------------------------------------------------------------------------

// CTAs of kRowThreads for `count` units of work, `each` a CTA.
inline unsigned grid_of(int64_t count, int64_t each) { return static_cast<unsigned>(divide_up(count, each)); }

// Whether rows of `columns` elements can be read in runs of eight: sizes and the start of every array (NULL: not used).
template <typename... Pointers>
bool runs_of_eight(int64_t columns, const Pointers *...pointers) {
  return columns % 8 == 0 && ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

// Calls body(std::true_type) if `condition`, else body(std::false_type).
template <typename Body>
void for_condition(bool condition, const Body &body) {
  if (condition) {
    body(std::true_type{});
  } else {
    body(std::false_type{});
  }
}

// Calls body(std::true_type) for bf16, body(std::false_type) for fp32.
template <typename Body>
void for_precision(int32_t precision, const Body &body) {
  for_condition(precision == MOK_BF16, body);
}

}  // namespace mok::cuda

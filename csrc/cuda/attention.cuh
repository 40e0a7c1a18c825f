// What the attention kernels share (docs/arithmetic.md section 9): probabilities, and for the fused kernels tiles of operands in
// shared memory and products of them.
//
// A tile of ROWS tokens by SIZE columns (a head) is SIZE/64 panels of ROWS rows of 128 bytes, swizzled (tensor_core.cuh). One
// tile serves as a K-major operand (its rows are m or n, the head's columns are k) and as an MN-major one (its rows are k, the
// columns are n).
#pragma once

#include "common/functions.h"
#include "cuda/context.h"
#include "cuda/epilogue.cuh"
#include "cuda/stage_product.cuh"

namespace mok::cuda {

// c = scale * log2e, which turns dots into exponents of two.
inline float exponent_scale(float scale) { return f32::mul(scale, f32::from_bits(0x3FB8AA3Bu)); }

// exp2(dot * c - shift), +0 below 2^-126; the exponent is at most 0 and an error of rounding. A NaN stays one.
__device__ __forceinline__ float probability(float dot, float c, float shift) {
  const float t = f32::fma(dot, c, -shift);
  const float rest = t < -126.0f ? 0.0f : f32::nan();
  const float value = f32::exp2_normal(t);
  return t >= -126.0f ? value : rest;
}

// The same without the case of a NaN: the caller makes a row's results NaN where its maximum is not finite.
__device__ __forceinline__ float finite_probability(float dot, float c, float shift) {
  const float t = f32::fma(dot, c, -shift);
  const float value = f32::exp2_normal(t);
  return t < -126.0f ? 0.0f : value;
}

constexpr int kTileRows = 128;              // tokens of a CTA's own tile: 64 for each consumer warpgroup
constexpr int kAttentionThreads = 3 * 128;  // a producer warpgroup and two consumers
constexpr int kConsumerWarps = 8;

template <int ROWS, int SIZE>
constexpr int kTileBytes = ROWS * SIZE * 2;

// A ring of stages of equal size in shared memory, and its position, which advances alike in the producer and in the consumers.
template <int STAGE_BYTES, int STAGES>
struct TileRing {
  uint32_t base, barriers;  // shared addresses; 2 * STAGES barriers of 8 bytes
  int32_t stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ TileRing(uint32_t base_address, uint32_t barrier_address)
      : base(base_address), barriers(barrier_address) {}
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(barriers + 16 * i, 1);
      barrier_init(barriers + 16 * i + 8, kConsumerWarps);
    }
  }
  __device__ __forceinline__ uint32_t full() const { return barriers + 16 * stage; }
  __device__ __forceinline__ uint32_t address() const { return base + stage * STAGE_BYTES; }
  __device__ __forceinline__ void wait_full() const { barrier_wait(full(), phase); }
  __device__ __forceinline__ void wait_empty() const { barrier_wait(full() + 8, phase ^ 1); }
  // A consumer warp has read the stage whose full barrier is given: all of its lanes.
  static __device__ __forceinline__ void release(uint32_t full_barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      barrier_arrive(full_barrier + 8);
    }
  }
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Brings the tile of ROWS tokens from `row` and the head's columns from `column`.
template <int ROWS, int SIZE>
__device__ __forceinline__ void copy_tile(uint32_t destination, const CUtensorMap *map, int32_t column, int32_t row,
                                          int32_t sequence, uint32_t full) {
#pragma unroll
  for (int panel = 0; panel < SIZE / kRowElements; ++panel) {
    copy_box(destination + panel * ROWS * kRowBytes, map, column + panel * kRowElements, row, sequence, full);
  }
}

template <int COUNT>
__device__ __forceinline__ void clear(float (&acc)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    acc[i] = 0.0f;
  }
}

// acc[64, N] += A . B^T over a head's SIZE columns: A rows from address a (of a tile of A_ROWS), B a tile of N rows. Not waited
// for.
template <int N, int SIZE, int A_ROWS>
__device__ __forceinline__ void multiply_heads(float (&acc)[N / 2], uint32_t a, uint32_t b) {
#pragma unroll
  for (int step = 0; step < SIZE / kStepDepth; ++step) {
    const int panel = step / 4;
    multiply_step<N, false, false>(acc, a + panel * A_ROWS * kRowBytes, b + panel * N * kRowBytes, step % 4);
  }
}

// acc[64, SIZE] += P . B over the ROWS rows of tile B; P in registers, four words a step. Not waited for.
template <int SIZE, int ROWS>
__device__ __forceinline__ void multiply_rows(float (&acc)[SIZE / 2], const uint32_t (&p)[ROWS / 4], uint32_t b) {
#pragma unroll
  for (int step = 0; step < ROWS / kStepDepth; ++step) {
    const uint32_t words[4] = {p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3]};
    multiply_registers<SIZE, true, ROWS * kRowBytes>(acc, words, b, step);
  }
}

// Accumulators of 64 x N as the A operand of the next product over those N: op() of each, in pairs.
template <int N>
__device__ __forceinline__ void pack_operand(uint32_t (&words)[N / 4], const float (&acc)[N / 2]) {
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    words[i] = packed_bf16(acc[2 * i], acc[2 * i + 1]);
  }
}

// Where a consumer thread's accumulators are (tensor_core.cuh): row `row` and row + 8 of the CTA's tile, columns 8j + column,
// + 1.
struct FragmentPlace {
  int32_t group, row, column;  // group: consumer warpgroup, 64 rows each

  __device__ __forceinline__ FragmentPlace() {
    const int32_t thread = static_cast<int32_t>(threadIdx.x) - kWarpgroup;
    group = thread / kWarpgroup;
    row = group * 64 + thread % kWarpgroup / 32 * 16 + thread % 32 / 4;
    column = thread % 4 * 2;
  }
};

}  // namespace mok::cuda

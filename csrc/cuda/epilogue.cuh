// The end of a product: accumulators (layout of tensor_core.cuh) from and to global memory.
#pragma once

#include "common/platform.h"
#include "cuda/ptx.cuh"
#include "cuda/schedule.cuh"

namespace mok::cuda {

struct ProductOutput {
  void *c;                 // float or bfloat16 [m, n] rows of `pitch`, of one group
  const float *initial;    // or NULL; may be c
  const float *addend;     // or NULL; may be c
  int64_t pitch;           // elements between rows of c, initial and addend
  int64_t group_elements;  // from one group's matrix to the next
  int32_t bf16;            // c holds bfloat16
  int32_t vectors;         // rows of c, initial and addend start at multiples of 16 bytes
};

// Two neighbouring fp32 of a row; +0 beyond the end.
__device__ __forceinline__ float2 load_pair(const float *row, int32_t column, int32_t end, bool vectors) {
  if (vectors && column + 1 < end) {
    return *reinterpret_cast<const float2 *>(row + column);
  }
  return make_float2(column < end ? row[column] : 0.0f, column + 1 < end ? row[column + 1] : 0.0f);
}

// The first values of the chains of this thread: `initial`, or +0.
template <int COUNT>
__device__ __forceinline__ void load_accumulators(float (&acc)[COUNT], const ProductOutput &out, int32_t group, int32_t row,
                                                  int32_t row_end, int32_t column, int32_t column_end) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    acc[i] = 0.0f;
  }
  if (out.initial == nullptr) {
    return;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half < row_end) {
      const float *from = out.initial + group * out.group_elements + (row + 8 * half) * out.pitch;
#pragma unroll
      for (int j = 0; j < COUNT / 4; ++j) {
        const float2 pair = load_pair(from, column + 8 * j, column_end, out.vectors);
        acc[4 * j + 2 * half] = pair.x;
        acc[4 * j + 2 * half + 1] = pair.y;
      }
    }
  }
}

// Word i of thread t of four neighbours becomes word t of thread i.
__device__ __forceinline__ void transpose_quad(uint32_t (&word)[4]) {
  const bool odd = threadIdx.x & 1;
  const bool upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFF, odd ? word[i] : word[i + 1], 1);
    (odd ? word[i] : word[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFF, upper ? word[i] : word[i + 2], 2);
    (upper ? word[i] : word[i + 2]) = other;
  }
}

// A row of this thread's columns as bf16: four column blocks at a time, so that a thread stores 16 bytes. All lanes of a warp
// call this.
template <int COUNT>
__device__ __forceinline__ void store_row_bf16(const float (&acc)[COUNT], int half, uint16_t *row, bool row_valid, int32_t column,
                                               int32_t column_end, bool vectors) {
  const int quad = threadIdx.x & 3;
#pragma unroll
  for (int j = 0; j < COUNT / 4; j += 4) {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      word[i] = packed_bf16(acc[4 * (j + i) + 2 * half], acc[4 * (j + i) + 2 * half + 1]);
    }
    transpose_quad(word);
    const int32_t first = column - 2 * quad + 8 * (j + quad);  // of this thread's eight columns
    if (!row_valid) {
      continue;
    }
    if (vectors && first + 8 <= column_end) {
      *reinterpret_cast<uint4 *>(row + first) = make_uint4(word[0], word[1], word[2], word[3]);
      continue;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (first + i < column_end) {
        row[first + i] = static_cast<uint16_t>(word[i / 2] >> (i % 2 * 16));
      }
    }
  }
}

template <int COUNT>
__device__ __forceinline__ void store_row_fp32(const float (&acc)[COUNT], int half, float *row, int32_t column,
                                               int32_t column_end, bool vectors) {
#pragma unroll
  for (int j = 0; j < COUNT / 4; ++j) {
    const float low = acc[4 * j + 2 * half];
    const float high = acc[4 * j + 2 * half + 1];
    const int32_t at = column + 8 * j;
    if (vectors && at + 1 < column_end) {
      *reinterpret_cast<float2 *>(row + at) = make_float2(low, high);
    } else {
      if (at < column_end) row[at] = low;
      if (at + 1 < column_end) row[at + 1] = high;
    }
  }
}

// Finishes the chains (+ 0.0f, then the addend) and stores them. `row` and `column` are this thread's first.
template <int COUNT>
__device__ __forceinline__ void store_accumulators(float (&acc)[COUNT], const ProductOutput &out, int32_t group, int32_t row,
                                                   int32_t row_end, int32_t column, int32_t column_end) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    acc[i] = f32::add(acc[i], 0.0f);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool valid = row + 8 * half < row_end;
    const int64_t offset = group * out.group_elements + (row + 8 * half) * out.pitch;
    if (out.addend != nullptr && valid) {
#pragma unroll
      for (int j = 0; j < COUNT / 4; ++j) {
        const float2 pair = load_pair(out.addend + offset, column + 8 * j, column_end, out.vectors);
        acc[4 * j + 2 * half] = f32::add(pair.x, acc[4 * j + 2 * half]);
        acc[4 * j + 2 * half + 1] = f32::add(pair.y, acc[4 * j + 2 * half + 1]);
      }
    }
    if (out.bf16) {
      store_row_bf16(acc, half, static_cast<uint16_t *>(out.c) + offset, valid, column, column_end, out.vectors);
    } else if (valid) {
      store_row_fp32(acc, half, static_cast<float *>(out.c) + offset, column, column_end, out.vectors);
    }
  }
}

}  // namespace mok::cuda

// Matrix products in precision fp32: one chain acc = fma(a[k], b[k], acc) an element, k ascending, on the FFMA units.
//
// A CTA has a tile of M x N outputs, a thread 8 x 8 of them (two runs of four rows by two of four columns). Slices of 8 k go
// through two buffers in shared memory, stored [k][row] for both operands; the next slice is loaded into registers while one is
// multiplied.
#include <algorithm>

#include "common/bf16.h"
#include "cuda/product.h"

namespace mok::cuda {
namespace {

constexpr int kDepth = 8;    // of a slice
constexpr int kPadding = 4;  // floats after a row of a slice: spreads transposed stores over the banks

template <int M, int N>
struct Fp32Tile {
  static constexpr int kM = M, kN = N;
  static constexpr int kThreads = M / 8 * (N / 8);
  static constexpr int kWarpsN = N / 64;  // a warp has 32 x 64 outputs, its lanes are 4 x 8
};

// One operand's slices. K-major: rows are the output's rows (or columns) and k runs along them; MN-major: rows are k.
template <bool MN, int EXTENT, int THREADS>
class SliceLoader {
 public:
  static constexpr int kVectors = EXTENT * kDepth / 4 / THREADS;  // float4 a thread and slice

  __device__ __forceinline__ SliceLoader(const float *base, int64_t pitch, const int32_t *rows, bool aligned, int32_t first,
                                         int32_t end)
      : base_(base), pitch_(pitch), rows_(rows), aligned_(aligned), first_(first), end_(end) {}

  // Loads the slice [k, k + 8) into registers; zeros outside the operand.
  __device__ __forceinline__ void fetch(int32_t k, int32_t k_end) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int32_t at = threadIdx.x + i * THREADS;
      if constexpr (MN) {
        value_[i] = four(k + at / (EXTENT / 4), k_end, first_ + at % (EXTENT / 4) * 4, end_);
      } else {
        value_[i] = four(first_ + at / (kDepth / 4), end_, k + at % (kDepth / 4) * 4, k_end);
      }
    }
  }

  __device__ __forceinline__ void store(float (*slice)[EXTENT + kPadding]) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int32_t at = threadIdx.x + i * THREADS;
      if constexpr (MN) {
        *reinterpret_cast<float4 *>(&slice[at / (EXTENT / 4)][at % (EXTENT / 4) * 4]) = value_[i];
      } else {
        const int32_t row = at / (kDepth / 4);
        const int32_t k = at % (kDepth / 4) * 4;
        slice[k][row] = value_[i].x;
        slice[k + 1][row] = value_[i].y;
        slice[k + 2][row] = value_[i].z;
        slice[k + 3][row] = value_[i].w;
      }
    }
  }

 private:
  __device__ __forceinline__ float4 four(int32_t row, int32_t row_end, int32_t column, int32_t column_end) const {
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (row >= row_end || column >= column_end) return value;
    const int32_t source = rows_ == nullptr ? row : __ldg(rows_ + row);
    if (source < 0) return value;
    const float *from = base_ + source * pitch_ + column;
    if (aligned_ && column + 4 <= column_end) return __ldg(reinterpret_cast<const float4 *>(from));
    value.x = __ldg(from);
    if (column + 1 < column_end) value.y = __ldg(from + 1);
    if (column + 2 < column_end) value.z = __ldg(from + 2);
    if (column + 3 < column_end) value.w = __ldg(from + 3);
    return value;
  }

  const float *base_;
  int64_t pitch_;
  const int32_t *rows_;
  bool aligned_;
  int32_t first_, end_;
  float4 value_[kVectors];
};

// acc[i][j] of this thread: row i of its eight, column j of its eight.
template <class Tile>
__device__ __forceinline__ void multiply_slice(float (&acc)[8][8], const float (*a)[Tile::kM + kPadding],
                                               const float (*b)[Tile::kN + kPadding], int32_t row, int32_t column) {
#pragma unroll
  for (int k = 0; k < kDepth; ++k) {
    float left[8], right[8];
    *reinterpret_cast<float4 *>(left) = *reinterpret_cast<const float4 *>(&a[k][row]);
    *reinterpret_cast<float4 *>(left + 4) = *reinterpret_cast<const float4 *>(&a[k][row + 16]);
    *reinterpret_cast<float4 *>(right) = *reinterpret_cast<const float4 *>(&b[k][column]);
    *reinterpret_cast<float4 *>(right + 4) = *reinterpret_cast<const float4 *>(&b[k][column + 32]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        acc[i][j] = f32::fma(left[i], right[j], acc[i][j]);
      }
    }
  }
}

__device__ __forceinline__ int32_t row_of(int32_t row, int i) { return row + i % 4 + i / 4 * 16; }
__device__ __forceinline__ int32_t column_of(int32_t column, int j) { return column + j % 4 + j / 4 * 32; }

// The four floats of columns column_of(column, 4 * half) ..: from `from`, +0 beyond the end.
__device__ __forceinline__ float4 load_four(const float *from, int32_t column, int32_t end, bool vectors) {
  if (vectors && column + 4 <= end) return *reinterpret_cast<const float4 *>(from + column);
  return make_float4(column < end ? from[column] : 0.0f, column + 1 < end ? from[column + 1] : 0.0f,
                     column + 2 < end ? from[column + 2] : 0.0f, column + 3 < end ? from[column + 3] : 0.0f);
}

__device__ __forceinline__ void store_four(const ProductOutput &out, int64_t offset, float4 value, int32_t column, int32_t end) {
  const float values[4] = {value.x, value.y, value.z, value.w};
  if (out.bf16) {
    uint16_t *to = static_cast<uint16_t *>(out.c) + offset + column;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (column + i < end) to[i] = to_bf16(values[i]);
    }
    return;
  }
  float *to = static_cast<float *>(out.c) + offset + column;
  if (out.vectors && column + 4 <= end) {
    *reinterpret_cast<float4 *>(to) = value;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (column + i < end) to[i] = values[i];
  }
}

__device__ __forceinline__ void load_initial(float (&acc)[8][8], const ProductOutput &out, const ProductWork &work, int32_t row,
                                             int32_t column, int32_t end) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (out.initial != nullptr && row_of(row, i) < work.row_end) {
        const float *from = out.initial + work.group * out.group_elements + row_of(row, i) * out.pitch;
        value = load_four(from, column_of(column, 4 * half), end, out.vectors);
      }
      acc[i][4 * half] = value.x;
      acc[i][4 * half + 1] = value.y;
      acc[i][4 * half + 2] = value.z;
      acc[i][4 * half + 3] = value.w;
    }
  }
}

__device__ __forceinline__ void store_tile(const float (&acc)[8][8], const ProductOutput &out, const ProductWork &work,
                                           int32_t row, int32_t column, int32_t end) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (row_of(row, i) >= work.row_end) continue;
    const int64_t offset = work.group * out.group_elements + row_of(row, i) * out.pitch;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t at = column_of(column, 4 * half);
      const float *chain = &acc[i][4 * half];
      float4 value =
          make_float4(f32::add(chain[0], 0.0f), f32::add(chain[1], 0.0f), f32::add(chain[2], 0.0f), f32::add(chain[3], 0.0f));
      if (out.addend != nullptr) {
        const float4 addend = load_four(out.addend + offset, at, end, out.vectors);
        value = make_float4(f32::add(addend.x, value.x), f32::add(addend.y, value.y), f32::add(addend.z, value.z),
                            f32::add(addend.w, value.w));
      }
      store_four(out, offset, value, at, end);
    }
  }
}

template <class Tile, bool A_MN, bool B_MN>
__global__ void __launch_bounds__(Tile::kThreads, 512 / Tile::kThreads)
    product_fp32_kernel(const __grid_constant__ ProductFp32 product) {
  __shared__ int32_t first_tiles[kGroupsMax + 1];
  __shared__ __align__(16) float a[2][kDepth][Tile::kM + kPadding];
  __shared__ __align__(16) float b[2][kDepth][Tile::kN + kPadding];
  const ProductSchedule<Tile::kM, Tile::kN, 1> schedule(product.shape, first_tiles);
  const int32_t warp = threadIdx.x / 32;
  const int32_t lane = threadIdx.x % 32;
  const int32_t row_in_tile = warp / Tile::kWarpsN * 32 + lane / 8 * 4;
  const int32_t column_in_tile = warp % Tile::kWarpsN * 64 + lane % 8 * 4;
  for (int32_t tile = blockIdx.x; tile < schedule.count(); tile += gridDim.x) {
    const ProductWork work = schedule.at(tile, 0);
    const int64_t a_matrix = operand_matrix(product.shape.form, false, work.group, 1);
    const int64_t b_matrix = operand_matrix(product.shape.form, true, work.group, product.b_share);
    SliceLoader<A_MN, Tile::kM, Tile::kThreads> load_a(product.a + a_matrix * product.a_group_elements, product.a_pitch,
                                                       product.a_rows, product.a_aligned != 0, work.row, work.row_end);
    SliceLoader<B_MN, Tile::kN, Tile::kThreads> load_b(product.b + b_matrix * product.b_group_elements, product.b_pitch,
                                                       product.b_rows, product.b_aligned != 0, work.column, product.shape.n);
    float acc[8][8];
    load_initial(acc, product.out, work, work.row + row_in_tile, work.column + column_in_tile, product.shape.n);
    load_a.fetch(work.k, work.k_end);
    load_b.fetch(work.k, work.k_end);
    int buffer = 0;
    for (int32_t k = work.k; k < work.k_end; k += kDepth) {
      load_a.store(a[buffer]);
      load_b.store(b[buffer]);
      __syncthreads();
      load_a.fetch(k + kDepth, work.k_end);
      load_b.fetch(k + kDepth, work.k_end);
      multiply_slice<Tile>(acc, a[buffer], b[buffer], row_in_tile, column_in_tile);
      buffer ^= 1;
    }
    store_tile(acc, product.out, work, work.row + row_in_tile, work.column + column_in_tile, product.shape.n);
    __syncthreads();  // the next tile starts with buffer 0, which a slower warp may still read
  }
}

template <class Tile>
mok_status launch(const mok_context &context, const ProductFp32 &product, bool a_mn, bool b_mn, int64_t tiles) {
  const auto kernel = a_mn ? (b_mn ? product_fp32_kernel<Tile, true, true> : product_fp32_kernel<Tile, true, false>)
                           : (b_mn ? product_fp32_kernel<Tile, false, true> : product_fp32_kernel<Tile, false, false>);
  const int64_t ctas = std::min<int64_t>(tiles, int64_t{context.multiprocessors} * (512 / Tile::kThreads));
  kernel<<<static_cast<unsigned>(ctas), Tile::kThreads, 0, context.stream>>>(product);
  MOK_LAUNCHED();
  return MOK_OK;
}

// An upper bound of the tiles of m x n.
int64_t tiles_of(const ProductShape &shape, int64_t m, int64_t n) {
  const int64_t rows = divide_up<int64_t>(shape.m, m);
  const int64_t columns = divide_up<int64_t>(shape.n, n);
  return shape.form == ProductForm::kByRows ? (rows + shape.groups) * columns : rows * columns * shape.groups;
}

}  // namespace

mok_status launch_product_fp32(const mok_context &context, const ProductFp32 &product, bool a_mn, bool b_mn) {
  using Large = Fp32Tile<128, 128>;
  using Small = Fp32Tile<64, 64>;
  const int64_t large = tiles_of(product.shape, Large::kM, Large::kN);
  const int64_t each =
      product.shape.form == ProductForm::kByRows ? divide_up(product.shape.m, product.shape.groups) : product.shape.m;
  const bool wanted =
      context.tile > 0 ? context.tile <= 2 : large >= context.multiprocessors && each > 64 && product.shape.n > 64;
  if (wanted) {
    return launch<Large>(context, product, a_mn, b_mn, large);
  }
  return launch<Small>(context, product, a_mn, b_mn, tiles_of(product.shape, Small::kM, Small::kN));
}

}  // namespace mok::cuda

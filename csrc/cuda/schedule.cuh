// Which output tile a CTA works on: dense products and the two grouped forms of mok.h, from device data, without the host.
//
// A persistent CTA (or cluster) c of C takes tiles c, c + C, c + 2C, ... Tiles are numbered in panels, so that those in flight at
// one time share rows of A and columns of B in the L2 cache. No bit depends on any of this.
#pragma once

#include <cstdint>

namespace mok::cuda {

constexpr int kGroupsMax = 1024;  // of a grouped product by rows: their tile counts lie in shared memory

enum class ProductForm : int32_t {
  kDense,    // C[m, n], one or several of them
  kByRows,   // C rows cut into runs, one B a run
  kByDepth,  // one C a run, k = the run's rows
};

struct ProductShape {
  ProductForm form;
  int32_t groups;              // kDense: matrices of a batch
  int32_t m, n, k;             // kByRows: m = capacity of rows; kByDepth: k = capacity of rows
  const int32_t *row_offsets;  // [groups + 1] on the device, or NULL for kDense
};

// A tile: output rows [row, row_end) at most, columns from `column`, products over [k, k_end).
struct ProductWork {
  int32_t group;
  int32_t row, row_end;
  int32_t column;
  int32_t k, k_end;
};

template <int BLOCK_M, int BLOCK_N, int CLUSTER>
class ProductSchedule {
 public:
  static constexpr int kRows = BLOCK_M * CLUSTER;  // of a cluster's tiles, one below the other
  static constexpr int kPanelRows = 2048 / kRows;  // clusters

  // `first_tiles` is shared memory for kGroupsMax + 1 numbers (kByRows only). Called by all threads of the CTA.
  __device__ __forceinline__ ProductSchedule(const ProductShape &shape, int32_t *first_tiles)
      : shape_(shape), first_tiles_(first_tiles) {
    tiles_n_ = (shape.n + BLOCK_N - 1) / BLOCK_N;
    tiles_m_ = (shape.m + kRows - 1) / kRows;
    if (shape.form == ProductForm::kByRows) {
      if (threadIdx.x < 32) {
        count_tiles();
      }
      __syncthreads();
      count_ = first_tiles[shape.groups] * tiles_n_;
    } else {
      count_ = tiles_m_ * tiles_n_ * shape.groups;
    }
  }

  // Tiles (sets of CLUSTER tiles, one below the other).
  __device__ __forceinline__ int32_t count() const { return count_; }

  // Tile `index`, for the CTA of this rank in its cluster.
  __device__ __forceinline__ ProductWork at(int32_t index, int32_t rank) const {
    if (shape_.form == ProductForm::kByRows) {
      return by_rows(index, rank);
    }
    const int32_t group = index / (tiles_m_ * tiles_n_);
    index -= group * tiles_m_ * tiles_n_;
    const int32_t panel = index / (kPanelRows * tiles_n_);
    const int32_t height = min(kPanelRows, tiles_m_ - panel * kPanelRows);
    index -= panel * kPanelRows * tiles_n_;
    const int32_t row = (panel * kPanelRows + index % height) * kRows + rank * BLOCK_M;
    ProductWork work{group, row, shape_.m, index / height * BLOCK_N, 0, shape_.k};
    if (shape_.form == ProductForm::kByDepth) {
      work.k = offset(group);
      work.k_end = offset(group + 1);
    }
    return work;
  }

 private:
  // Row offset of a run, kept inside the capacity whatever the data says.
  __device__ __forceinline__ int32_t offset(int32_t group) const {
    const int32_t capacity = shape_.form == ProductForm::kByRows ? shape_.m : shape_.k;
    return max(0, min(capacity, __ldg(shape_.row_offsets + group)));
  }

  // first_tiles[g] = tiles (of one column) of the runs before g: one warp, 32 runs at a time.
  __device__ __forceinline__ void count_tiles() {
    const int32_t lane = threadIdx.x;
    int32_t before = 0;
    for (int32_t first = 0; first < shape_.groups; first += 32) {
      const int32_t group = first + lane;
      int32_t sum = 0;
      if (group < shape_.groups) {
        sum = (max(0, offset(group + 1) - offset(group)) + kRows - 1) / kRows;
      }
      for (int32_t distance = 1; distance < 32; distance *= 2) {
        const int32_t left = __shfl_up_sync(0xFFFFFFFF, sum, distance);
        sum += lane >= distance ? left : 0;
      }
      if (group < shape_.groups) {
        first_tiles_[group + 1] = before + sum;
      }
      before += __shfl_sync(0xFFFFFFFF, sum, 31);
    }
    if (lane == 0) {
      first_tiles_[0] = 0;
    }
  }

  __device__ __forceinline__ ProductWork by_rows(int32_t index, int32_t rank) const {
    int32_t group = 0;
    int32_t beyond = shape_.groups;  // first_tiles[group] <= index / tiles_n < first_tiles[beyond]
    const int32_t wanted = index / tiles_n_;
    while (beyond - group > 1) {
      const int32_t middle = (group + beyond) / 2;
      if (first_tiles_[middle] <= wanted) {
        group = middle;
      } else {
        beyond = middle;
      }
    }
    const int32_t tiles = first_tiles_[group + 1] - first_tiles_[group];
    index -= first_tiles_[group] * tiles_n_;
    const int32_t row = offset(group) + index % tiles * kRows + rank * BLOCK_M;
    return ProductWork{group, row, offset(group + 1), index / tiles * BLOCK_N, 0, shape_.k};
  }

  const ProductShape &shape_;
  int32_t *first_tiles_;
  int32_t tiles_m_, tiles_n_, count_;  // tiles_m_: of a cluster's rows
};

}  // namespace mok::cuda

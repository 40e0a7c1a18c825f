// The bf16 matrix products of mok.h as one persistent kernel over stage_product.cuh. Instantiated in product_bf16_*.cu.
#pragma once

#include "cuda/context.h"
#include "cuda/epilogue.cuh"
#include "cuda/product.h"
#include "cuda/stage_product.cuh"

namespace mok::cuda {

template <class Tile>
constexpr int kProductSharedBytes = Tile::kAfterRing + 4 * (kGroupsMax + 1);

template <class Tile, bool A_MN, bool B_MN, Loading LOADING>
struct ProductLoaders {
  static constexpr bool kEngineA = LOADING == Loading::kEngine || LOADING == Loading::kGatherB;
  static constexpr bool kEngineB = LOADING == Loading::kEngine || LOADING == Loading::kGatherA;
  static constexpr bool kAligned = LOADING != Loading::kThreads;
  using EngineA = EngineLoader<A_MN, Tile::kM, Tile::kCluster, false>;
  using EngineB = EngineLoader<B_MN, Tile::kN, Tile::kCluster, true>;
  using A = std::conditional_t<kEngineA, EngineA, RowLoader<A_MN, Tile::kM, kAligned>>;
  using B = std::conditional_t<kEngineB, EngineB, RowLoader<B_MN, Tile::kN, kAligned>>;
};

template <class Loader>
__device__ __forceinline__ Loader row_loader(const ProductOperand &operand, int32_t group, int32_t first, int32_t end) {
  Loader loader;
  loader.base = operand.base + group * operand.group_elements;
  loader.pitch = operand.pitch;
  loader.rows = operand.rows;
  loader.first = first;
  loader.end = end;
  return loader;
}

template <class Tile, bool A_MN, bool B_MN, Loading LOADING>
__device__ __forceinline__ void product_producer(const StageRing<Tile> &ring,
                                                 const ProductSchedule<Tile::kM, Tile::kN, Tile::kCluster> &schedule,
                                                 const ProductArguments &arguments, const CUtensorMap *map_a,
                                                 const CUtensorMap *map_b, int32_t rank) {
  using Loaders = ProductLoaders<Tile, A_MN, B_MN, LOADING>;
  if (LOADING == Loading::kEngine && threadIdx.x != 0) {
    return;
  }
  RingPosition<Tile::kStages> at;
  for (int32_t tile = blockIdx.x / Tile::kCluster; tile < schedule.count(); tile += gridDim.x / Tile::kCluster) {
    const ProductWork work = schedule.at(tile, rank);
    const ProductForm form = arguments.shape.form;
    const int32_t a_matrix = operand_matrix(form, false, work.group, arguments.a.share);
    const int32_t b_matrix = operand_matrix(form, true, work.group, arguments.b.share);
    typename Loaders::A load_a;
    typename Loaders::B load_b;
    if constexpr (Loaders::kEngineA) {
      load_a = {map_a, work.row, a_matrix};
    } else {
      load_a = row_loader<typename Loaders::A>(arguments.a, a_matrix, work.row, work.row_end);
    }
    if constexpr (Loaders::kEngineB) {
      load_b = {map_b, work.column, b_matrix};
    } else {
      load_b = row_loader<typename Loaders::B>(arguments.b, b_matrix, work.column, arguments.shape.n);
    }
    produce(ring, at, work.k, work.k_end, load_a, load_b);
  }
}

template <class Tile, bool A_MN, bool B_MN, Loading LOADING>
__device__ __forceinline__ void product_consumer(const StageRing<Tile> &ring,
                                                 const ProductSchedule<Tile::kM, Tile::kN, Tile::kCluster> &schedule,
                                                 const ProductArguments &arguments, int32_t rank) {
  const int32_t thread = threadIdx.x - kProducers;
  const int32_t group = thread / kWarpgroup;
  const int32_t lane = thread % 32;
  const int32_t row_in_tile = group / Tile::kGroupsN * 64 + thread % kWarpgroup / 32 * 16 + lane / 4;
  const int32_t column_in_tile = group % Tile::kGroupsN * Tile::kGroupN + lane % 4 * 2;
  RingPosition<Tile::kStages> at;
  for (int32_t tile = blockIdx.x / Tile::kCluster; tile < schedule.count(); tile += gridDim.x / Tile::kCluster) {
    const ProductWork work = schedule.at(tile, rank);
    const int32_t row = work.row + row_in_tile;
    const int32_t column = work.column + column_in_tile;
    float acc[Tile::kAccumulators];
    load_accumulators(acc, arguments.out, work.group, row, work.row_end, column, arguments.shape.n);
    consume<Tile, A_MN, B_MN, LOADING != Loading::kEngine>(ring, at, acc, work.k_end - work.k);
    store_accumulators(acc, arguments.out, work.group, row, work.row_end, column, arguments.shape.n);
  }
}

template <class Tile, bool A_MN, bool B_MN, Loading LOADING>
__global__ void __launch_bounds__(kProductThreads, 1)
    product_bf16_kernel(const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
                        const __grid_constant__ ProductArguments arguments) {
  extern __shared__ __align__(1024) unsigned char memory[];
  using Loaders = ProductLoaders<Tile, A_MN, B_MN, LOADING>;
  const StageRing<Tile> ring(memory, kStageArrivals<typename Loaders::A, typename Loaders::B>);
  const ProductSchedule<Tile::kM, Tile::kN, Tile::kCluster> schedule(arguments.shape,
                                                                     reinterpret_cast<int32_t *>(memory + Tile::kAfterRing));
  int32_t rank = 0;
  if constexpr (Tile::kCluster > 1) {
    rank = static_cast<int32_t>(cluster_rank());
    cluster_sync();
  } else {
    __syncthreads();
  }
  if (threadIdx.x < kProducers) {
    registers_shrink<kProducerRegisters<LOADING != Loading::kEngine>>();
    product_producer<Tile, A_MN, B_MN, LOADING>(ring, schedule, arguments, &map_a, &map_b, rank);
  } else {
    registers_grow<kConsumerRegisters<LOADING != Loading::kEngine>>();
    product_consumer<Tile, A_MN, B_MN, LOADING>(ring, schedule, arguments, rank);
  }
  if constexpr (Tile::kCluster > 1) {
    cluster_sync();  // no CTA leaves while the other may still write to its shared memory or arrive at its barriers
  }
}

template <class Tile, bool A_MN, bool B_MN, Loading LOADING>
mok_status launch_product(const mok_context &context, const ProductLaunch &launch) {
  const auto kernel = product_bf16_kernel<Tile, A_MN, B_MN, LOADING>;
  constexpr int bytes = kProductSharedBytes<Tile>;
  static_assert(bytes <= 227 * 1024);
  MOK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  int64_t ctas = std::min<int64_t>(launch.tiles, context.multiprocessors / Tile::kCluster) * Tile::kCluster;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(kProductThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = context.stream;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Tile::kCluster, 1, 1};
  config.attrs = &cluster;
  config.numAttrs = 1;
  MOK_CUDA(cudaLaunchKernelEx(&config, kernel, launch.map_a, launch.map_b, launch.arguments));
  return MOK_OK;
}

// Both operands through TMA: every majorness.
template <class Tile>
mok_status launch_engine(const mok_context &context, const ProductLaunch &launch, bool a_mn, bool b_mn) {
  constexpr Loading loading = Loading::kEngine;
  if (a_mn) {
    return (b_mn ? launch_product<Tile, true, true, loading> : launch_product<Tile, true, false, loading>)(context, launch);
  }
  return (b_mn ? launch_product<Tile, false, true, loading> : launch_product<Tile, false, false, loading>)(context, launch);
}

// Gathered rows: by rows A is K-major, by depth both are MN-major.
template <class Tile>
mok_status launch_gather(const mok_context &context, const ProductLaunch &launch, Loading loading, bool a_mn, bool b_mn) {
  if (loading == Loading::kGatherA && !a_mn) {
    return (b_mn ? launch_product<Tile, false, true, Loading::kGatherA>
                 : launch_product<Tile, false, false, Loading::kGatherA>)(context, launch);
  }
  if (loading == Loading::kGatherA && b_mn) return launch_product<Tile, true, true, Loading::kGatherA>(context, launch);
  if (loading == Loading::kGatherB && a_mn && b_mn) return launch_product<Tile, true, true, Loading::kGatherB>(context, launch);
  MOK_FAIL(MOK_INTERNAL, "no kernel gathers rows for loading %d, majorness %d, %d", static_cast<int>(loading), a_mn, b_mn);
}

}  // namespace mok::cuda

// The stage "product": the main loop of every bf16 matrix product on the tensor cores.
//
// A CTA is one producer warpgroup and two consumer warpgroups. Producers fill a ring of shared-memory stages (64 deep in k)
// through a loader an operand; consumers run one accumulator chain, k ascending, and hand the accumulators to an epilogue. A
// kernel that wants other operands or another end (gathered rows, SwiGLU, an optimizer update) brings its own loaders and
// epilogue and calls:
//
//   extern __shared__ __align__(1024) unsigned char memory[];
//   StageRing<Tile> ring(memory, kStageArrivals<LoadA, LoadB>);   // all threads; then __syncthreads() or cluster_sync()
//   producer threads: for each tile { produce(ring, at, k, k_end, load_a, load_b); }
//   consumer threads: for each tile { set acc; consume<...>(ring, at, acc, k_end - k); epilogue(acc); }
//
// A loader is a type with
//   static constexpr int kEngineBytes;   what TMA brings of a stage (0: threads bring it)
//   __device__ void begin(int32_t k, int32_t k_end);   before the first load of a tile
//   __device__ void load(uint32_t destination, int32_t k, int32_t k_end, uint32_t full);   arrives at `full` where threads load
// Elements at k >= k_end are never multiplied beyond the block of 16 that holds k_end - 1; in that block they must be zeros,
// unless k_end - k is a multiple of 16.
#pragma once

#include "cuda/ptx.cuh"
#include "cuda/tensor_core.cuh"

namespace mok::cuda {

constexpr int kWarpgroup = 128;
constexpr int kProducers = kWarpgroup;
constexpr int kConsumerGroups = 2;
constexpr int kProductThreads = kProducers + kConsumerGroups * kWarpgroup;
constexpr int kStageDepth = kRowElements;              // k of a stage
constexpr int kStageSteps = kStageDepth / kStepDepth;  // 16-blocks of a stage
// Registers of a thread: one thread that starts TMA copies needs few; threads that load rows need more.
template <bool THREADS_LOAD>
constexpr int kProducerRegisters = THREADS_LOAD ? 56 : 40;
template <bool THREADS_LOAD>
constexpr int kConsumerRegisters = THREADS_LOAD ? 224 : 232;

// A tile of M x N outputs. GROUPS_M = 2: each consumer warpgroup has half of the rows; 1: half of the columns.
template <int M, int N, int GROUPS_M, int STAGES, int CLUSTER>
struct ProductTile {
  static constexpr int kM = M, kN = N, kStages = STAGES, kCluster = CLUSTER;
  static constexpr int kGroupsM = GROUPS_M, kGroupsN = kConsumerGroups / GROUPS_M;
  static constexpr int kGroupN = N / kGroupsN;       // columns of a warpgroup; its rows are 64
  static constexpr int kAccumulators = kGroupN / 2;  // of a thread
  static constexpr int kBytesA = M * kRowBytes, kBytesB = N * kRowBytes;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kBarriers = STAGES * kStageBytes;  // offset in shared memory
  static constexpr int kAfterRing = kBarriers + 2 * STAGES * 8;
  static_assert(M == 64 * GROUPS_M && kGroupN % 64 == 0);
  static_assert(CLUSTER == 1 || CLUSTER == 2);
};

// Where a producer or consumer is in the ring.
template <int STAGES>
struct RingPosition {
  int32_t stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

template <class Tile>
class StageRing {
 public:
  // Called by all threads; the barriers may be used after the next barrier of the CTA (of the cluster, if there is one).
  __device__ __forceinline__ StageRing(void *memory, int full_arrivals) : base_(shared_address(memory)) {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < Tile::kStages; ++stage) {
        barrier_init(full(stage), full_arrivals);
        barrier_init(empty(stage), Tile::kCluster * kConsumerGroups * 4);
      }
      barrier_init_fence();
    }
  }

  __device__ __forceinline__ uint32_t a(int stage) const { return base_ + stage * Tile::kStageBytes; }
  __device__ __forceinline__ uint32_t b(int stage) const { return a(stage) + Tile::kBytesA; }
  __device__ __forceinline__ uint32_t full(int stage) const { return base_ + Tile::kBarriers + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + Tile::kStages * 8; }

  // A consumer warp has read the stage: tells the producers of every CTA that wrote it.
  __device__ __forceinline__ void release(int stage) const {
    const uint32_t lane = threadIdx.x % 32;
    if constexpr (Tile::kCluster == 1) {
      if (lane == 0) {
        barrier_arrive(empty(stage));
      }
    } else if (lane < Tile::kCluster) {
      barrier_arrive_remote(empty(stage), lane);
    }
  }

  __device__ __forceinline__ void wait_empty(const RingPosition<Tile::kStages> &at) const {
    barrier_wait(empty(at.stage), at.phase ^ 1);
  }
  __device__ __forceinline__ void wait_full(const RingPosition<Tile::kStages> &at) const {
    barrier_wait(full(at.stage), at.phase);
  }

 private:
  uint32_t base_;
};

// ---- loaders ---------------------------------------------------------------------------------------------------------------

// Rows of a copy box in shared memory, and boxes of an operand of EXTENT rows (or columns) of the output.
template <bool MN, int EXTENT>
constexpr int kCopyBoxRows = MN ? kRowElements : (EXTENT < 128 ? EXTENT : 128);
template <bool MN, int EXTENT>
constexpr int kCopyBoxes = EXTENT / kCopyBoxRows<MN, EXTENT>;

// Through TMA. The map's dimensions are (k, row, group) for K-major operands and (row, k, group) for MN-major ones. With SHARED
// the CTAs of a cluster need the same operand: each brings its share of the boxes to all of them.
template <bool MN, int EXTENT, int CLUSTER, bool SHARED>
struct EngineLoader {
  static constexpr int kEngineBytes = EXTENT * kRowBytes;

  const CUtensorMap *map;
  int32_t first;  // row of the output (A) or its column (B)
  int32_t group;

  __device__ __forceinline__ void begin(int32_t, int32_t) {}

  __device__ __forceinline__ void load(uint32_t destination, int32_t k, int32_t, uint32_t full) {
    constexpr int boxes = kCopyBoxes<MN, EXTENT>;
    constexpr int box_rows = kCopyBoxRows<MN, EXTENT>;
    constexpr bool multicast = SHARED && CLUSTER > 1;
    constexpr int own = multicast ? boxes / CLUSTER : boxes;
    static_assert(own * (multicast ? CLUSTER : 1) == boxes);
    const int begin = multicast ? cluster_rank() * own : 0;
#pragma unroll
    for (int i = 0; i < own; ++i) {
      const int box = begin + i;
      const int32_t row = first + box * box_rows;
      const int32_t x = MN ? row : k;
      const int32_t y = MN ? k : row;
      const uint32_t to = destination + box * box_rows * kRowBytes;
      if constexpr (multicast) {
        copy_box_multicast(to, map, x, y, group, full, (1 << CLUSTER) - 1);
      } else {
        copy_box(to, map, x, y, group, full);
      }
    }
  }
};

// Through the producer threads: rows gathered by index, or operands whose address or row pitch TMA can't read. The same bytes end
// up in shared memory. load() is called for ascending k; begin() once before.
// ALIGNED: rows start at multiples of 16 bytes; else elements are loaded one by one.
template <bool MN, int EXTENT, bool ALIGNED>
struct RowLoader {
  static constexpr int kEngineBytes = 0;
  static constexpr int kChunks = kRowBytes / 16;  // of a row: one thread each
  static constexpr int kRowsOfPass = kProducers / kChunks;
  static constexpr int kPasses = EXTENT / kRowsOfPass;                         // chunks of a thread and stage
  static constexpr int kIndices = (MN ? kRowElements : EXTENT) / kRowsOfPass;  // rows of a thread and stage

  const uint16_t *base;  // of the group
  int64_t pitch;         // elements between rows
  const int32_t *rows;   // row of the operand for each row of the product, -1: zeros; or NULL: the same row
  int32_t first, end;    // output rows (or columns) of the tile, and where the operand ends
  // This thread's rows of the next stage (K-major: of every stage), and a bit for each that is there (else it is zeros). One warp
  // on each scheduler feeds the tensor cores: what a stage needs beside its copies is computed once.
  const uint16_t *from[kIndices];
  uint32_t present;

  __device__ __forceinline__ void begin(int32_t k, int32_t k_end) { MN ? find_rows(k, k_end) : find_rows(first, end); }

  __device__ __forceinline__ void load(uint32_t destination, int32_t k, int32_t k_end, uint32_t full) {
    const int32_t chunk = threadIdx.x % kChunks;
    const int32_t thread_row = threadIdx.x % kProducers / kChunks;
    const uint32_t to = destination + swizzled(thread_row, chunk);  // a pass is 16 rows: the same swizzle
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int32_t row = pass % kIndices;
      const int32_t offset = MN ? pass / kIndices * kRowElements : k;
      const int32_t left = MN ? end - first - 8 * chunk - offset : k_end - k - 8 * chunk;
      const int32_t count = max(0, min(8, left)) & -static_cast<int32_t>(present >> row & 1);
      if constexpr (ALIGNED) {
        copy_16_bytes(to + pass * kRowsOfPass * kRowBytes, from[row] + offset, 2 * count);
      } else {
        copy_elements(to + pass * kRowsOfPass * kRowBytes, from[row] + offset, count);
      }
    }
    if constexpr (ALIGNED) {
      barrier_arrive_after_copies(full);
    } else {
      barrier_arrive(full);
    }
    if constexpr (MN) {
      find_rows(k + kStageDepth, k_end);
    }
  }

 private:
  __device__ __forceinline__ void find_rows(int32_t begin_row, int32_t end_row) {
    const int32_t column = static_cast<int32_t>(threadIdx.x % kChunks) * 8 + (MN ? first : 0);
    present = 0;
#pragma unroll
    for (int i = 0; i < kIndices; ++i) {
      const int32_t row = begin_row + i * kRowsOfPass + static_cast<int32_t>(threadIdx.x % kProducers / kChunks);
      const int32_t source = row >= end_row ? -1 : rows == nullptr ? row : __ldg(rows + row);
      present |= source >= 0 ? 1u << i : 0u;
      from[i] = base + max(source, 0) * pitch + column;
    }
  }

  // Eight elements, those after `count` zero, to a multiple of 16 bytes.
  static __device__ __forceinline__ void copy_elements(uint32_t destination, const uint16_t *from, int32_t count) {
    uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < count) {
        words[i / 2] |= static_cast<uint32_t>(__ldg(from + i)) << (i % 2 * 16);
      }
    }
    asm volatile("st.shared::cta.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(destination), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
  }
};

// Whether the producer threads fill a part of the stages, and how many arrivals complete a full barrier (besides TMA's bytes):
// one of each thread for each operand that it loads, one of the thread that starts TMA.
template <class LoadA, class LoadB>
constexpr bool kThreadsLoad = LoadA::kEngineBytes == 0 || LoadB::kEngineBytes == 0;
template <class LoadA, class LoadB>
constexpr int kStageArrivals = (LoadA::kEngineBytes == 0 ? kProducers : 0) + (LoadB::kEngineBytes == 0 ? kProducers : 0) +
                               (LoadA::kEngineBytes + LoadB::kEngineBytes > 0 ? 1 : 0);

// ---- producers -------------------------------------------------------------------------------------------------------------

// Fills the stages of one tile. If both loaders use TMA, one thread calls this; else all producer threads do.
template <class Tile, class LoadA, class LoadB>
__device__ __forceinline__ void produce(const StageRing<Tile> &ring, RingPosition<Tile::kStages> &at, int32_t k, int32_t k_end,
                                        LoadA &load_a, LoadB &load_b) {
  constexpr int engine_bytes = LoadA::kEngineBytes + LoadB::kEngineBytes;
  const bool leader = !kThreadsLoad<LoadA, LoadB> || threadIdx.x % kProducers == 0;
  load_a.begin(k, k_end);
  load_b.begin(k, k_end);
  for (; k < k_end; k += kStageDepth) {
    const uint32_t full = ring.full(at.stage);
    ring.wait_empty(at);
    if (engine_bytes > 0 && leader) {
      barrier_arrive_expect(full, engine_bytes);
    }
    if (LoadA::kEngineBytes == 0 || leader) {
      load_a.load(ring.a(at.stage), k, k_end, full);
    }
    if (LoadB::kEngineBytes == 0 || leader) {
      load_b.load(ring.b(at.stage), k, k_end, full);
    }
    at.advance();
  }
}

// ---- consumers -------------------------------------------------------------------------------------------------------------

// Issues the first `steps` steps of the stage at `at` and commits them.
template <class Tile, bool A_MN, bool B_MN, bool THREADS_LOAD>
__device__ __forceinline__ void issue_stage(const StageRing<Tile> &ring, const RingPosition<Tile::kStages> &at,
                                            float (&acc)[Tile::kAccumulators], int steps) {
  const int group = threadIdx.x / kWarpgroup - kProducers / kWarpgroup;
  const uint32_t a = ring.a(at.stage) + group / Tile::kGroupsN * 64 * kRowBytes;
  const uint32_t b = ring.b(at.stage) + group % Tile::kGroupsN * Tile::kGroupN * kRowBytes;
  ring.wait_full(at);
  if constexpr (THREADS_LOAD) {
    fence_for_async_readers();
  }
  steps_begin();
#pragma unroll
  for (int step = 0; step < kStageSteps; ++step) {
    if (step < steps) {
      multiply_step<Tile::kGroupN, A_MN, B_MN>(acc, a, b, step);
    }
  }
  steps_commit();
}

// The warpgroup's accumulators go on over `depth` products of the ring's next stages, k ascending. A stage is released when the
// next one has been issued and it is no longer read. THREADS_LOAD: kThreadsLoad of the loaders.
template <class Tile, bool A_MN, bool B_MN, bool THREADS_LOAD>
__device__ __forceinline__ void consume(const StageRing<Tile> &ring, RingPosition<Tile::kStages> &at,
                                        float (&acc)[Tile::kAccumulators], int32_t depth) {
  const int32_t steps = (depth + kStepDepth - 1) / kStepDepth;
  const int32_t full = steps / kStageSteps;
  const int32_t rest = steps % kStageSteps;
  if (full > 0) {
    pin(acc);
    issue_stage<Tile, A_MN, B_MN, THREADS_LOAD>(ring, at, acc, kStageSteps);
    int previous = at.stage;
    at.advance();
    for (int32_t i = 1; i < full; ++i) {
      issue_stage<Tile, A_MN, B_MN, THREADS_LOAD>(ring, at, acc, kStageSteps);
      steps_wait<1>();
      ring.release(previous);
      previous = at.stage;
      at.advance();
    }
    steps_wait<0>();
    pin(acc);
    ring.release(previous);
  }
  if (rest > 0) {
    pin(acc);
    issue_stage<Tile, A_MN, B_MN, THREADS_LOAD>(ring, at, acc, rest);
    steps_wait<0>();
    pin(acc);
    ring.release(at.stage);
    at.advance();
  }
}

}  // namespace mok::cuda

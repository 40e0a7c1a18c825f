// Fused causal attention, forward (docs/arithmetic.md section 9). A CTA has 128 queries of a head. It goes over the keys twice,
// in tiles of 128: first for the exact maxima, then for the probabilities, their sums and the product with V. No tile size shows
// in the bits.
#include <type_traits>

#include "cuda/attention.cuh"
#include "cuda/attention_fused.h"
#include "cuda/product.h"

namespace mok::cuda {
namespace {

template <int SIZE>
struct ForwardLayout {
  static constexpr int kTile = kTileBytes<kTileRows, SIZE>;
  static constexpr int kStages = SIZE == 128 ? 5 : 10;
  static constexpr int kRing = kTile;  // offset: the queries come first
  static constexpr int kBarriers = kRing + kStages * kTile;
  static constexpr int kBytes = kBarriers + 16 * kStages + 8;  // the last barrier: queries are there
  using Ring = TileRing<kTile, kStages>;
};

struct ForwardArguments {
  int32_t sequences, length, heads, share, tiles;  // share: query heads of a key head; tiles: of 128 queries
  float c;
  int32_t vectors;  // rows of `out` start at multiples of 16 bytes
  uint16_t *out;
  float *row_max, *row_recip;
};

// Which tile a CTA has: those with the most keys first.
struct ForwardTile {
  int32_t first, sequence, head, key_tiles;

  __device__ __forceinline__ explicit ForwardTile(const ForwardArguments &args) {
    const int32_t pairs = args.heads * args.sequences;
    const int32_t tile = args.tiles - 1 - static_cast<int32_t>(blockIdx.x) / pairs;
    const int32_t pair = static_cast<int32_t>(blockIdx.x) % pairs;
    first = tile * kTileRows;
    sequence = pair / args.heads;
    head = pair % args.heads;
    key_tiles = tile + 1;
  }
};

template <int SIZE>
__device__ __forceinline__ void forward_producer(const ForwardArguments &args, const ForwardTile &tile,
                                                 typename ForwardLayout<SIZE>::Ring ring, uint32_t queries, uint32_t queries_full,
                                                 const CUtensorMap *map_q, const CUtensorMap *map_k, const CUtensorMap *map_v) {
  constexpr int bytes = ForwardLayout<SIZE>::kTile;
  barrier_arrive_expect(queries_full, bytes);
  copy_tile<kTileRows, SIZE>(queries, map_q, tile.head * SIZE, tile.first, tile.sequence, queries_full);
  const int32_t column = tile.head / args.share * SIZE;
  const auto bring = [&](const CUtensorMap *map, int32_t key_tile) {
    ring.wait_empty();
    barrier_arrive_expect(ring.full(), bytes);
    copy_tile<kTileRows, SIZE>(ring.address(), map, column, key_tile * kTileRows, tile.sequence, ring.full());
    ring.advance();
  };
  for (int32_t key = 0; key < tile.key_tiles; ++key) bring(map_k, key);
  bring(map_k, 0);
  for (int32_t key = 0; key < tile.key_tiles; ++key) {  // the order in which the consumers' second pass takes them
    if (key + 1 < tile.key_tiles) bring(map_k, key + 1);
    bring(map_v, key);
  }
}

__device__ __forceinline__ float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Starts the dots of this warpgroup's 64 queries with the keys of the ring's next stage. Returns the stage's barrier, for its
// release.
template <int SIZE>
__device__ __forceinline__ uint32_t start_dots(float (&dots)[kTileRows / 2], uint32_t queries,
                                               typename ForwardLayout<SIZE>::Ring &ring) {
  clear(dots);
  ring.wait_full();
  pin(dots);
  steps_begin();
  multiply_heads<kTileRows, SIZE, kTileRows>(dots, queries, ring.address());
  steps_commit();
  const uint32_t full = ring.full();
  ring.advance();
  return full;
}

// Whether accumulator i belongs to a key that the query may see, in the tile on the diagonal; `behind` = row - column of acc[0].
__device__ __forceinline__ bool visible(int32_t behind, int32_t i) { return behind + i / 2 % 2 * 8 >= i / 4 * 8 + i % 2; }

template <bool DIAGONAL>
__device__ __forceinline__ void raise_maximum(float (&maximum)[2], const float (&dots)[kTileRows / 2], int32_t behind) {
#pragma unroll
  for (int i = 0; i < kTileRows / 2; ++i) {
    if (!DIAGONAL || visible(behind, i)) maximum[i / 2 % 2] = max_or_nan(maximum[i / 2 % 2], dots[i]);
  }
}

// Goes over the key tiles with two sets of dots, so that the next tile's are computed beside the work on this one's.
// take(diagonal, dots) does that work and waits for all steps in flight; it is called for each tile, keys ascending.
template <int SIZE, typename Take>
__device__ __forceinline__ void for_tiles(const ForwardTile &tile, typename ForwardLayout<SIZE>::Ring &ring, uint32_t queries,
                                          const Take &take) {
  float even[kTileRows / 2];
  float odd[kTileRows / 2];
  uint32_t stage = start_dots<SIZE>(even, queries, ring);
  steps_wait<0>();
  pin(even);
  ring.release(stage);
  for (int32_t left = tile.key_tiles - 1;; left -= 2) {  // tiles after the one in `even`
    if (left == 0) {
      take(std::true_type{}, even);
      return;
    }
    stage = start_dots<SIZE>(odd, queries, ring);
    take(std::false_type{}, even);
    pin(odd);
    ring.release(stage);
    if (left == 1) {
      take(std::true_type{}, odd);
      return;
    }
    stage = start_dots<SIZE>(even, queries, ring);
    take(std::false_type{}, odd);
    pin(even);
    ring.release(stage);
  }
}

// The exact maxima of this thread's two rows.
template <int SIZE>
__device__ __forceinline__ void row_maxima(float (&maximum)[2], const ForwardTile &tile, typename ForwardLayout<SIZE>::Ring &ring,
                                           uint32_t queries, int32_t behind) {
  for_tiles<SIZE>(tile, ring, queries, [&](auto diagonal, float (&dots)[kTileRows / 2]) {
    raise_maximum<decltype(diagonal)::value>(maximum, dots, behind);
    steps_wait<0>();
  });
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    maximum[half] = max_or_nan(maximum[half], __shfl_xor_sync(0xFFFFFFFF, maximum[half], 1));
    maximum[half] = max_or_nan(maximum[half], __shfl_xor_sync(0xFFFFFFFF, maximum[half], 2));
  }
}

// From dots to probabilities: op() of them as an operand, their sums in `lanes` (key mod 8 = column, column + 1 of the two rows).
template <bool DIAGONAL>
__device__ __forceinline__ void take_probabilities(uint32_t (&words)[kTileRows / 4], float (&lanes)[4],
                                                   float (&dots)[kTileRows / 2], float c, const float (&shift)[2],
                                                   int32_t behind) {
#pragma unroll
  for (int i = 0; i < kTileRows / 2; ++i) {
    const float p = finite_probability(dots[i], c, shift[i / 2 % 2]);
    dots[i] = !DIAGONAL || visible(behind, i) ? p : 0.0f;
    lanes[i % 4] = f32::add(lanes[i % 4], dots[i]);
  }
  pack_operand<kTileRows>(words, dots);
}

// sums += P . V of the ring's next stage, waited for together with the dots in flight.
template <int SIZE>
__device__ __forceinline__ void add_values(float (&sums)[SIZE / 2], const uint32_t (&words)[kTileRows / 4],
                                           typename ForwardLayout<SIZE>::Ring &ring) {
  ring.wait_full();
  pin(sums);
  steps_begin();
  multiply_rows<SIZE, kTileRows>(sums, words, ring.address());
  steps_commit();
  steps_wait<0>();
  pin(sums);
  ring.release(ring.full());
  ring.advance();
}

template <int SIZE>
__device__ __forceinline__ void forward_consumer(const ForwardArguments &args, const ForwardTile &tile,
                                                 typename ForwardLayout<SIZE>::Ring ring, uint32_t all_queries,
                                                 uint32_t queries_full) {
  const FragmentPlace place;
  const uint32_t queries = all_queries + place.group * 64 * kRowBytes;
  const int32_t behind = place.row - place.column;
  barrier_wait(queries_full, 0);
  float maximum[2] = {-f32::infinity(), -f32::infinity()};
  row_maxima<SIZE>(maximum, tile, ring, queries, behind);
  const float shift[2] = {f32::mul(maximum[0], args.c), f32::mul(maximum[1], args.c)};

  float lanes[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  float sums[SIZE / 2];
  clear(sums);
  for_tiles<SIZE>(tile, ring, queries, [&](auto diagonal, float (&dots)[kTileRows / 2]) {
    uint32_t words[kTileRows / 4];
    take_probabilities<decltype(diagonal)::value>(words, lanes, dots, args.c, shift, behind);
    add_values<SIZE>(sums, words, ring);
  });

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = f32::add(lanes[2 * half], lanes[2 * half + 1]);
    sum = f32::add(sum, __shfl_xor_sync(0xFFFFFFFF, sum, 1));
    sum = f32::add(sum, __shfl_xor_sync(0xFFFFFFFF, sum, 2));
    const float recip = f32::finite(maximum[half]) ? f32::div(1.0f, sum) : f32::nan();
    const int32_t query = tile.first + place.row + 8 * half;
    const bool live = query < args.length;
    const int64_t statistic = (static_cast<int64_t>(tile.sequence) * args.length + query) * args.heads + tile.head;
    if (live && place.column == 0) {
      args.row_max[statistic] = f32::canonical(maximum[half]);
      args.row_recip[statistic] = recip;
    }
#pragma unroll
    for (int j = 0; j < SIZE / 8; ++j) {
      sums[4 * j + 2 * half] = f32::mul(sums[4 * j + 2 * half], recip);
      sums[4 * j + 2 * half + 1] = f32::mul(sums[4 * j + 2 * half + 1], recip);
    }
    store_row_bf16(sums, half, args.out + statistic * SIZE, live, place.column, SIZE, args.vectors != 0);
  }
}

template <int SIZE>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    forward_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                   const __grid_constant__ CUtensorMap map_v, const __grid_constant__ ForwardArguments args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  using Layout = ForwardLayout<SIZE>;
  const uint32_t base = shared_address(memory);
  const uint32_t queries_full = base + Layout::kBarriers + 16 * Layout::kStages;
  const typename Layout::Ring ring(base + Layout::kRing, base + Layout::kBarriers);
  if (threadIdx.x == 0) {
    ring.init();
    barrier_init(queries_full, 1);
    barrier_init_fence();
  }
  __syncthreads();
  const ForwardTile tile(args);
  if (threadIdx.x < kWarpgroup) {
    registers_shrink<kProducerRegisters<false>>();
    if (threadIdx.x == 0) forward_producer<SIZE>(args, tile, ring, base, queries_full, &map_q, &map_k, &map_v);
  } else {
    registers_grow<kConsumerRegisters<false>>();
    forward_consumer<SIZE>(args, tile, ring, base, queries_full);
  }
}

template <int SIZE>
mok_status launch(const mok_context &context, const mok_attention_forward_args &args) {
  const int64_t kv_columns = args.kv_heads * SIZE;
  const int64_t columns = args.heads * SIZE;
  CUtensorMap map_q, map_k, map_v;
  MOK_TRY(encode_map(context, Matrices{args.q, args.length, columns, columns, args.sequences, args.length * columns}, kTileRows,
                     &map_q));
  MOK_TRY(encode_map(context, Matrices{args.k, args.length, kv_columns, kv_columns, args.sequences, args.length * kv_columns},
                     kTileRows, &map_k));
  MOK_TRY(encode_map(context, Matrices{args.v, args.length, kv_columns, args.ld_v, args.sequences, args.length * args.ld_v},
                     kTileRows, &map_v));
  const int64_t tiles = divide_up<int64_t>(args.length, kTileRows);
  const ForwardArguments arguments{static_cast<int32_t>(args.sequences),
                                   static_cast<int32_t>(args.length),
                                   static_cast<int32_t>(args.heads),
                                   static_cast<int32_t>(args.heads / args.kv_heads),
                                   static_cast<int32_t>(tiles),
                                   exponent_scale(args.scale),
                                   multiple_of_16_bytes(args.out) ? 1 : 0,
                                   static_cast<uint16_t *>(args.out),
                                   args.row_max,
                                   args.row_recip};
  constexpr int bytes = ForwardLayout<SIZE>::kBytes;
  static_assert(bytes <= 227 * 1024);
  MOK_CUDA(cudaFuncSetAttribute(forward_kernel<SIZE>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  forward_kernel<SIZE><<<static_cast<unsigned>(tiles * args.heads * args.sequences), kAttentionThreads, bytes, context.stream>>>(
      map_q, map_k, map_v, arguments);
  MOK_LAUNCHED();
  return MOK_OK;
}

}  // namespace

bool fused_attention_forward(const mok_attention_forward_args &args) {
  return args.precision == MOK_BF16 && (args.head_size == 64 || args.head_size == 128) && multiple_of_16_bytes(args.q) &&
         multiple_of_16_bytes(args.k) && multiple_of_16_bytes(args.v) && args.ld_v % 8 == 0;
}

mok_status launch_fused_forward(const mok_context &context, const mok_attention_forward_args &args) {
  return args.head_size == 64 ? launch<64>(context, args) : launch<128>(context, args);
}

}  // namespace mok::cuda

// Fused causal attention, backward (docs/arithmetic.md section 9), without atomics: one kernel has tiles of queries and finishes
// dQ, another has tiles of keys and finishes dK and dV. Both compute the dots again.
#include "cuda/attention.cuh"
#include "cuda/attention_fused.h"
#include "cuda/product.h"
#include "cuda/rows.cuh"

namespace mok::cuda {
namespace {

constexpr int kQueryStep = 64;  // queries of a stage of the dK, dV kernel

// What a query's row needs: M*c, r, delta. [sequences, heads, padded length]; zeros for padding, which make P and dS zero.
using RowFactors = float4;
constexpr int kStepFactors = kQueryStep * static_cast<int>(sizeof(RowFactors) / sizeof(float));  // floats of a stage

struct BackwardArguments {
  CUtensorMap map_factors;                                           // [steps of all sequences and heads, kStepFactors]
  int32_t sequences, length, heads, kv_heads, tiles, padded_length;  // tiles: of 128 tokens
  float c, scale;
  const RowFactors *factors;
  float *grad_q, *grad_k;
  uint16_t *grad_v;
  int64_t ld_grad_v;
  int32_t vectors_q, vectors_k, vectors_v;  // rows of grad_q, grad_k, grad_v start at multiples of 16 bytes
};

// A warp a (sequence, head, token): delta = RowSum(dO * O).
__global__ void __launch_bounds__(kRowThreads) factors_kernel(const __grid_constant__ mok_attention_backward_args args,
                                                              int64_t padded_length, float c, RowFactors *factors) {
  const int64_t row = warp_row();
  if (row >= args.sequences * args.heads * padded_length) return;
  const int64_t token = row % padded_length;
  const int64_t head = row / padded_length % args.heads;
  const int64_t sequence = row / padded_length / args.heads;
  RowFactors result = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (token < args.length) {
    const int64_t statistic = (sequence * args.length + token) * args.heads + head;
    const auto *const gradient = static_cast<const uint16_t *>(args.grad_out) + statistic * args.head_size;
    const auto *const out = static_cast<const uint16_t *>(args.out) + statistic * args.head_size;
    result.z = warp_row_sum(args.head_size,
                            [=](float sum, int64_t i) { return f32::fma(from_bf16(gradient[i]), from_bf16(out[i]), sum); });
    result.x = f32::mul(args.row_max[statistic], c);
    result.y = args.row_recip[statistic];
  }
  if (lane_index() == 0) factors[row] = result;
}

// P = p * r and dS = P * (dP - delta), both in place; masked: +0.
__device__ __forceinline__ void gradient_of_dot(float &dot, float &product, float c, float shift, float recip, float delta,
                                                bool visible) {
  const float p = f32::mul(probability(dot, c, shift), recip);
  const float ds = f32::mul(p, f32::sub(product, delta));
  dot = visible ? p : 0.0f;
  product = visible ? ds : 0.0f;
}

// out[row, :] = scale * acc for this thread's two rows; rows from `limit` on are not there.
template <int SIZE>
__device__ __forceinline__ void store_scaled(float (&acc)[SIZE / 2], float scale, float *out, int64_t pitch, int32_t row,
                                             int32_t limit, int32_t column, bool vectors) {
#pragma unroll
  for (int i = 0; i < SIZE / 2; ++i) {
    acc[i] = f32::canonical(f32::mul(scale, acc[i]));
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half < limit) store_row_fp32(acc, half, out + (row + 8 * half) * pitch, column, SIZE, vectors);
  }
}

// ---- dQ: 128 queries of a head, keys ascending
// ------------------------------------------------------------------------------------

template <int SIZE>
struct QueryLayout {
  static constexpr int kTile = kTileBytes<kTileRows, SIZE>;
  static constexpr int kStages = SIZE == 128 ? 4 : 8;
  static constexpr int kGradients = kTile;  // offset of dO; the queries come first
  static constexpr int kRing = 2 * kTile;
  static constexpr int kBarriers = kRing + kStages * kTile;
  static constexpr int kBytes = kBarriers + 16 * kStages + 8;
  using Ring = TileRing<kTile, kStages>;
};

struct QueryTile {
  int32_t first, sequence, head, key_tiles;

  __device__ __forceinline__ explicit QueryTile(const BackwardArguments &args) {
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
__device__ __forceinline__ void query_producer(const BackwardArguments &args, const QueryTile &tile,
                                               typename QueryLayout<SIZE>::Ring ring, uint32_t base, uint32_t own_full,
                                               const CUtensorMap *map_q, const CUtensorMap *map_k, const CUtensorMap *map_v,
                                               const CUtensorMap *map_gradient) {
  using Layout = QueryLayout<SIZE>;
  barrier_arrive_expect(own_full, 2 * Layout::kTile);
  copy_tile<kTileRows, SIZE>(base, map_q, tile.head * SIZE, tile.first, tile.sequence, own_full);
  copy_tile<kTileRows, SIZE>(base + Layout::kGradients, map_gradient, tile.head * SIZE, tile.first, tile.sequence, own_full);
  const int32_t column = tile.head / (args.heads / args.kv_heads) * SIZE;
  for (int32_t i = 0; i < 2 * tile.key_tiles; ++i) {  // K, V, K, V ...
    ring.wait_empty();
    barrier_arrive_expect(ring.full(), Layout::kTile);
    copy_tile<kTileRows, SIZE>(ring.address(), i % 2 == 0 ? map_k : map_v, column, i / 2 * kTileRows, tile.sequence, ring.full());
    ring.advance();
  }
}

template <int SIZE>
__device__ __forceinline__ void query_consumer(const BackwardArguments &args, const QueryTile &tile,
                                               typename QueryLayout<SIZE>::Ring ring, uint32_t base, uint32_t own_full) {
  using Layout = QueryLayout<SIZE>;
  const FragmentPlace place;
  const uint32_t queries = base + place.group * 64 * kRowBytes;
  const uint32_t gradients = queries + Layout::kGradients;
  const int32_t behind = place.row - place.column;
  const RowFactors *const factors =
      args.factors + (static_cast<int64_t>(tile.sequence) * args.heads + tile.head) * args.padded_length + tile.first + place.row;
  const RowFactors row[2] = {factors[0], factors[8]};
  float grad_q[SIZE / 2];
  clear(grad_q);
  barrier_wait(own_full, 0);
  for (int32_t key = 0; key < tile.key_tiles; ++key) {
    const bool diagonal = key + 1 == tile.key_tiles;
    float dots[kTileRows / 2];
    float products[kTileRows / 2];
    clear(dots);
    clear(products);
    const uint32_t keys = ring.address();
    const uint32_t keys_full = ring.full();
    ring.wait_full();
    ring.advance();
    ring.wait_full();
    pin(dots);
    pin(products);
    steps_begin();
    multiply_heads<kTileRows, SIZE, kTileRows>(dots, queries, keys);
    multiply_heads<kTileRows, SIZE, kTileRows>(products, gradients, ring.address());
    steps_commit();
    steps_wait<0>();
    pin(dots);
    pin(products);
    ring.release(ring.full());
    ring.advance();
#pragma unroll
    for (int i = 0; i < kTileRows / 2; ++i) {
      const RowFactors &f = row[i / 2 % 2];
      gradient_of_dot(dots[i], products[i], args.c, f.x, f.y, f.z, !diagonal || behind + i / 2 % 2 * 8 >= i / 4 * 8 + i % 2);
    }
    uint32_t words[kTileRows / 4];
    pack_operand<kTileRows>(words, products);
    pin(grad_q);
    steps_begin();
    multiply_rows<SIZE, kTileRows>(grad_q, words, keys);
    steps_commit();
    steps_wait<0>();
    pin(grad_q);
    ring.release(keys_full);
  }
  const int64_t pitch = static_cast<int64_t>(args.heads) * SIZE;
  float *const out = args.grad_q + (static_cast<int64_t>(tile.sequence) * args.length + tile.first) * pitch + tile.head * SIZE;
  store_scaled<SIZE>(grad_q, args.scale, out, pitch, place.row, args.length - tile.first, place.column, args.vectors_q != 0);
}

template <int SIZE>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    queries_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                   const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_gradient,
                   const __grid_constant__ BackwardArguments args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  using Layout = QueryLayout<SIZE>;
  const uint32_t base = shared_address(memory);
  const uint32_t own_full = base + Layout::kBarriers + 16 * Layout::kStages;
  const typename Layout::Ring ring(base + Layout::kRing, base + Layout::kBarriers);
  if (threadIdx.x == 0) {
    ring.init();
    barrier_init(own_full, 1);
    barrier_init_fence();
  }
  __syncthreads();
  const QueryTile tile(args);
  if (threadIdx.x < kWarpgroup) {
    registers_shrink<kProducerRegisters<false>>();
    if (threadIdx.x == 0) query_producer<SIZE>(args, tile, ring, base, own_full, &map_q, &map_k, &map_v, &map_gradient);
  } else {
    registers_grow<kConsumerRegisters<false>>();
    query_consumer<SIZE>(args, tile, ring, base, own_full);
  }
}

// ---- dK and dV: 128 keys of a key head, (query head, query) ascending
// ---------------------------------------------------------------

// A stage is 64 queries: Q, dO and their factors.
template <int SIZE>
struct KeyLayout {
  static constexpr int kTile = kTileBytes<kTileRows, SIZE>;
  static constexpr int kStep = kTileBytes<kQueryStep, SIZE>;
  static constexpr int kFactors = 2 * kStep;  // offset in a stage
  static constexpr int kStageUsed = kFactors + kQueryStep * static_cast<int>(sizeof(RowFactors));
  static constexpr int kStageBytes = (kStageUsed + 1023) / 1024 * 1024;
  static constexpr int kStages = SIZE == 128 ? 4 : 6;
  static constexpr int kValues = kTile;  // offset; the keys come first
  static constexpr int kRing = 2 * kTile;
  static constexpr int kBarriers = kRing + kStages * kStageBytes;
  static constexpr int kBytes = kBarriers + 16 * kStages + 8;
  using Ring = TileRing<kStageBytes, kStages>;
};

struct KeyTile {
  int32_t first, sequence, head, share, first_step,
      steps;  // head: of keys; steps: of 64 queries, from first_step, for each query head

  __device__ __forceinline__ explicit KeyTile(const BackwardArguments &args) {
    const int32_t pairs = args.kv_heads * args.sequences;
    const int32_t pair = static_cast<int32_t>(blockIdx.x) % pairs;
    first = static_cast<int32_t>(blockIdx.x) / pairs * kTileRows;
    sequence = pair / args.kv_heads;
    head = pair % args.kv_heads;
    share = args.heads / args.kv_heads;
    first_step = first / kQueryStep;
    steps = (args.length + kQueryStep - 1) / kQueryStep - first_step;
  }
};

template <int SIZE>
__device__ __forceinline__ void key_producer(const BackwardArguments &args, const KeyTile &tile,
                                             typename KeyLayout<SIZE>::Ring ring, uint32_t base, uint32_t own_full,
                                             const CUtensorMap *map_q, const CUtensorMap *map_k, const CUtensorMap *map_v,
                                             const CUtensorMap *map_gradient) {
  using Layout = KeyLayout<SIZE>;
  barrier_arrive_expect(own_full, 2 * Layout::kTile);
  copy_tile<kTileRows, SIZE>(base, map_k, tile.head * SIZE, tile.first, tile.sequence, own_full);
  copy_tile<kTileRows, SIZE>(base + Layout::kValues, map_v, tile.head * SIZE, tile.first, tile.sequence, own_full);
  for (int32_t i = 0; i < tile.share * tile.steps; ++i) {
    const int32_t head = tile.head * tile.share + i / tile.steps;
    const int32_t query = (tile.first_step + i % tile.steps) * kQueryStep;
    ring.wait_empty();
    barrier_arrive_expect(ring.full(), Layout::kStageUsed);
    copy_tile<kQueryStep, SIZE>(ring.address(), map_q, head * SIZE, query, tile.sequence, ring.full());
    copy_tile<kQueryStep, SIZE>(ring.address() + Layout::kStep, map_gradient, head * SIZE, query, tile.sequence, ring.full());
    const int32_t step = (tile.sequence * args.heads + head) * (args.padded_length / kQueryStep) + query / kQueryStep;
    copy_box(ring.address() + Layout::kFactors, &args.map_factors, 0, step, 0, ring.full());
    ring.advance();
  }
}

__device__ __forceinline__ RowFactors load_factors(uint32_t address) {
  RowFactors f;
  asm volatile("ld.shared::cta.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(f.x), "=f"(f.y), "=f"(f.z), "=f"(f.w)
               : "r"(address)
               : "memory");
  return f;
}

template <int SIZE>
__device__ __forceinline__ void key_consumer(const BackwardArguments &args, const KeyTile &tile,
                                             typename KeyLayout<SIZE>::Ring ring, uint32_t base, uint32_t own_full) {
  using Layout = KeyLayout<SIZE>;
  const FragmentPlace place;
  const uint32_t keys = base + place.group * 64 * kRowBytes;
  const uint32_t values = keys + Layout::kValues;
  float grad_k[SIZE / 2];
  float grad_v[SIZE / 2];
  clear(grad_k);
  clear(grad_v);
  barrier_wait(own_full, 0);
  for (int32_t i = 0; i < tile.share * tile.steps; ++i) {
    // Rows are keys and columns queries: a query sees the keys that are not after it.
    const int32_t ahead = (tile.first_step + i % tile.steps) * kQueryStep - tile.first + place.column - place.row;
    float dots[kQueryStep / 2];
    float products[kQueryStep / 2];
    clear(dots);
    clear(products);
    const uint32_t queries = ring.address();
    const uint32_t gradients = queries + Layout::kStep;
    ring.wait_full();
    pin(dots);
    pin(products);
    steps_begin();
    multiply_heads<kQueryStep, SIZE, kTileRows>(dots, keys, queries);
    multiply_heads<kQueryStep, SIZE, kTileRows>(products, values, gradients);
    steps_commit();
    steps_wait<0>();
    pin(dots);
    pin(products);
#pragma unroll
    for (int j = 0; j < kQueryStep / 8; ++j) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const RowFactors f =
            load_factors(queries + Layout::kFactors + (8 * j + place.column + side) * static_cast<int32_t>(sizeof(RowFactors)));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = 4 * j + 2 * half + side;
          gradient_of_dot(dots[at], products[at], args.c, f.x, f.y, f.z, ahead + 8 * j + side >= 8 * half);
        }
      }
    }
    uint32_t p[kQueryStep / 4];
    uint32_t ds[kQueryStep / 4];
    pack_operand<kQueryStep>(p, dots);
    pack_operand<kQueryStep>(ds, products);
    pin(grad_v);
    pin(grad_k);
    steps_begin();
    multiply_rows<SIZE, kQueryStep>(grad_v, p, gradients);
    multiply_rows<SIZE, kQueryStep>(grad_k, ds, queries);
    steps_commit();
    steps_wait<0>();
    pin(grad_v);
    pin(grad_k);
    ring.release(ring.full());
    ring.advance();
  }
  const int64_t token = static_cast<int64_t>(tile.sequence) * args.length + tile.first;
  const int64_t pitch = static_cast<int64_t>(args.kv_heads) * SIZE;
  const int32_t limit = args.length - tile.first;
  store_scaled<SIZE>(grad_k, args.scale, args.grad_k + token * pitch + tile.head * SIZE, pitch, place.row, limit, place.column,
                     args.vectors_k != 0);
  uint16_t *const out = args.grad_v + token * args.ld_grad_v + tile.head * SIZE;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int32_t row = place.row + 8 * half;
    store_row_bf16(grad_v, half, out + row * args.ld_grad_v, row < limit, place.column, SIZE, args.vectors_v != 0);
  }
}

template <int SIZE>
__global__ void __launch_bounds__(kAttentionThreads, 1)
    keys_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_gradient,
                const __grid_constant__ BackwardArguments args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  using Layout = KeyLayout<SIZE>;
  const uint32_t base = shared_address(memory);
  const uint32_t own_full = base + Layout::kBarriers + 16 * Layout::kStages;
  const typename Layout::Ring ring(base + Layout::kRing, base + Layout::kBarriers);
  if (threadIdx.x == 0) {
    ring.init();
    barrier_init(own_full, 1);
    barrier_init_fence();
  }
  __syncthreads();
  const KeyTile tile(args);
  if (threadIdx.x < kWarpgroup) {
    registers_shrink<kProducerRegisters<false>>();
    if (threadIdx.x == 0) key_producer<SIZE>(args, tile, ring, base, own_full, &map_q, &map_k, &map_v, &map_gradient);
  } else {
    registers_grow<kConsumerRegisters<false>>();
    key_consumer<SIZE>(args, tile, ring, base, own_full);
  }
}

// ---- the host's side
// ------------------------------------------------------------------------------------------------------------------

template <class Kernel>
mok_status launch_kernel(const mok_context &context, Kernel kernel, int bytes, int64_t ctas, const CUtensorMap *maps,
                         const BackwardArguments &args) {
  MOK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<static_cast<unsigned>(ctas), kAttentionThreads, bytes, context.stream>>>(maps[0], maps[1], maps[2], maps[3], args);
  MOK_LAUNCHED();
  return MOK_OK;
}

// Maps of q, k, v and dO with boxes of `query_rows` (q, dO) and 128 rows (k, v).
mok_status encode_maps(const mok_context &context, const mok_attention_backward_args &args, int64_t query_rows,
                       CUtensorMap *maps) {
  const int64_t columns = args.heads * args.head_size;
  const int64_t kv_columns = args.kv_heads * args.head_size;
  const auto matrices = [&](const void *base, int64_t width, int64_t pitch) {
    return Matrices{base, args.length, width, pitch, args.sequences, args.length * pitch};
  };
  MOK_TRY(encode_map(context, matrices(args.q, columns, columns), query_rows, &maps[0]));
  MOK_TRY(encode_map(context, matrices(args.k, kv_columns, kv_columns), kTileRows, &maps[1]));
  MOK_TRY(encode_map(context, matrices(args.v, kv_columns, args.ld_v), kTileRows, &maps[2]));
  return encode_map(context, matrices(args.grad_out, columns, columns), query_rows, &maps[3]);
}

// The map that brings a stage's factors. A plain bulk copy would do, but racecheck doesn't see what a reader of one waits for.
mok_status encode_factors(const mok_context &context, RowFactors *factors, int64_t rows, CUtensorMap *map) {
  static_assert(kTileRows % kQueryStep == 0 && kStepFactors <= 256);
  const cuuint64_t sizes[3] = {kStepFactors, static_cast<cuuint64_t>(rows / kQueryStep), 1};
  const cuuint64_t pitches[2] = {kStepFactors * sizeof(float), rows * sizeof(RowFactors)};
  const cuuint32_t box[3] = {kStepFactors, 1, 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result = context.encode_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 3, factors, sizes, pitches, box, steps,
                                                    CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                                    CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    MOK_FAIL(MOK_INTERNAL, "cuTensorMapEncodeTiled gave %d for the factors of %" PRId64 " rows", static_cast<int>(result), rows);
  }
  return MOK_OK;
}

template <int SIZE>
mok_status launch(const mok_context &context, const mok_attention_backward_args &args) {
  const int64_t tiles = divide_up<int64_t>(args.length, kTileRows);
  const int64_t padded_length = tiles * kTileRows;
  const int64_t rows = args.sequences * args.heads * padded_length;
  Scratch factors(context.stream);
  MOK_TRY(factors.take(static_cast<size_t>(rows) * sizeof(RowFactors)));
  const float c = exponent_scale(args.scale);
  factors_kernel<<<grid_of(rows, kRowWarps), kRowThreads, 0, context.stream>>>(args, padded_length, c, factors.as<RowFactors>());
  MOK_LAUNCHED();
  CUtensorMap map_factors;
  MOK_TRY(encode_factors(context, factors.as<RowFactors>(), rows, &map_factors));
  const BackwardArguments arguments{map_factors,
                                    static_cast<int32_t>(args.sequences),
                                    static_cast<int32_t>(args.length),
                                    static_cast<int32_t>(args.heads),
                                    static_cast<int32_t>(args.kv_heads),
                                    static_cast<int32_t>(tiles),
                                    static_cast<int32_t>(padded_length),
                                    c,
                                    args.scale,
                                    factors.as<RowFactors>(),
                                    args.grad_q,
                                    args.grad_k,
                                    static_cast<uint16_t *>(args.grad_v),
                                    args.ld_grad_v,
                                    multiple_of_16_bytes(args.grad_q),
                                    multiple_of_16_bytes(args.grad_k),
                                    multiple_of_16_bytes(args.grad_v) && args.ld_grad_v % 8 == 0};
  static_assert(QueryLayout<SIZE>::kBytes <= 227 * 1024 && KeyLayout<SIZE>::kBytes <= 227 * 1024);
  CUtensorMap maps[4];
  MOK_TRY(encode_maps(context, args, kTileRows, maps));
  MOK_TRY(launch_kernel(context, queries_kernel<SIZE>, QueryLayout<SIZE>::kBytes, tiles * args.heads * args.sequences, maps,
                        arguments));
  MOK_TRY(encode_maps(context, args, kQueryStep, maps));
  return launch_kernel(context, keys_kernel<SIZE>, KeyLayout<SIZE>::kBytes, tiles * args.kv_heads * args.sequences, maps,
                       arguments);
}

}  // namespace

bool fused_attention_backward(const mok_attention_backward_args &args) {
  return args.precision == MOK_BF16 && (args.head_size == 64 || args.head_size == 128) && multiple_of_16_bytes(args.q) &&
         multiple_of_16_bytes(args.k) && multiple_of_16_bytes(args.v) && multiple_of_16_bytes(args.grad_out) &&
         args.ld_v % 8 == 0;
}

mok_status launch_fused_backward(const mok_context &context, const mok_attention_backward_args &args) {
  return args.head_size == 64 ? launch<64>(context, args) : launch<128>(context, args);
}

}  // namespace mok::cuda

// Causal grouped-query attention (docs/arithmetic.md section 9) for every head size and precision, as products over blocks of
// queries or keys with the row statistics between them. A block's dots lie in scratch memory; no block size shows in the bits:
// blocks start at multiples of 16, rows are whole, and chains over queries are carried.
#include <algorithm>
#include <cmath>

#include "cuda/attention.cuh"
#include "cuda/attention_fused.h"
#include "cuda/product.h"
#include "cuda/rows.cuh"

namespace mok::cuda {
namespace {

constexpr int64_t kScratchBytes = int64_t{256} << 20;  // of a block's dots, about

// Dots of a block: matrix z (a head), row i (a query), column j (a key) is at (z * rows + i) * pitch + j.
struct DotBlock {
  int64_t matrices, rows, columns, pitch;
  int64_t first_query, first_key;

  __host__ __device__ int64_t step() const { return rows * pitch; }
};

// Where the statistics of the rows of a block are: matrix z belongs to query head first_head + z * head_step.
struct RowStatistics {
  float *maximum, *recip;  // [tokens, heads] from the sequence's first token
  int64_t heads, first_head, head_step;

  __device__ int64_t at(int64_t matrix, int64_t query) const { return query * heads + first_head + matrix * head_step; }
};

// Eight threads a row: the maximum, the probabilities op(p) (zeros after the last allowed key), their sum's reciprocal.
template <bool BF16>
__global__ void __launch_bounds__(kRowThreads)
    probabilities_kernel(DotBlock block, RowStatistics statistics, float c, const float *dots, void *probabilities) {
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x) / 8;
  const bool live = row < block.matrices * block.rows;
  const int64_t matrix = live ? row / block.rows : 0;
  const int64_t query = block.first_query + row % block.rows;
  const int64_t keys = live ? query + 1 - block.first_key : 0;
  const float *const x = dots + row * block.pitch;
  const int64_t lane = threadIdx.x % 8;
  int32_t high = INT32_MIN;
#pragma unroll 8
  for (int64_t j = lane; j < keys; j += 8) high = max(high, ordered(x[j]));
  for (int32_t distance = 1; distance < 8; distance *= 2) high = max(high, __shfl_xor_sync(kAllLanes, high, distance));
  const float maximum = from_ordered(high);
  const float shift = f32::mul(maximum, c);
  float sum = 0.0f;
#pragma unroll 4
  for (int64_t j = lane; j < keys; j += 8) {
    const float p = probability(x[j], c, shift);
    sum = f32::add(sum, p);
    store_operand<BF16>(probabilities, row * block.pitch + j, p);
  }
  sum = fold_threads(sum);
  if (!live) return;
  for (int64_t j = keys + (lane - keys % 8 + 8) % 8; j < block.columns; j += 8)
    store_operand<BF16>(probabilities, row * block.pitch + j, 0.0f);
  if (lane == 0) {
    statistics.maximum[statistics.at(matrix, query)] = f32::canonical(maximum);
    statistics.recip[statistics.at(matrix, query)] = f32::canonical(f32::div(1.0f, sum));
  }
}

// out = op(sums * r): sums [matrices, rows, head_size], out rows of all heads.
template <bool BF16>
__global__ void __launch_bounds__(kRowThreads)
    finish_kernel(DotBlock block, RowStatistics statistics, int64_t head_size, const float *sums, void *out) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (at >= block.matrices * block.rows * head_size) return;
  const int64_t matrix = at / (block.rows * head_size);
  const int64_t query = block.first_query + at / head_size % block.rows;
  const float recip = statistics.recip[statistics.at(matrix, query)];
  store_operand<BF16>(out, statistics.at(matrix, query) * head_size + at % head_size, f32::mul(sums[at], recip));
}

// delta = RowSum(dO * O): a warp a (token, head).
template <bool BF16>
__global__ void __launch_bounds__(kRowThreads)
    delta_kernel(int64_t rows, int64_t head_size, const void *grad_out, const void *out, float *delta) {
  const int64_t row = warp_row();
  if (row >= rows) return;
  const int64_t first = row * head_size;
  const float sum = warp_row_sum(head_size, [=](float lane, int64_t i) {
    return f32::fma(load_operand<BF16>(grad_out, first + i), load_operand<BF16>(out, first + i), lane);
  });
  if (lane_index() == 0) delta[row] = sum;
}

// From S and dP to op(P) (if wanted) and dS; +0 where masked.
template <bool BF16>
__global__ void __launch_bounds__(kRowThreads)
    gradients_kernel(DotBlock block, RowStatistics statistics, const float *delta, float c, const float *dots,
                     const float *products, void *probabilities, void *gradients) {
  const int64_t row = blockIdx.x;
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kRowThreads + threadIdx.x;
  if (column >= block.columns) return;
  for (int64_t matrix = 0; matrix < block.matrices; ++matrix) {
    const int64_t query = block.first_query + row;
    const int64_t at = (matrix * block.rows + row) * block.pitch + column;
    float p = 0.0f;
    float ds = 0.0f;
    if (block.first_key + column <= query) {
      const int64_t statistic = statistics.at(matrix, query);
      p = f32::mul(probability(dots[at], c, f32::mul(statistics.maximum[statistic], c)), statistics.recip[statistic]);
      ds = f32::mul(p, f32::sub(products[at], delta[statistic]));
    }
    if (probabilities != nullptr) store_operand<BF16>(probabilities, at, p);
    store_operand<BF16>(gradients, at, ds);
  }
}

__global__ void __launch_bounds__(kRowThreads) scale_kernel(int64_t count, float scale, float *values) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (i < count) values[i] = f32::canonical(f32::mul(scale, values[i]));
}

// The finished dK and dV of a block of keys; chains [kv_heads, keys, head_size].
template <bool BF16>
__global__ void __launch_bounds__(kRowThreads)
    key_gradients_kernel(int64_t kv_heads, int64_t keys, int64_t head_size, float scale, const float *chain_k,
                         const float *chain_v, float *grad_k, void *grad_v, int64_t ld_grad_v) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (at >= kv_heads * keys * head_size) return;
  const int64_t head = at / (keys * head_size);
  const int64_t key = at / head_size % keys;
  const int64_t i = at % head_size;
  grad_k[(key * kv_heads + head) * head_size + i] = f32::canonical(f32::mul(scale, chain_k[at]));
  store_operand<BF16>(grad_v, key * ld_grad_v + head * head_size + i, chain_v[at]);
}

// ---- the host's side
// -------------------------------------------------------------------------------------------------------------

int64_t padded(int64_t count) { return divide_up<int64_t>(count, 16) * 16; }

// Rows of a block whose `bytes_each` for each of `width` dots and `matrices` stay near the scratch limit: a multiple of 16.
int64_t block_rows(int64_t matrices, int64_t width, int64_t bytes_each, int64_t length) {
  const int64_t rows = kScratchBytes / std::max<int64_t>(1, matrices * padded(width) * bytes_each) / 16 * 16;
  return std::min(std::max<int64_t>(rows, 16), padded(length));
}

struct Operand {
  const void *base;
  int64_t pitch, step;  // elements from row to row, from head to head

  Operand from(int32_t precision, int64_t row, int64_t column) const {
    const int64_t bytes = (row * pitch + column) * (precision == MOK_BF16 ? 2 : 4);
    return Operand{static_cast<const char *>(base) + bytes, pitch, step};
  }
};

// c[z] = (initial +) a[z] . b[z] for every head z; c's matrices are dense.
struct HeadProduct {
  bool trans_a, trans_b;
  int64_t m, n, k;
  Operand a, b;
  float *c;
  int64_t ldc, c_step;
  const float *initial;
  int64_t batch, b_share;
};

mok_status multiply(const mok_context &context, int32_t precision, const HeadProduct &p) {
  return run_batched(context, BatchedProduct{precision, 0,         p.trans_a, p.trans_b, p.m,      p.n,      p.k,
                                             p.a.pitch, p.b.pitch, p.ldc,     p.a.base,  p.b.base, p.c,      p.initial,
                                             nullptr,   p.batch,   p.a.step,  p.b.step,  p.c_step, p.b_share});
}

// Forward, queries [first, first + rows) of the sequence whose operands are given.
struct ForwardSequence {
  const mok_attention_forward_args *args;
  Operand q, k, v;
  RowStatistics statistics;
  char *out;
  float *dots, *sums;
  void *probabilities;
};

mok_status forward_block(const mok_context &context, const ForwardSequence &s, int64_t first, int64_t rows) {
  const mok_attention_forward_args &args = *s.args;
  const int32_t precision = args.precision;
  const int64_t share = args.heads / args.kv_heads;
  const int64_t keys = first + rows;
  const DotBlock block{args.heads, rows, keys, padded(keys), first, 0};
  const float c = exponent_scale(args.scale);
  MOK_TRY(multiply(context, precision,
                   HeadProduct{false, true, rows, keys, args.head_size, s.q.from(precision, first, 0), s.k, s.dots, block.pitch,
                               block.step(), nullptr, args.heads, share}));
  for_precision(precision, [&](auto bf16) {
    probabilities_kernel<bf16.value><<<grid_of(args.heads * rows * 8, kRowThreads), kRowThreads, 0, context.stream>>>(
        block, s.statistics, c, s.dots, s.probabilities);
  });
  MOK_LAUNCHED();
  const Operand p{s.probabilities, block.pitch, block.step()};
  MOK_TRY(multiply(context, precision,
                   HeadProduct{false, false, rows, args.head_size, keys, p, s.v, s.sums, args.head_size, rows * args.head_size,
                               nullptr, args.heads, share}));
  for_precision(precision, [&](auto bf16) {
    finish_kernel<bf16.value><<<grid_of(args.heads * rows * args.head_size, kRowThreads), kRowThreads, 0, context.stream>>>(
        block, s.statistics, args.head_size, s.sums, s.out);
  });
  MOK_LAUNCHED();
  return MOK_OK;
}

// Tests take both ways: the smallest tile means blocks.
bool use_fused(const mok_context *context) { return context->tile != kTileKinds; }

template <typename Args>
mok_status check(const Args *args) {
  MOK_TRY(check_precision(args->precision));
  MOK_REQUIRE_RANGE(args, sequences, 0, kRowsMax);
  MOK_REQUIRE_RANGE(args, length, 0, kRowsMax);
  MOK_REQUIRE(args->sequences * args->length <= kRowsMax, "sequences * length is %" PRId64 "; allowed: at most %" PRId64,
              args->sequences * args->length, kRowsMax);
  MOK_REQUIRE_RANGE(args, heads, 1, kWidthMax);
  MOK_REQUIRE_RANGE(args, kv_heads, 1, args->heads);
  MOK_REQUIRE(args->heads % args->kv_heads == 0, "heads is %" PRId64 " and kv_heads %" PRId64 "; allowed: a multiple of kv_heads",
              args->heads, args->kv_heads);
  MOK_REQUIRE_RANGE(args, head_size, 1, kWidthMax);
  MOK_REQUIRE(args->ld_v >= args->kv_heads * args->head_size,
              "ld_v is %" PRId64 "; allowed: kv_heads * head_size = %" PRId64 " or more", args->ld_v,
              args->kv_heads * args->head_size);
  MOK_REQUIRE(std::isfinite(args->scale) && args->scale > 0, "scale is %g; allowed: a finite number above 0",
              static_cast<double>(args->scale));
  const int64_t tokens = args->sequences * args->length;
  MOK_REQUIRE_POINTER(args->q, tokens);
  MOK_REQUIRE_POINTER(args->k, tokens);
  MOK_REQUIRE_POINTER(args->v, tokens);
  MOK_REQUIRE_POINTER(args->out, tokens);
  MOK_REQUIRE_POINTER(args->row_max, tokens);
  MOK_REQUIRE_POINTER(args->row_recip, tokens);
  return MOK_OK;
}

mok_status forward(const mok_context *context, const mok_attention_forward_args *args) {
  MOK_TRY(check(args));
  if (args->sequences * args->length == 0) return MOK_OK;
  if (use_fused(context) && fused_attention_forward(*args)) return launch_fused_forward(*context, *args);
  const bool bf16 = args->precision == MOK_BF16;
  const int64_t size = args->head_size;
  const int64_t operand_bytes = bf16 ? 2 : 4;
  const int64_t rows_each = block_rows(args->heads, args->length, bf16 ? 6 : 4, args->length);
  const int64_t dots = args->heads * rows_each * padded(args->length);
  Scratch dot_scratch(context->stream), probability_scratch(context->stream), sum_scratch(context->stream);
  MOK_TRY(dot_scratch.take(static_cast<size_t>(dots) * 4));
  if (bf16) MOK_TRY(probability_scratch.take(static_cast<size_t>(dots) * 2));
  MOK_TRY(sum_scratch.take(static_cast<size_t>(args->heads * rows_each * size) * 4));
  const Operand q{args->q, args->heads * size, size};
  const Operand k{args->k, args->kv_heads * size, size};
  const Operand v{args->v, args->ld_v, size};
  for (int64_t sequence = 0; sequence < args->sequences; ++sequence) {
    const int64_t token = sequence * args->length;
    ForwardSequence s{
        args,
        q.from(args->precision, token, 0),
        k.from(args->precision, token, 0),
        v.from(args->precision, token, 0),
        RowStatistics{args->row_max + token * args->heads, args->row_recip + token * args->heads, args->heads, 0, 1},
        static_cast<char *>(args->out) + token * args->heads * size * operand_bytes,
        dot_scratch.as<float>(),
        sum_scratch.as<float>(),
        bf16 ? probability_scratch.as<void>() : dot_scratch.as<void>()};
    for (int64_t first = 0; first < args->length; first += rows_each) {
      MOK_TRY(forward_block(*context, s, first, std::min(rows_each, args->length - first)));
    }
  }
  return MOK_OK;
}

// Backward over one sequence.
struct BackwardSequence {
  const mok_attention_backward_args *args;
  Operand q, k, v, grad_out;
  RowStatistics statistics;
  const float *delta;  // [length, heads]
  float *grad_q, *grad_k;
  char *grad_v;
  float *dots, *products;               // S and dP of a block
  void *probabilities, *dot_gradients;  // op(P) and dS
  float *chain_k, *chain_v;             // [kv_heads, keys, head_size]
};

mok_status launch_gradients(const mok_context &context, const BackwardSequence &s, const DotBlock &block,
                            const RowStatistics &statistics, bool probabilities) {
  const dim3 grid(static_cast<unsigned>(block.rows), grid_of(block.columns, kRowThreads));
  const float c = exponent_scale(s.args->scale);
  for_precision(s.args->precision, [&](auto bf16) {
    gradients_kernel<bf16.value><<<grid, kRowThreads, 0, context.stream>>>(
        block, statistics, s.delta, c, s.dots, s.products, probabilities ? s.probabilities : nullptr, s.dot_gradients);
  });
  MOK_LAUNCHED();
  return MOK_OK;
}

// dQ of queries [first, first + rows): keys ascending.
mok_status backward_queries(const mok_context &context, const BackwardSequence &s, int64_t first, int64_t rows) {
  const mok_attention_backward_args &args = *s.args;
  const int32_t precision = args.precision;
  const int64_t share = args.heads / args.kv_heads;
  const int64_t keys = first + rows;
  const DotBlock block{args.heads, rows, keys, padded(keys), first, 0};
  MOK_TRY(multiply(context, precision,
                   HeadProduct{false, true, rows, keys, args.head_size, s.q.from(precision, first, 0), s.k, s.dots, block.pitch,
                               block.step(), nullptr, args.heads, share}));
  MOK_TRY(multiply(context, precision,
                   HeadProduct{false, true, rows, keys, args.head_size, s.grad_out.from(precision, first, 0), s.v, s.products,
                               block.pitch, block.step(), nullptr, args.heads, share}));
  MOK_TRY(launch_gradients(context, s, block, s.statistics, false));
  const Operand ds{s.dot_gradients, block.pitch, block.step()};
  return multiply(context, precision,
                  HeadProduct{false, false, rows, args.head_size, keys, ds, s.k, s.grad_q + first * args.heads * args.head_size,
                              args.heads * args.head_size, args.head_size, nullptr, args.heads, share});
}

// dK and dV of keys [first, first + keys): for each query head of a key head, queries ascending. Queries before `first` are
// masked.
mok_status backward_keys(const mok_context &context, const BackwardSequence &s, int64_t first, int64_t keys) {
  const mok_attention_backward_args &args = *s.args;
  const int32_t precision = args.precision;
  const int64_t share = args.heads / args.kv_heads;
  const int64_t size = args.head_size;
  const int64_t rows = args.length - first;
  const DotBlock block{args.kv_heads, rows, keys, padded(keys), first, first};
  for (int64_t head = 0; head < share; ++head) {
    Operand q = s.q.from(precision, first, head * size);
    Operand gradient = s.grad_out.from(precision, first, head * size);
    q.step = gradient.step = share * size;
    RowStatistics statistics = s.statistics;
    statistics.first_head = head;
    statistics.head_step = share;
    MOK_TRY(multiply(context, precision,
                     HeadProduct{false, true, rows, keys, size, q, s.k.from(precision, first, 0), s.dots, block.pitch,
                                 block.step(), nullptr, args.kv_heads, 1}));
    MOK_TRY(multiply(context, precision,
                     HeadProduct{false, true, rows, keys, size, gradient, s.v.from(precision, first, 0), s.products, block.pitch,
                                 block.step(), nullptr, args.kv_heads, 1}));
    MOK_TRY(launch_gradients(context, s, block, statistics, true));
    const Operand p{s.probabilities, block.pitch, block.step()};
    const Operand ds{s.dot_gradients, block.pitch, block.step()};
    MOK_TRY(multiply(context, precision,
                     HeadProduct{true, false, keys, size, rows, ds, q, s.chain_k, size, keys * size,
                                 head > 0 ? s.chain_k : nullptr, args.kv_heads, 1}));
    MOK_TRY(multiply(context, precision,
                     HeadProduct{true, false, keys, size, rows, p, gradient, s.chain_v, size, keys * size,
                                 head > 0 ? s.chain_v : nullptr, args.kv_heads, 1}));
  }
  const int64_t bytes = precision == MOK_BF16 ? 2 : 4;
  for_precision(precision, [&](auto bf16) {
    key_gradients_kernel<bf16.value><<<grid_of(args.kv_heads * keys * size, kRowThreads), kRowThreads, 0, context.stream>>>(
        args.kv_heads, keys, size, args.scale, s.chain_k, s.chain_v, s.grad_k + first * args.kv_heads * size,
        s.grad_v + first * args.ld_grad_v * bytes, args.ld_grad_v);
  });
  MOK_LAUNCHED();
  return MOK_OK;
}

// The scratch memory of a backward call.
struct BackwardScratch {
  explicit BackwardScratch(cudaStream_t stream)
      : delta(stream),
        dots(stream),
        products(stream),
        probabilities(stream),
        gradients(stream),
        chain_k(stream),
        chain_v(stream) {}

  mok_status take(const mok_attention_backward_args *args, int64_t dot_count, int64_t keys_each) {
    const bool bf16 = args->precision == MOK_BF16;
    const auto chain_bytes = static_cast<size_t>(args->kv_heads * keys_each * args->head_size) * 4;
    MOK_TRY(delta.take(static_cast<size_t>(args->sequences * args->length * args->heads) * 4));
    MOK_TRY(dots.take(static_cast<size_t>(dot_count) * 4));
    MOK_TRY(products.take(static_cast<size_t>(dot_count) * 4));
    if (bf16) {
      MOK_TRY(probabilities.take(static_cast<size_t>(dot_count) * 2));
      MOK_TRY(gradients.take(static_cast<size_t>(dot_count) * 2));
    }
    MOK_TRY(chain_k.take(chain_bytes));
    return chain_v.take(chain_bytes);
  }

  Scratch delta, dots, products, probabilities, gradients, chain_k, chain_v;
};

// Sequence `index` of a call.
BackwardSequence backward_sequence(const mok_attention_backward_args &args, const BackwardScratch &scratch, int64_t index) {
  const bool bf16 = args.precision == MOK_BF16;
  const int64_t size = args.head_size;
  const int64_t token = index * args.length;
  const int64_t statistic = token * args.heads;
  const auto at = [&](const void *base, int64_t pitch) { return Operand{base, pitch, size}.from(args.precision, token, 0); };
  // The statistics are only read here; kernels of the forward pass write them.
  const RowStatistics statistics{const_cast<float *>(args.row_max) + statistic, const_cast<float *>(args.row_recip) + statistic,
                                 args.heads, 0, 1};
  return BackwardSequence{&args,
                          at(args.q, args.heads * size),
                          at(args.k, args.kv_heads * size),
                          at(args.v, args.ld_v),
                          at(args.grad_out, args.heads * size),
                          statistics,
                          scratch.delta.as<float>() + statistic,
                          args.grad_q + token * args.heads * size,
                          args.grad_k + token * args.kv_heads * size,
                          static_cast<char *>(args.grad_v) + token * args.ld_grad_v * (bf16 ? 2 : 4),
                          scratch.dots.as<float>(),
                          scratch.products.as<float>(),
                          bf16 ? scratch.probabilities.as<void>() : scratch.dots.as<void>(),
                          bf16 ? scratch.gradients.as<void>() : scratch.products.as<void>(),
                          scratch.chain_k.as<float>(),
                          scratch.chain_v.as<float>()};
}

mok_status backward_by_blocks(const mok_context *context, const mok_attention_backward_args *args) {
  const int64_t dot_bytes = args->precision == MOK_BF16 ? 12 : 8;
  const int64_t queries_each = block_rows(args->heads, args->length, dot_bytes, args->length);
  const int64_t keys_each = block_rows(args->kv_heads, args->length, dot_bytes, args->length);
  const int64_t dots =
      std::max(args->heads * queries_each * padded(args->length), args->kv_heads * args->length * padded(keys_each));
  BackwardScratch scratch(context->stream);
  MOK_TRY(scratch.take(args, dots, keys_each));
  const int64_t rows = args->sequences * args->length * args->heads;
  for_precision(args->precision, [&](auto bf16) {
    delta_kernel<bf16.value><<<grid_of(rows, kRowWarps), kRowThreads, 0, context->stream>>>(rows, args->head_size, args->grad_out,
                                                                                            args->out, scratch.delta.as<float>());
  });
  MOK_LAUNCHED();
  for (int64_t sequence = 0; sequence < args->sequences; ++sequence) {
    const BackwardSequence s = backward_sequence(*args, scratch, sequence);
    for (int64_t first = 0; first < args->length; first += queries_each) {
      MOK_TRY(backward_queries(*context, s, first, std::min(queries_each, args->length - first)));
    }
    for (int64_t first = 0; first < args->length; first += keys_each) {
      MOK_TRY(backward_keys(*context, s, first, std::min(keys_each, args->length - first)));
    }
  }
  const int64_t count = rows * args->head_size;
  scale_kernel<<<grid_of(count, kRowThreads), kRowThreads, 0, context->stream>>>(count, args->scale, args->grad_q);
  MOK_LAUNCHED();
  return MOK_OK;
}

mok_status backward(const mok_context *context, const mok_attention_backward_args *args) {
  MOK_TRY(check(args));
  MOK_REQUIRE(args->ld_grad_v >= args->kv_heads * args->head_size,
              "ld_grad_v is %" PRId64 "; allowed: kv_heads * head_size = %" PRId64 " or more", args->ld_grad_v,
              args->kv_heads * args->head_size);
  const int64_t tokens = args->sequences * args->length;
  MOK_REQUIRE_POINTER(args->grad_out, tokens);
  MOK_REQUIRE_POINTER(args->grad_q, tokens);
  MOK_REQUIRE_POINTER(args->grad_k, tokens);
  MOK_REQUIRE_POINTER(args->grad_v, tokens);
  if (tokens == 0) return MOK_OK;
  if (use_fused(context) && fused_attention_backward(*args)) return launch_fused_backward(*context, *args);
  return backward_by_blocks(context, args);
}

}  // namespace
}  // namespace mok::cuda

extern "C" MOK_API mok_status mok_attention_forward(mok_context *context, const mok_attention_forward_args *args) {
  return mok::cuda::enter("mok_attention_forward", context, args, [&] { return mok::cuda::forward(context, args); });
}

extern "C" MOK_API mok_status mok_attention_backward(mok_context *context, const mok_attention_backward_args *args) {
  return mok::cuda::enter("mok_attention_backward", context, args, [&] { return mok::cuda::backward(context, args); });
}

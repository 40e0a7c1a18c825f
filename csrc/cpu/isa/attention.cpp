#include "cpu/isa/attention.h"

#include <cstring>

#include "common/functions.h"
#include "common/sums.h"
#include "cpu/isa/operand.h"
#include "cpu/isa/product.h"

namespace MOK_ISA_NS {
namespace {

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t blocks_of(int64_t count, int64_t block) { return (count + block - 1) / block; }
int64_t padded(int64_t count) { return blocks_of(count, 16) * 16; }

// c = scale*log2e, which turns dots into exponents of two.
float exponent_scale(float scale) { return scale * mok::f32::from_bits(0x3FB8AA3Bu); }

// A matrix of operands inside a larger one: element [i, j] is data[i * row + j].
struct Rows {
  const void *data;
  int64_t row;
};

Rows rows_at(int32_t precision, const void *base, int64_t offset, int64_t row) {
  return {mok::operand_at(precision, base, offset), row};
}

// out[m,n] = a[m,k] . b[n,k]^T
void times_transposed(const AttentionBlocks *blocks, int32_t precision, int64_t m, int64_t n, int64_t k, Rows a, Rows b, float *out,
                      int64_t out_row, mok::Scratch *scratch) {
  const mok::SerialProduct product = {precision, blocks->tile_limit, m,      n, k, a.data, a.row, 1, b.data, 1, b.row,
                                      out,       out_row,            nullptr};
  serial_product(&product, scratch);
}

// out[m,n] = initial + a[m,k] . b[k,n]; the chain over k goes on from `initial` (out or NULL).
void times(const AttentionBlocks *blocks, int32_t precision, int64_t m, int64_t n, int64_t k, Rows a, Rows b, float *out,
           int64_t out_row, const float *initial, mok::Scratch *scratch) {
  const mok::SerialProduct product = {precision, blocks->tile_limit, m,      n, k, a.data, a.row, 1, b.data, b.row, 1,
                                      out,       out_row,            initial};
  serial_product(&product, scratch);
}

// out[m,n] += a[k,m]^T . b[k,n], one carried chain.
void transposed_times(const AttentionBlocks *blocks, int32_t precision, int64_t m, int64_t n, int64_t k, Rows a, Rows b, float *out,
                      int64_t out_row, mok::Scratch *scratch) {
  const mok::SerialProduct product = {precision, blocks->tile_limit, m,  n, k, a.data, 1, a.row, b.data, b.row, 1,
                                      out,       out_row,            out};
  serial_product(&product, scratch);
}

// Eight floats in vector registers: row statistics of long rows.
typedef float Lanes __attribute__((vector_size(32)));

float row_maximum(int64_t count, const float *x) {
  float maximum = x[0];
  int64_t j = 0;
  if (count >= 8) {
    Lanes lanes, next;
    memcpy(&lanes, x, sizeof lanes);
    for (j = 8; j + 8 <= count; j += 8) {
      memcpy(&next, x + j, sizeof next);
      lanes = next > lanes ? next : lanes;
    }
    for (int l = 0; l < 8; ++l) maximum = lanes[l] > maximum ? lanes[l] : maximum;
  }
  for (; j < count; ++j) maximum = x[j] > maximum ? x[j] : maximum;
  return maximum;
}

// exp2(dot*c - shift), +0 below 2^-126; the exponent is at most 0 and an error of rounding.
inline float probability(float dot, float c, float shift) {
  const float t = mok::f32::fma(dot, c, -shift);
  const float rest = t < -126.0f ? 0.0f : mok::f32::nan();
  const float value = mok::f32::exp2_normal(t);
  return t >= -126.0f ? value : rest;
}

void probabilities(int64_t count, float c, float shift, float *x) {
  for (int64_t j = 0; j < count; ++j) x[j] = probability(x[j], c, shift);
}

// From S to P = p*r and from dP to dS, unrounded.
void gradients(int64_t count, float c, float shift, float recip, float delta, float *__restrict p, float *__restrict ds) {
  for (int64_t j = 0; j < count; ++j) {
    p[j] = probability(p[j], c, shift) * recip;
    ds[j] = p[j] * (ds[j] - delta);
  }
}

// The sum of an attention row: lane = key mod 8 over all keys.
float lane_sum(int64_t count, const float *x) {
  Lanes lanes = {}, next;
  int64_t j = 0;
  for (; j + 8 <= count; j += 8) {
    memcpy(&next, x + j, sizeof next);
    lanes += next;
  }
  float lane[8];
  memcpy(lane, &lanes, sizeof lane);
  for (int l = 0; j + l < count; ++l) lane[l] += x[j + l];
  return mok::fold(lane);
}

int64_t forward_tasks(const mok_attention_forward_args *args, const AttentionBlocks *blocks) {
  return blocks_of(args->length, blocks->queries) * args->sequences * args->heads;
}

// A product's operand made of fp32 values: the values themselves, or a bf16 copy of them.
void *take_operand(int32_t precision, int64_t count, float *values, mok::Scratch *scratch) {
  return precision == MOK_BF16 ? mok::scratch_take(scratch, static_cast<size_t>(count) * sizeof(uint16_t)) : values;
}
size_t rounded_bytes(int32_t precision, int64_t count) {
  return precision == MOK_BF16 ? mok::scratch_bytes(static_cast<size_t>(count) * sizeof(uint16_t)) : 0;
}

size_t largest(size_t a, size_t b) { return a > b ? a : b; }

size_t forward_scratch(const mok_attention_forward_args *args, const AttentionBlocks *blocks) {
  const int64_t rows = smaller(blocks->queries, args->length), keys = smaller(blocks->keys, args->length), size = args->head_size;
  const int64_t dots = rows * padded(args->length);
  return mok::float_bytes(dots) + rounded_bytes(args->precision, dots) + mok::float_bytes(rows) + mok::float_bytes(rows * size) +
         largest(serial_product_scratch(args->precision, rows, keys, size), serial_product_scratch(args->precision, rows, size, keys));
}

void forward(const mok_attention_forward_args *args, const AttentionBlocks *blocks, int64_t task, mok::Scratch *scratch) {
  const int32_t precision = args->precision;
  const int64_t pairs = args->sequences * args->heads, block = blocks_of(args->length, blocks->queries) - 1 - task / pairs;
  const int64_t sequence = task % pairs / args->heads, head = task % args->heads;
  const int64_t kv_head = head / (args->heads / args->kv_heads), size = args->head_size;
  const int64_t first = block * blocks->queries, rows = smaller(blocks->queries, args->length - first);
  const int64_t keys = first + rows, width = padded(keys);
  const int64_t key_token = sequence * args->length, token = key_token + first;
  const int64_t q_row = args->heads * size, k_row = args->kv_heads * size;

  float *const dots = mok::take_floats(scratch, rows * width);
  void *const weights = take_operand(precision, rows * width, dots, scratch);
  float *const recips = mok::take_floats(scratch, rows);
  float *const sums = mok::take_floats(scratch, rows * size);

  const Rows q = rows_at(precision, args->q, token * q_row + head * size, q_row);
  for (int64_t key = 0; key < keys; key += blocks->keys) {
    const Rows k = rows_at(precision, args->k, (key_token + key) * k_row + kv_head * size, k_row);
    times_transposed(blocks, precision, rows, smaller(blocks->keys, keys - key), size, q, k, dots + key, width, scratch);
  }
  const float c = exponent_scale(args->scale);
  for (int64_t i = 0; i < rows; ++i) {
    float *const row = dots + i * width;
    const int64_t allowed = first + i + 1;
    const float maximum = row_maximum(allowed, row);
    probabilities(allowed, c, maximum * c, row);
    recips[i] = 1.0f / lane_sum(allowed, row);
    memset(row + allowed, 0, static_cast<size_t>(keys - allowed) * sizeof(float));
    if (precision == MOK_BF16) mok::store_row(precision, keys, row, mok::operand_at(precision, weights, i * width));
    args->row_max[(token + i) * args->heads + head] = mok::f32::canonical(maximum);
    args->row_recip[(token + i) * args->heads + head] = mok::f32::canonical(recips[i]);
  }
  for (int64_t key = 0; key < keys; key += blocks->keys) {
    const Rows p = rows_at(precision, weights, key, width);
    const Rows v = rows_at(precision, args->v, (key_token + key) * args->ld_v + kv_head * size, args->ld_v);
    times(blocks, precision, rows, size, smaller(blocks->keys, keys - key), p, v, sums, size, key > 0 ? sums : nullptr, scratch);
  }
  for (int64_t i = 0; i < rows; ++i) {
    float *const row = sums + i * size;
    for (int64_t j = 0; j < size; ++j) row[j] *= recips[i];
    mok::store_row(precision, size, row, mok::operand_at(precision, args->out, (token + i) * q_row + head * size));
  }
}

// One backward task: a key head of a sequence, and what it keeps in its scratch for a tile of queries by keys.
struct Backward {
  const mok_attention_backward_args *args;
  const AttentionBlocks *blocks;
  int64_t token, kv_head;               // first token of the sequence
  float *delta;                         // [query heads of the key head, length]
  float *dots, *products;               // S, then P; dP, then dS; [queries, keys]
  void *probabilities, *dot_gradients;  // op(P) and dS as operands
  float *grad_k, *grad_v;               // [keys, head_size], carried over the queries
  mok::Scratch *scratch;
};

// Rows of a query head in q, out, grad_out and grad_q.
int64_t query_row(const mok_attention_backward_args *args) { return args->heads * args->head_size; }
int64_t query_offset(const Backward *task, int64_t head, int64_t query) {
  return (task->token + query) * query_row(task->args) + head * task->args->head_size;
}

size_t backward_scratch(const mok_attention_backward_args *args, const AttentionBlocks *blocks) {
  const int32_t precision = args->precision;
  const int64_t rows = smaller(blocks->queries, args->length), keys = smaller(blocks->keys, args->length), size = args->head_size;
  const size_t by_keys = serial_product_scratch(precision, rows, keys, size);
  const size_t by_size = serial_product_scratch(precision, rows, size, keys);
  const size_t by_queries = serial_product_scratch(precision, keys, size, rows);
  return mok::float_bytes(args->heads / args->kv_heads * args->length) + 2 * mok::float_bytes(size) + 2 * mok::float_bytes(rows * keys) +
         2 * rounded_bytes(precision, rows * keys) + 2 * mok::float_bytes(keys * size) + largest(by_keys, largest(by_size, by_queries));
}

// delta = row sum of dO*O, for each query head of the key head.
void row_deltas(const Backward *task, int64_t first_head, int64_t heads) {
  const mok_attention_backward_args *const args = task->args;
  const int64_t size = args->head_size;
  float *const room = mok::take_floats(task->scratch, size), *const other_room = mok::take_floats(task->scratch, size);
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t i = 0; i < args->length; ++i) {
      const int64_t offset = query_offset(task, first_head + h, i);
      const float *const gradient = mok::widen_row(args->precision, size, mok::operand_at(args->precision, args->grad_out, offset), room);
      const float *const out = mok::widen_row(args->precision, size, mok::operand_at(args->precision, args->out, offset), other_room);
      task->delta[h * args->length + i] = mok::row_sum(size, [=](float lane, int64_t j) { return mok::f32::fma(gradient[j], out[j], lane); });
    }
  }
}

// From S and dP of a tile to op(P) and dS.
void tile_gradients(const Backward *task, int64_t head, int64_t query, int64_t rows, int64_t key, int64_t keys, const float *delta) {
  const mok_attention_backward_args *const args = task->args;
  const float c = exponent_scale(args->scale);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t statistic = (task->token + query + i) * args->heads + head, reach = query + i + 1 - key;
    const int64_t allowed = reach < 0 ? 0 : smaller(reach, keys);
    float *const p = task->dots + i * keys, *const ds = task->products + i * keys;
    gradients(allowed, c, args->row_max[statistic] * c, args->row_recip[statistic], delta[query + i], p, ds);
    memset(p + allowed, 0, static_cast<size_t>(keys - allowed) * sizeof(float));
    memset(ds + allowed, 0, static_cast<size_t>(keys - allowed) * sizeof(float));
    if (args->precision == MOK_BF16) {
      mok::store_row(MOK_BF16, keys, p, mok::operand_at(MOK_BF16, task->probabilities, i * keys));
      mok::store_row(MOK_BF16, keys, ds, mok::operand_at(MOK_BF16, task->dot_gradients, i * keys));
    }
  }
}

// Queries [query, query + rows) of `head` against keys [key, key + keys): dQ, dK and dV go on.
void tile_backward(const Backward *task, int64_t head, int64_t query, int64_t rows, int64_t key, int64_t keys, const float *delta) {
  const mok_attention_backward_args *const args = task->args;
  const AttentionBlocks *const blocks = task->blocks;
  const int32_t precision = args->precision;
  const int64_t size = args->head_size, q_row = query_row(args), k_row = args->kv_heads * size;
  const int64_t q_offset = query_offset(task, head, query);
  const Rows q = rows_at(precision, args->q, q_offset, q_row), gradient = rows_at(precision, args->grad_out, q_offset, q_row);
  const Rows k = rows_at(precision, args->k, (task->token + key) * k_row + task->kv_head * size, k_row);
  const Rows v = rows_at(precision, args->v, (task->token + key) * args->ld_v + task->kv_head * size, args->ld_v);
  const Rows p = {task->probabilities, keys}, ds = {task->dot_gradients, keys};
  float *const grad_q = args->grad_q + q_offset;
  times_transposed(blocks, precision, rows, keys, size, q, k, task->dots, keys, task->scratch);
  times_transposed(blocks, precision, rows, keys, size, gradient, v, task->products, keys, task->scratch);
  tile_gradients(task, head, query, rows, key, keys, delta);
  times(blocks, precision, rows, size, keys, ds, k, grad_q, q_row, key > 0 ? grad_q : nullptr, task->scratch);
  transposed_times(blocks, precision, keys, size, rows, ds, q, task->grad_k, size, task->scratch);
  transposed_times(blocks, precision, keys, size, rows, p, gradient, task->grad_v, size, task->scratch);
}

// The finished dK and dV of a tile of keys.
void store_key_gradients(const Backward *task, int64_t key, int64_t keys) {
  const mok_attention_backward_args *const args = task->args;
  const int64_t size = args->head_size;
  for (int64_t j = 0; j < keys; ++j) {
    const int64_t token = task->token + key + j;
    float *const grad_k = args->grad_k + (token * args->kv_heads + task->kv_head) * size;
    for (int64_t i = 0; i < size; ++i) grad_k[i] = mok::f32::canonical(args->scale * task->grad_k[j * size + i]);
    void *const grad_v = mok::operand_at(args->precision, args->grad_v, token * args->ld_grad_v + task->kv_head * size);
    mok::store_row(args->precision, size, task->grad_v + j * size, grad_v);
  }
}

void backward(const mok_attention_backward_args *args, const AttentionBlocks *blocks, int64_t index, mok::Scratch *scratch) {
  const int64_t shared = args->heads / args->kv_heads, kv_head = index % args->kv_heads, size = args->head_size;
  const int64_t rows = smaller(blocks->queries, args->length), keys = smaller(blocks->keys, args->length);
  Backward task = {};
  task.args = args;
  task.blocks = blocks;
  task.token = index / args->kv_heads * args->length;
  task.kv_head = kv_head;
  task.delta = mok::take_floats(scratch, shared * args->length);
  task.dots = mok::take_floats(scratch, rows * keys);
  task.products = mok::take_floats(scratch, rows * keys);
  task.probabilities = take_operand(args->precision, rows * keys, task.dots, scratch);
  task.dot_gradients = take_operand(args->precision, rows * keys, task.products, scratch);
  task.grad_k = mok::take_floats(scratch, keys * size);
  task.grad_v = mok::take_floats(scratch, keys * size);
  task.scratch = scratch;
  row_deltas(&task, kv_head * shared, shared);
  for (int64_t key = 0; key < args->length; key += keys) {
    const int64_t tile_keys = smaller(keys, args->length - key);
    memset(task.grad_k, 0, static_cast<size_t>(keys * size) * sizeof(float));
    memset(task.grad_v, 0, static_cast<size_t>(keys * size) * sizeof(float));
    for (int64_t h = 0; h < shared; ++h) {
      for (int64_t query = key / rows * rows; query < args->length; query += rows) {
        const int64_t tile_rows = smaller(rows, args->length - query), reach = smaller(tile_keys, query + tile_rows - key);
        tile_backward(&task, kv_head * shared + h, query, tile_rows, key, reach, task.delta + h * args->length);
      }
    }
    store_key_gradients(&task, key, tile_keys);
  }
  for (int64_t i = 0; i < args->length; ++i) {
    float *const row = args->grad_q + query_offset(&task, kv_head * shared, i);
    for (int64_t j = 0; j < shared * size; ++j) row[j] = mok::f32::canonical(args->scale * row[j]);
  }
}

}  // namespace

extern const AttentionTable attention_table = {forward_tasks, forward_scratch, forward, backward_scratch, backward};

}  // namespace MOK_ISA_NS

#include "cpu/isa/attention.h"

#include <cstring>

#include "common/functions.h"
#include "common/sums.h"
#include "cpu/isa/operand.h"
#include "cpu/isa/product.h"

namespace MOK_ISA_NS {
namespace {

namespace f32 = mok::f32;
using mok::float_bytes, mok::operand_at, mok::store_row, mok::take_floats, mok::widen_row;
using mok::ProductOperand, mok::Scratch;

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t blocks_of(int64_t count, int64_t block) { return (count + block - 1) / block; }
int64_t padded(int64_t count) { return blocks_of(count, 16) * 16; }

// c = scale*log2e, which turns dots into exponents of two.
float exponent_scale(float scale) { return scale * f32::from_bits(0x3FB8AA3Bu); }

// How the products of a task are done.
struct Products {
  int32_t precision;
  int64_t tile_limit, panel_columns;
  Scratch *scratch;
};

Products products_of(int32_t precision, int64_t tile_limit, Scratch *scratch) {
  return {precision, tile_limit, product_table.panel_columns(precision, tile_limit), scratch};
}

// An operand whose lines are `ld` elements apart; they run along the depth of the product, or across it.
ProductOperand lines_along(const void *data, int64_t ld) { return {data, ld, nullptr, 1}; }
ProductOperand lines_across(const void *data, int64_t ld) { return {data, ld, nullptr, 0}; }

size_t packed_bytes(const Products *products, int64_t columns, int64_t k) {
  return static_cast<size_t>(blocks_of(columns, products->panel_columns)) * product_table.panel_bytes(products->precision, k);
}

// Packed columns of a product's right operand.
struct Packed {
  unsigned char *panels;
  int64_t columns;
};

// Packs b [k, columns] once, for any number of multiply() with it.
void pack(const Products *products, ProductOperand b, int64_t columns, int64_t k, Packed *packed) {
  unsigned char *panel = packed->panels;
  for (int64_t column = 0; column < columns; column += products->panel_columns) {
    const int64_t held = smaller(products->panel_columns, columns - column);
    product_table.pack_panel(products->precision, &b, k, column, held, panel);
    panel += product_table.panel_bytes(products->precision, k);
  }
  packed->columns = columns;
}

// out[m,n] = a[m,k] . b[k, the first n columns], whole panels or all; the chain over k goes on from `initial` (out or NULL).
void multiply(const Products *products, ProductOperand a, int64_t m, int64_t n, int64_t k, const Packed *b, float *out,
              int64_t ldc, const float *initial) {
  assert(n == b->columns || (n < b->columns && n % products->panel_columns == 0));
  mok::ProductRows rows = {};
  rows.precision = products->precision;
  rows.tile_limit = products->tile_limit;
  rows.m = m;
  rows.n = n;
  rows.k = k;
  rows.a = a;
  rows.panels = b->panels;
  rows.panel_columns = products->panel_columns;
  rows.c = out;
  rows.ldc = ldc;
  rows.initial = initial;
  product_table.product_rows(&rows, products->scratch);
}

size_t multiply_scratch(const Products *products, int64_t m, int64_t n, int64_t k) {
  return product_table.rows_scratch(products->precision, m, n, k, products->tile_limit);
}

constexpr int64_t kTurned = 16;  // rows that are turned at a time on their way out

typedef float Quad __attribute__((vector_size(16)));

// A square of 4 x 4: to[j][i] = from[i][j].
inline void transpose4(const float *from, int64_t from_row, float *to, int64_t to_row) {
  Quad x[4], pair[4];
  for (int i = 0; i < 4; ++i) memcpy(&x[i], from + i * from_row, sizeof x[i]);
  for (int i = 0; i < 2; ++i) {
    pair[2 * i] = __builtin_shufflevector(x[2 * i], x[2 * i + 1], 0, 4, 1, 5);
    pair[2 * i + 1] = __builtin_shufflevector(x[2 * i], x[2 * i + 1], 2, 6, 3, 7);
  }
  for (int i = 0; i < 2; ++i) {
    x[2 * i] = __builtin_shufflevector(pair[i], pair[i + 2], 0, 1, 4, 5);
    x[2 * i + 1] = __builtin_shufflevector(pair[i], pair[i + 2], 2, 3, 6, 7);
  }
  for (int i = 0; i < 4; ++i) memcpy(to + i * to_row, &x[i], sizeof x[i]);
}

// to[j][i] = from[i][j] for i < rows, j < columns.
void transpose(int64_t rows, int64_t columns, const float *from, int64_t from_row, float *to, int64_t to_row) {
  const int64_t whole_rows = rows / 4 * 4, whole_columns = columns / 4 * 4;
  for (int64_t i = 0; i < whole_rows; i += 4) {
    for (int64_t j = 0; j < whole_columns; j += 4) transpose4(from + i * from_row + j, from_row, to + j * to_row + i, to_row);
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = i < whole_rows ? whole_columns : 0; j < columns; ++j) to[j * to_row + i] = from[i * from_row + j];
  }
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
  const float t = f32::fma(dot, c, -shift);
  const float rest = t < -126.0f ? 0.0f : f32::nan();
  const float value = f32::exp2_normal(t);
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

// A product's operand made of fp32 values: the values themselves, or a bf16 copy of them.
void *take_operand(int32_t precision, int64_t count, float *values, Scratch *scratch) {
  return precision == MOK_BF16 ? mok::scratch_take(scratch, static_cast<size_t>(count) * sizeof(uint16_t)) : values;
}
size_t rounded_bytes(int32_t precision, int64_t count) {
  return precision == MOK_BF16 ? mok::scratch_bytes(static_cast<size_t>(count) * sizeof(uint16_t)) : 0;
}

size_t larger(size_t a, size_t b) { return a > b ? a : b; }

// Forward tasks of a key head for one block of queries.
int64_t head_parts(const mok_attention_forward_args *args, const AttentionBlocks *blocks) {
  return blocks_of(args->heads / args->kv_heads, blocks->heads);
}

int64_t forward_tasks(const mok_attention_forward_args *args, const AttentionBlocks *blocks) {
  return blocks_of(args->length, blocks->queries) * args->sequences * args->kv_heads * head_parts(args, blocks);
}

// One forward task: a block of queries of some query heads of a key head. `stack` is (query head, query), head-major.
struct Forward {
  const mok_attention_forward_args *args;
  Products products;
  int64_t key_tile, token, first, rows;  // first token of the sequence, first query of the block, queries
  int64_t kv_head, head, stack;          // head: the first query head
  int64_t keys, width;                   // keys that the block sees; floats between rows of dots
  float *dots;                           // [stack, width]: S, then p
  void *weights;                         // op(p)
  int32_t *lines;                        // [stack]: row of q in units of head_size
  float *recips, *sums;                  // [stack]; O transposed [head_size, stack]
  Packed packed;
};

size_t forward_scratch(const mok_attention_forward_args *args, const AttentionBlocks *blocks) {
  const Products products = products_of(args->precision, blocks->tile_limit, nullptr);
  const int64_t size = args->head_size, heads = smaller(blocks->heads, args->heads / args->kv_heads);
  const int64_t stack = heads * smaller(blocks->queries, args->length);
  const int64_t keys = smaller(blocks->keys, args->length), dots = stack * padded(args->length);
  const size_t packed = larger(packed_bytes(&products, keys, size), packed_bytes(&products, stack, keys));
  const size_t product = larger(multiply_scratch(&products, stack, keys, size), multiply_scratch(&products, size, stack, keys));
  return float_bytes(dots) + rounded_bytes(args->precision, dots) + 2 * float_bytes(stack) + float_bytes(size * stack) +
         float_bytes(kTurned * size) + mok::scratch_bytes(packed) + product;
}

Forward forward_task(const mok_attention_forward_args *args, const AttentionBlocks *blocks, int64_t index, Scratch *scratch) {
  const int64_t shared = args->heads / args->kv_heads, size = args->head_size, parts = head_parts(args, blocks);
  const int64_t all_heads = args->sequences * args->kv_heads * parts, part = index % parts;
  Forward task = {};
  task.args = args;
  task.products = products_of(args->precision, blocks->tile_limit, scratch);
  task.key_tile = smaller(blocks->keys, args->length);
  task.token = index % all_heads / parts / args->kv_heads * args->length;
  task.first = (blocks_of(args->length, blocks->queries) - 1 - index / all_heads) * blocks->queries;
  task.rows = smaller(blocks->queries, args->length - task.first);
  task.kv_head = index / parts % args->kv_heads;
  task.head = task.kv_head * shared + part * blocks->heads;
  task.stack = smaller(blocks->heads, shared - part * blocks->heads) * task.rows;
  task.keys = task.first + task.rows;
  task.width = padded(task.keys);
  task.dots = take_floats(scratch, task.stack * task.width);
  task.weights = take_operand(args->precision, task.stack * task.width, task.dots, scratch);
  task.lines = static_cast<int32_t *>(mok::scratch_take(scratch, static_cast<size_t>(task.stack) * sizeof(int32_t)));
  task.recips = take_floats(scratch, task.stack);
  task.sums = take_floats(scratch, size * task.stack);
  const size_t for_keys = packed_bytes(&task.products, task.key_tile, size);
  const size_t for_weights = packed_bytes(&task.products, task.stack, task.key_tile);
  task.packed.panels = static_cast<unsigned char *>(mok::scratch_take(scratch, larger(for_keys, for_weights)));
  for (int64_t row = 0; row < task.stack; ++row) {
    task.lines[row] = static_cast<int32_t>(row % task.rows * args->heads + row / task.rows);
  }
  return task;
}

const void *forward_keys(const Forward *task, const void *base, int64_t ld, int64_t key) {
  return operand_at(task->args->precision, base, (task->token + key) * ld + task->kv_head * task->args->head_size);
}

void forward_dots(Forward *task) {
  const mok_attention_forward_args *const args = task->args;
  const int64_t size = args->head_size, k_row = args->kv_heads * size;
  const int64_t query = (task->token + task->first) * args->heads + task->head;
  const ProductOperand q = {operand_at(args->precision, args->q, query * size), size, task->lines, 1};
  for (int64_t key = 0; key < task->keys; key += task->key_tile) {
    const int64_t keys = smaller(task->key_tile, task->keys - key);
    pack(&task->products, lines_along(forward_keys(task, args->k, k_row, key), k_row), keys, size, &task->packed);
    multiply(&task->products, q, task->stack, keys, size, &task->packed, task->dots + key, task->width, nullptr);
  }
}

void forward_softmax(const Forward *task) {
  const mok_attention_forward_args *const args = task->args;
  const float c = exponent_scale(args->scale);
  for (int64_t row = 0; row < task->stack; ++row) {
    float *const p = task->dots + row * task->width;
    const int64_t query = task->first + row % task->rows, allowed = query + 1;
    const float maximum = row_maximum(allowed, p);
    probabilities(allowed, c, maximum * c, p);
    const float recip = 1.0f / lane_sum(allowed, p);
    memset(p + allowed, 0, static_cast<size_t>(task->keys - allowed) * sizeof(float));
    if (args->precision == MOK_BF16) {
      store_row(MOK_BF16, task->keys, p, operand_at(MOK_BF16, task->weights, row * task->width));
    }
    task->recips[row] = recip;
    const int64_t statistic = (task->token + query) * args->heads + task->head + row / task->rows;
    args->row_max[statistic] = f32::canonical(maximum);
    args->row_recip[statistic] = f32::canonical(recip);
  }
}

// O, transposed: its columns are the many, as products like it.
void forward_sums(Forward *task) {
  const mok_attention_forward_args *const args = task->args;
  const int64_t size = args->head_size;
  for (int64_t key = 0; key < task->keys; key += task->key_tile) {
    const int64_t keys = smaller(task->key_tile, task->keys - key);
    const ProductOperand p = lines_along(operand_at(args->precision, task->weights, key), task->width);
    const ProductOperand v = lines_across(forward_keys(task, args->v, args->ld_v, key), args->ld_v);
    pack(&task->products, p, task->stack, keys, &task->packed);
    multiply(&task->products, v, size, task->stack, keys, &task->packed, task->sums, task->stack, key > 0 ? task->sums : nullptr);
  }
}

void forward(const mok_attention_forward_args *args, const AttentionBlocks *blocks, int64_t index, Scratch *scratch) {
  Forward task = forward_task(args, blocks, index, scratch);
  const int64_t size = args->head_size;
  float *const rows = take_floats(scratch, kTurned * size);
  forward_dots(&task);
  forward_softmax(&task);
  forward_sums(&task);
  for (int64_t first = 0; first < task.stack; first += kTurned) {
    const int64_t count = smaller(kTurned, task.stack - first);
    transpose(size, count, task.sums + first, task.stack, rows, size);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = first + i, token = task.token + task.first + row % task.rows, head = task.head + row / task.rows;
      float *const out = rows + i * size;
      for (int64_t j = 0; j < size; ++j) out[j] = out[j] * task.recips[row];
      store_row(args->precision, size, out, operand_at(args->precision, args->out, (token * args->heads + head) * size));
    }
  }
}

// One backward task: a key head of a sequence, and what it keeps for a tile of queries by keys.
struct Backward {
  const mok_attention_backward_args *args;
  Products products;
  int64_t token, kv_head;               // first token of the sequence
  int64_t rows, keys;                   // of a full tile
  float *delta;                         // [query heads of the key head, length]
  float *dots, *products_of_v;          // S, then P; dP, then dS; [rows, keys]
  void *probabilities, *dot_gradients;  // op(P) and dS as operands
  float *grad_q;                        // dQ of the tile, transposed [head_size, rows]
  float *grad_k, *grad_v;               // transposed [head_size, keys], carried over the queries
  float *room, *other_room;             // [kTurned, head_size]
  Packed packed_k, packed_v, packed;
};

// Rows of a query head in q, out, grad_out and grad_q.
int64_t query_row(const mok_attention_backward_args *args) { return args->heads * args->head_size; }
int64_t query_offset(const Backward *task, int64_t head, int64_t query) {
  return (task->token + query) * query_row(task->args) + head * task->args->head_size;
}

size_t backward_scratch(const mok_attention_backward_args *args, const AttentionBlocks *blocks) {
  const Products products = products_of(args->precision, blocks->tile_limit, nullptr);
  const int64_t rows = smaller(blocks->queries, args->length), keys = smaller(blocks->keys, args->length), size = args->head_size;
  const size_t tile = 2 * float_bytes(rows * keys) + 2 * rounded_bytes(args->precision, rows * keys);
  const size_t gradients = float_bytes(size * rows) + 2 * float_bytes(size * keys) + 2 * float_bytes(kTurned * size);
  const size_t packed = larger(packed_bytes(&products, rows, keys), packed_bytes(&products, keys, rows));
  const size_t by_keys = larger(multiply_scratch(&products, rows, keys, size), multiply_scratch(&products, size, keys, rows));
  const size_t product = larger(by_keys, multiply_scratch(&products, size, rows, keys));
  return float_bytes(args->heads / args->kv_heads * args->length) + tile + gradients +
         2 * mok::scratch_bytes(packed_bytes(&products, keys, size)) + mok::scratch_bytes(packed) + product;
}

// delta = row sum of dO*O, for each query head of the key head.
void row_deltas(const Backward *task, int64_t first_head, int64_t heads) {
  const mok_attention_backward_args *const args = task->args;
  const int64_t size = args->head_size;
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t i = 0; i < args->length; ++i) {
      const int64_t at = query_offset(task, first_head + h, i);
      const float *const gradient = widen_row(args->precision, size, operand_at(args->precision, args->grad_out, at), task->room);
      const float *const out = widen_row(args->precision, size, operand_at(args->precision, args->out, at), task->other_room);
      const auto enter = [=](float lane, int64_t j) { return f32::fma(gradient[j], out[j], lane); };
      task->delta[h * args->length + i] = mok::row_sum(size, enter);
    }
  }
}

// Queries [query, query + rows) of `head` against keys [key, key + keys).
struct Tile {
  int64_t head, query, rows, key, keys;
  const float *delta;  // of the head's queries
};

// From S and dP of a tile to op(P) and dS.
void tile_gradients(const Backward *task, const Tile *tile) {
  const mok_attention_backward_args *const args = task->args;
  const float c = exponent_scale(args->scale);
  for (int64_t i = 0; i < tile->rows; ++i) {
    const int64_t query = tile->query + i, statistic = (task->token + query) * args->heads + tile->head;
    const int64_t reach = query + 1 - tile->key, allowed = reach < 0 ? 0 : smaller(reach, tile->keys);
    float *const p = task->dots + i * task->keys, *const ds = task->products_of_v + i * task->keys;
    gradients(allowed, c, args->row_max[statistic] * c, args->row_recip[statistic], tile->delta[query], p, ds);
    memset(p + allowed, 0, static_cast<size_t>(tile->keys - allowed) * sizeof(float));
    memset(ds + allowed, 0, static_cast<size_t>(tile->keys - allowed) * sizeof(float));
    if (args->precision == MOK_BF16) {
      store_row(MOK_BF16, tile->keys, p, operand_at(MOK_BF16, task->probabilities, i * task->keys));
      store_row(MOK_BF16, tile->keys, ds, operand_at(MOK_BF16, task->dot_gradients, i * task->keys));
    }
  }
}

// The tile's part of the chains of dQ, dK and dV.
void tile_backward(Backward *task, const Tile *tile) {
  const mok_attention_backward_args *const args = task->args;
  const Products *const products = &task->products;
  const int64_t size = args->head_size, rows = tile->rows, keys = tile->keys, stride = task->keys;
  const int64_t q_row = query_row(args), k_row = args->kv_heads * size, q_offset = query_offset(task, tile->head, tile->query);
  const void *const q = operand_at(args->precision, args->q, q_offset);
  const void *const gradient = operand_at(args->precision, args->grad_out, q_offset);
  const void *const k = operand_at(args->precision, args->k, (task->token + tile->key) * k_row + task->kv_head * size);
  multiply(products, lines_along(q, q_row), rows, keys, size, &task->packed_k, task->dots, stride, nullptr);
  multiply(products, lines_along(gradient, q_row), rows, keys, size, &task->packed_v, task->products_of_v, stride, nullptr);
  tile_gradients(task, tile);

  float *const grad_q = args->grad_q + q_offset;
  const float *const carried = tile->key > 0 ? task->grad_q : nullptr;
  if (carried != nullptr) transpose(rows, size, grad_q, q_row, task->grad_q, rows);
  pack(products, lines_along(task->dot_gradients, stride), rows, keys, &task->packed);
  multiply(products, lines_across(k, k_row), size, rows, keys, &task->packed, task->grad_q, rows, carried);
  transpose(size, rows, task->grad_q, rows, grad_q, q_row);
  pack(products, lines_across(task->dot_gradients, stride), keys, rows, &task->packed);
  multiply(products, lines_across(q, q_row), size, keys, rows, &task->packed, task->grad_k, stride, task->grad_k);
  pack(products, lines_across(task->probabilities, stride), keys, rows, &task->packed);
  multiply(products, lines_across(gradient, q_row), size, keys, rows, &task->packed, task->grad_v, stride, task->grad_v);
}

// The finished dK and dV of a tile of keys.
void store_key_gradients(const Backward *task, int64_t key, int64_t keys) {
  const mok_attention_backward_args *const args = task->args;
  const int64_t size = args->head_size;
  for (int64_t first = 0; first < keys; first += kTurned) {
    const int64_t count = smaller(kTurned, keys - first);
    transpose(size, count, task->grad_k + first, task->keys, task->room, size);
    transpose(size, count, task->grad_v + first, task->keys, task->other_room, size);
    for (int64_t j = 0; j < count; ++j) {
      const int64_t token = task->token + key + first + j;
      float *const grad_k = args->grad_k + (token * args->kv_heads + task->kv_head) * size;
      for (int64_t i = 0; i < size; ++i) grad_k[i] = f32::canonical(args->scale * task->room[j * size + i]);
      void *const grad_v = operand_at(args->precision, args->grad_v, token * args->ld_grad_v + task->kv_head * size);
      store_row(args->precision, size, task->other_room + j * size, grad_v);
    }
  }
}

Backward backward_task(const mok_attention_backward_args *args, const AttentionBlocks *blocks, int64_t index, Scratch *scratch) {
  const int64_t size = args->head_size;
  Backward task = {};
  task.args = args;
  task.products = products_of(args->precision, blocks->tile_limit, scratch);
  task.token = index / args->kv_heads * args->length;
  task.kv_head = index % args->kv_heads;
  task.rows = smaller(blocks->queries, args->length);
  task.keys = smaller(blocks->keys, args->length);
  task.delta = take_floats(scratch, args->heads / args->kv_heads * args->length);
  task.dots = take_floats(scratch, task.rows * task.keys);
  task.products_of_v = take_floats(scratch, task.rows * task.keys);
  task.probabilities = take_operand(args->precision, task.rows * task.keys, task.dots, scratch);
  task.dot_gradients = take_operand(args->precision, task.rows * task.keys, task.products_of_v, scratch);
  task.grad_q = take_floats(scratch, size * task.rows);
  task.grad_k = take_floats(scratch, size * task.keys);
  task.grad_v = take_floats(scratch, size * task.keys);
  task.room = take_floats(scratch, kTurned * size);
  task.other_room = take_floats(scratch, kTurned * size);
  const size_t of_keys = packed_bytes(&task.products, task.keys, size);
  const size_t of_rows = packed_bytes(&task.products, task.rows, task.keys);
  const size_t of_columns = packed_bytes(&task.products, task.keys, task.rows);
  task.packed_k.panels = static_cast<unsigned char *>(mok::scratch_take(scratch, of_keys));
  task.packed_v.panels = static_cast<unsigned char *>(mok::scratch_take(scratch, of_keys));
  task.packed.panels = static_cast<unsigned char *>(mok::scratch_take(scratch, larger(of_rows, of_columns)));
  return task;
}

void pack_keys(Backward *task, int64_t key, int64_t keys) {
  const mok_attention_backward_args *const args = task->args;
  const int64_t size = args->head_size, k_row = args->kv_heads * size, token = task->token + key;
  const void *const k = operand_at(args->precision, args->k, token * k_row + task->kv_head * size);
  const void *const v = operand_at(args->precision, args->v, token * args->ld_v + task->kv_head * size);
  pack(&task->products, lines_along(k, k_row), keys, size, &task->packed_k);
  pack(&task->products, lines_along(v, args->ld_v), keys, size, &task->packed_v);
}

void backward(const mok_attention_backward_args *args, const AttentionBlocks *blocks, int64_t index, Scratch *scratch) {
  Backward task = backward_task(args, blocks, index, scratch);
  const int64_t shared = args->heads / args->kv_heads, head = task.kv_head * shared, size = args->head_size;
  row_deltas(&task, head, shared);
  for (int64_t key = 0; key < args->length; key += task.keys) {
    const int64_t keys = smaller(task.keys, args->length - key);
    pack_keys(&task, key, keys);
    memset(task.grad_k, 0, static_cast<size_t>(task.keys * size) * sizeof(float));
    memset(task.grad_v, 0, static_cast<size_t>(task.keys * size) * sizeof(float));
    for (int64_t h = 0; h < shared; ++h) {
      for (int64_t query = key / task.rows * task.rows; query < args->length; query += task.rows) {
        const int64_t rows = smaller(task.rows, args->length - query), reach = smaller(keys, query + rows - key);
        const Tile tile = {head + h, query, rows, key, reach, task.delta + h * args->length};
        tile_backward(&task, &tile);
      }
    }
    store_key_gradients(&task, key, keys);
  }
  for (int64_t i = 0; i < args->length; ++i) {
    float *const row = args->grad_q + query_offset(&task, head, i);
    for (int64_t j = 0; j < shared * size; ++j) row[j] = f32::canonical(args->scale * row[j]);
  }
}

}  // namespace

extern const AttentionTable attention_table = {forward_tasks, forward_scratch, forward, backward_scratch, backward};

}  // namespace MOK_ISA_NS

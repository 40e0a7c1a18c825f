#include <cmath>
#include <vector>

#include "cpu/checks.h"
#include "cpu/context.h"
#include "cpu/isa/attention.h"
#include "cpu/isa/qk.h"

namespace {

constexpr int64_t kTaskElements = 1 << 14;  // of a forward task
constexpr int64_t kTokenBlock = 256;        // rows of a weight's partial sum: docs/arithmetic.md 5.3, not free

int64_t ceil_divide(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// The checks that mok_qk_forward and mok_qk_backward share.
template <typename Args>
mok_status check_qk(const Args *args) {
  MOK_TRY(mok::check_precision(args->precision));
  MOK_REQUIRE(args->norm >= MOK_QK_NORM_NONE && args->norm <= MOK_QK_NORM_FULL,
              "norm is %d; allowed: 0 (none), 1 (head), 2 (full)", args->norm);
  MOK_REQUIRE_RANGE(args, tokens, 0, mok::kRowsMax);
  MOK_REQUIRE_RANGE(args, heads, 1, mok::kWidthMax);
  MOK_REQUIRE_RANGE(args, head_size, 2, mok::kWidthMax);
  MOK_REQUIRE(args->head_size % 2 == 0, "head_size is %" PRId64 "; allowed: even numbers", args->head_size);
  MOK_REQUIRE(args->ld_in >= args->heads * args->head_size,
              "ld_in is %" PRId64 "; allowed: heads * head_size = %" PRId64 " or more", args->ld_in,
              args->heads * args->head_size);
  MOK_REQUIRE_POINTER(args->in, args->tokens);
  MOK_REQUIRE_POINTER(args->positions, args->tokens);
  MOK_REQUIRE_POINTER(args->cos_sin, args->tokens);
  if (args->norm != MOK_QK_NORM_NONE) {
    MOK_REQUIRE_POINTER(args->weight, args->tokens);
    MOK_REQUIRE_POINTER(args->rstd, args->tokens);
  }
  for (int64_t t = 0; t < args->tokens; ++t) {
    MOK_REQUIRE(args->positions[t] >= 0, "positions[%" PRId64 "] is %d; allowed: 0 or more", t, args->positions[t]);
  }
  return MOK_OK;
}

// The checks that mok_attention_forward and mok_attention_backward share; args->sequences * args->length is the tokens.
template <typename Args>
mok_status check_attention(const Args *args) {
  MOK_TRY(mok::check_precision(args->precision));
  MOK_REQUIRE_RANGE(args, sequences, 0, mok::kRowsMax);
  MOK_REQUIRE_RANGE(args, length, 0, mok::kRowsMax);
  MOK_REQUIRE(args->sequences * args->length <= mok::kRowsMax, "sequences * length is %" PRId64 "; allowed: at most %" PRId64,
              args->sequences * args->length, mok::kRowsMax);
  MOK_REQUIRE_RANGE(args, heads, 1, mok::kWidthMax);
  MOK_REQUIRE_RANGE(args, kv_heads, 1, args->heads);
  MOK_REQUIRE(args->heads % args->kv_heads == 0, "heads is %" PRId64 " and kv_heads %" PRId64 "; allowed: a multiple of kv_heads",
              args->heads, args->kv_heads);
  MOK_REQUIRE_RANGE(args, head_size, 1, mok::kWidthMax);
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

int64_t block_of_16(const mok_context *context, int64_t size) {
  return std::max<int64_t>(16, mok::min_block(context, size) / 16 * 16);
}

// A forward task holds the dots of `stack` rows with all keys: queries of the query heads that share a key head.
AttentionBlocks forward_blocks(const mok_context *context, const mok_attention_forward_args *args) {
  const int64_t stack = args->length <= 4096 ? 128 : 64, shared = args->heads / args->kv_heads;
  const int64_t queries = block_of_16(context, std::min<int64_t>(64, stack / shared));
  const int64_t heads = mok::min_block(context, std::max<int64_t>(1, stack / queries));
  return {queries, block_of_16(context, 512), heads, context->tile_limit};
}

AttentionBlocks backward_blocks(const mok_context *context) {
  const int64_t queries = block_of_16(context, 64);
  return {queries, block_of_16(context, 512) / queries * queries, 0, context->tile_limit};
}

}  // namespace

extern "C" MOK_API mok_status mok_qk_forward(mok_context *context, const mok_qk_forward_args *args) {
  return mok::enter("mok_qk_forward", context, args, [&] {
    MOK_TRY(check_qk(args));
    MOK_REQUIRE_POINTER(args->out, args->tokens);
    MOK_REQUIRE(args->norm == MOK_QK_NORM_NONE || (std::isfinite(args->epsilon) && args->epsilon >= 0),
                "epsilon is %g; allowed: a finite number, 0 or more", static_cast<double>(args->epsilon));
    const QkTable &table = MOK_ISA_PICK(context->isa, qk_table);
    const int64_t row_heads = qk_row_heads(args->norm, args->heads), columns = row_heads * args->head_size;
    const int64_t rows = args->tokens * (args->heads / row_heads);
    const int64_t chunk = mok::min_block(context, std::max<int64_t>(1, kTaskElements / columns));
    return mok::parallel_for(context, ceil_divide(rows, chunk), table.scratch(columns), [&](int64_t task, mok::Scratch *scratch) {
      table.forward(args, task * chunk, std::min(rows, (task + 1) * chunk), scratch);
    });
  });
}

extern "C" MOK_API mok_status mok_qk_backward(mok_context *context, const mok_qk_backward_args *args) {
  return mok::enter("mok_qk_backward", context, args, [&] {
    MOK_TRY(check_qk(args));
    MOK_REQUIRE(args->ld_grad_in >= args->heads * args->head_size,
                "ld_grad_in is %" PRId64 "; allowed: heads * head_size = %" PRId64 " or more", args->ld_grad_in,
                args->heads * args->head_size);
    MOK_REQUIRE_POINTER(args->grad_out, args->tokens);
    MOK_REQUIRE_POINTER(args->grad_in, args->tokens);
    const QkTable &table = MOK_ISA_PICK(context->isa, qk_table);
    const int64_t row_heads = qk_row_heads(args->norm, args->heads), columns = row_heads * args->head_size;
    const int64_t rows = args->tokens * (args->heads / row_heads), blocks = ceil_divide(rows, kTokenBlock);
    const bool weighted = args->norm != MOK_QK_NORM_NONE && args->grad_weight != nullptr;
    std::vector<float> sums(weighted ? static_cast<size_t>(std::max<int64_t>(blocks, 1) * columns) : 0);
    MOK_TRY(mok::parallel_for(context, blocks, table.scratch(columns), [&](int64_t block, mok::Scratch *scratch) {
      float *const sum = weighted ? sums.data() + block * columns : nullptr;
      table.backward(args, block * kTokenBlock, std::min(rows, (block + 1) * kTokenBlock), sum, scratch);
    }));
    if (weighted) table.add_weight_sums(blocks, columns, sums.data(), args->grad_weight);
    return MOK_OK;
  });
}

extern "C" MOK_API mok_status mok_attention_forward(mok_context *context, const mok_attention_forward_args *args) {
  return mok::enter("mok_attention_forward", context, args, [&] {
    MOK_TRY(check_attention(args));
    const AttentionTable &table = MOK_ISA_PICK(context->isa, attention_table);
    const AttentionBlocks blocks = forward_blocks(context, args);
    return mok::parallel_for(context, table.forward_tasks(args, &blocks), table.forward_scratch(args, &blocks),
                             [&](int64_t task, mok::Scratch *scratch) { table.forward(args, &blocks, task, scratch); });
  });
}

extern "C" MOK_API mok_status mok_attention_backward(mok_context *context, const mok_attention_backward_args *args) {
  return mok::enter("mok_attention_backward", context, args, [&] {
    MOK_TRY(check_attention(args));
    MOK_REQUIRE(args->ld_grad_v >= args->kv_heads * args->head_size,
                "ld_grad_v is %" PRId64 "; allowed: kv_heads * head_size = %" PRId64 " or more", args->ld_grad_v,
                args->kv_heads * args->head_size);
    const int64_t tokens = args->sequences * args->length;
    MOK_REQUIRE_POINTER(args->grad_out, tokens);
    MOK_REQUIRE_POINTER(args->grad_q, tokens);
    MOK_REQUIRE_POINTER(args->grad_k, tokens);
    MOK_REQUIRE_POINTER(args->grad_v, tokens);
    const AttentionTable &table = MOK_ISA_PICK(context->isa, attention_table);
    const AttentionBlocks blocks = backward_blocks(context);
    const int64_t tasks = args->length == 0 ? 0 : args->sequences * args->kv_heads;
    return mok::parallel_for(context, tasks, table.backward_scratch(args, &blocks),
                             [&](int64_t task, mok::Scratch *scratch) { table.backward(args, &blocks, task, scratch); });
  });
}

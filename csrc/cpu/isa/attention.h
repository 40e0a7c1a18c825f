// Causal grouped-query attention (docs/arithmetic.md section 9). One task never needs memory of length x length.
#pragma once

#include "cpu/isa/isa.h"

// How a call is cut; none of it shows in the bits. Blocks of queries and of keys are multiples of 16: products start at absolute
// 16-blocks. In a backward call `keys` is a multiple of `queries`: a block of queries sees all keys of a tile or a multiple of
// `queries`.
struct AttentionBlocks {
  int64_t queries, keys;
  int64_t heads;  // query heads that a forward task takes together
  int64_t tile_limit;
};

struct AttentionTable {
  // Tasks: (query block, sequence, key/value head, part of its query heads), the longest first: their rows of out, row_max and
  // row_recip.
  int64_t (*forward_tasks)(const mok_attention_forward_args *args, const AttentionBlocks *blocks);
  size_t (*forward_scratch)(const mok_attention_forward_args *args, const AttentionBlocks *blocks);
  void (*forward)(const mok_attention_forward_args *args, const AttentionBlocks *blocks, int64_t task, mok::Scratch *scratch);
  // Tasks: (sequence, key/value head), sequences * kv_heads of them: dK and dV are chains over the whole sequence.
  size_t (*backward_scratch)(const mok_attention_backward_args *args, const AttentionBlocks *blocks);
  void (*backward)(const mok_attention_backward_args *args, const AttentionBlocks *blocks, int64_t task, mok::Scratch *scratch);
};
MOK_ISA_DECLARE(AttentionTable, attention_table)

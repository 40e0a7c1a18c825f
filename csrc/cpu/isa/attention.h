// Causal grouped-query attention (docs/arithmetic.md section 9). One task never needs memory of length x length.
#pragma once

#include "cpu/isa/isa.h"

// How a call is cut; none of it shows in the bits. Both blocks are multiples of 16: products start at absolute 16-blocks. In a
// backward call `keys` is a multiple of `queries`: a block of queries sees all keys of a tile or a multiple of `queries`.
struct AttentionBlocks {
  int64_t queries, keys, tile_limit;
};

struct AttentionTable {
  // Tasks: (query block, sequence, key/value head), the longest first, for all query heads of the key head: their rows of out,
  // row_max and row_recip.
  int64_t (*forward_tasks)(const mok_attention_forward_args *args, const AttentionBlocks *blocks);
  size_t (*forward_scratch)(const mok_attention_forward_args *args, const AttentionBlocks *blocks);
  void (*forward)(const mok_attention_forward_args *args, const AttentionBlocks *blocks, int64_t task, mok::Scratch *scratch);
  // Tasks: (sequence, key/value head), sequences * kv_heads of them: dK and dV are chains over the whole sequence.
  size_t (*backward_scratch)(const mok_attention_backward_args *args, const AttentionBlocks *blocks);
  void (*backward)(const mok_attention_backward_args *args, const AttentionBlocks *blocks, int64_t task, mok::Scratch *scratch);
};
MOK_ISA_DECLARE(AttentionTable, attention_table)

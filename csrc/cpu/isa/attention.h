// Causal grouped-query attention (docs/arithmetic.md section 9). One task never needs memory of length x length.
#pragma once

#include "cpu/isa/isa.h"

// How a call is cut; none of it shows in the bits. Both blocks are multiples of 16: products start at absolute 16-blocks.
struct AttentionBlocks {
  int64_t queries, keys, tile_limit;
};

struct AttentionTable {
  // Tasks: (query block, sequence, key/value head), the longest first: all query heads of the key head. Writes the block's rows of
  // out, row_max and row_recip.
  int64_t (*forward_tasks)(const mok_attention_forward_args *args, const AttentionBlocks *blocks);
  size_t (*forward_scratch)(const mok_attention_forward_args *args, const AttentionBlocks *blocks);
  void (*forward)(const mok_attention_forward_args *args, const AttentionBlocks *blocks, int64_t task, mok::Scratch *scratch);
  // Tasks: (sequence, key/value head), args->sequences * args->kv_heads of them, since dK and dV are chains over the whole sequence.
  size_t (*backward_scratch)(const mok_attention_backward_args *args, const AttentionBlocks *blocks);
  void (*backward)(const mok_attention_backward_args *args, const AttentionBlocks *blocks, int64_t task, mok::Scratch *scratch);
};
MOK_ISA_DECLARE(AttentionTable, attention_table)

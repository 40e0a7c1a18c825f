// The fused attention kernels for bf16 and head sizes 64 and 128; attention.cu serves the rest.
#pragma once

#include "cuda/context.h"
#include "mok.h"

namespace mok::cuda {

// Whether the fused kernels take these arguments: sizes, and rows that start at multiples of 16 bytes.
bool fused_attention_forward(const mok_attention_forward_args &);
bool fused_attention_backward(const mok_attention_backward_args &);

mok_status launch_fused_forward(const mok_context &, const mok_attention_forward_args &);
mok_status launch_fused_backward(const mok_context &, const mok_attention_backward_args &);

}  // namespace mok::cuda

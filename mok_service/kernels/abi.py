"""The Python mirror of csrc/include/mok.h: one ctypes structure for each argument struct, same names, same order.

tests/kernels/test_abi.py compares this file with the header.
"""

from __future__ import annotations

from ctypes import (
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Final

ABI_VERSION: Final = 1
ARITHMETIC: Final = "mok-1"

OK, INVALID, OUT_OF_MEMORY, UNSUPPORTED, DEVICE, INTERNAL = range(6)
PRECISIONS: Final = {"fp32": 0, "bf16": 1}
ISAS: Final = {"auto": 0, "portable": 1, "avx2": 2, "avx512": 3}
QK_NORMS: Final = {"none": 0, "head": 1, "full": 2}


class ContextOptions(Structure):
    _fields_ = (
        ("threads", c_int32),
        ("isa", c_int32),
        ("device", c_int32),
        ("tile_limit", c_int32),
        ("stream", c_void_p),
    )


class ProductArgs(Structure):
    _fields_ = (
        ("precision", c_int32),
        ("out_bf16", c_int32),
        ("trans_a", c_int32),
        ("trans_b", c_int32),
        ("m", c_int64),
        ("n", c_int64),
        ("k", c_int64),
        ("lda", c_int64),
        ("ldb", c_int64),
        ("ldc", c_int64),
        ("a", c_void_p),
        ("b", c_void_p),
        ("c", c_void_p),
        ("initial", c_void_p),
        ("addend", c_void_p),
    )


class GroupedProductArgs(Structure):
    _fields_ = (
        ("precision", c_int32),
        ("out_bf16", c_int32),
        ("trans_b", c_int32),
        ("groups", c_int32),
        ("m", c_int64),
        ("n", c_int64),
        ("k", c_int64),
        ("row_offsets", c_void_p),
        ("a_rows", c_void_p),
        ("b_rows", c_void_p),
        ("a", c_void_p),
        ("b", c_void_p),
        ("c", c_void_p),
        ("initial", c_void_p),
    )


class ToBf16Args(Structure):
    _fields_ = (
        ("count", c_int64),
        ("in", c_void_p),
        ("out", c_void_p),
    )


class AddArgs(Structure):
    _fields_ = (
        ("count", c_int64),
        ("a", c_void_p),
        ("b", c_void_p),
        ("out", c_void_p),
    )


class SumSquaresArgs(Structure):
    _fields_ = (
        ("matrices", c_int64),
        ("rows", c_int64),
        ("columns", c_int64),
        ("in", c_void_p),
        ("out", c_void_p),
    )


class FunctionArgs(Structure):
    _fields_ = (
        ("name", c_char_p),
        ("count", c_int64),
        ("in", c_void_p),
        ("out", c_void_p),
    )


class EmbeddingForwardArgs(Structure):
    _fields_ = (
        ("precision", c_int32),
        ("tokens", c_int64),
        ("vocabulary", c_int64),
        ("hidden", c_int64),
        ("ids", c_void_p),
        ("table", c_void_p),
        ("out", c_void_p),
    )


class EmbeddingBackwardArgs(Structure):
    _fields_ = (
        ("tokens", c_int64),
        ("vocabulary", c_int64),
        ("hidden", c_int64),
        ("ids", c_void_p),
        ("grad_out", c_void_p),
        ("grad_table", c_void_p),
    )


class RmsnormForwardArgs(Structure):
    _fields_ = (
        ("precision", c_int32),
        ("rows", c_int64),
        ("columns", c_int64),
        ("epsilon", c_float),
        ("x", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("rstd", c_void_p),
    )


class RmsnormBackwardArgs(Structure):
    _fields_ = (
        ("rows", c_int64),
        ("columns", c_int64),
        ("x", c_void_p),
        ("weight", c_void_p),
        ("rstd", c_void_p),
        ("grad_out", c_void_p),
        ("addend", c_void_p),
        ("grad_x", c_void_p),
        ("grad_weight", c_void_p),
    )


class QkForwardArgs(Structure):
    _fields_ = (
        ("precision", c_int32),
        ("norm", c_int32),
        ("tokens", c_int64),
        ("heads", c_int64),
        ("head_size", c_int64),
        ("ld_in", c_int64),
        ("epsilon", c_float),
        ("in", c_void_p),
        ("weight", c_void_p),
        ("positions", c_void_p),
        ("cos_sin", c_void_p),
        ("out", c_void_p),
        ("rstd", c_void_p),
    )


class QkBackwardArgs(Structure):
    _fields_ = (
        ("precision", c_int32),
        ("norm", c_int32),
        ("tokens", c_int64),
        ("heads", c_int64),
        ("head_size", c_int64),
        ("ld_in", c_int64),
        ("ld_grad_in", c_int64),
        ("in", c_void_p),
        ("weight", c_void_p),
        ("rstd", c_void_p),
        ("positions", c_void_p),
        ("cos_sin", c_void_p),
        ("grad_out", c_void_p),
        ("grad_in", c_void_p),
        ("grad_weight", c_void_p),
    )


class RopeTableArgs(Structure):
    _fields_ = (
        ("positions", c_int64),
        ("head_size", c_int64),
        ("base", c_double),
        ("cos_sin", c_void_p),
    )


class AttentionForwardArgs(Structure):
    _fields_ = (
        ("precision", c_int32),
        ("sequences", c_int64),
        ("length", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_size", c_int64),
        ("ld_v", c_int64),
        ("scale", c_float),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("row_max", c_void_p),
        ("row_recip", c_void_p),
    )


class AttentionBackwardArgs(Structure):
    _fields_ = (
        ("precision", c_int32),
        ("sequences", c_int64),
        ("length", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_size", c_int64),
        ("ld_v", c_int64),
        ("ld_grad_v", c_int64),
        ("scale", c_float),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("grad_out", c_void_p),
        ("row_max", c_void_p),
        ("row_recip", c_void_p),
        ("grad_q", c_void_p),
        ("grad_k", c_void_p),
        ("grad_v", c_void_p),
    )


class RouterForwardArgs(Structure):
    _fields_ = (
        ("tokens", c_int64),
        ("experts", c_int64),
        ("top_k", c_int64),
        ("renormalise", c_int32),
        ("logits", c_void_p),
        ("probabilities", c_void_p),
        ("log_sum_exp", c_void_p),
        ("expert_index", c_void_p),
        ("expert_weight", c_void_p),
        ("status", c_void_p),
    )


class RoutingPlanArgs(Structure):
    _fields_ = (
        ("tokens", c_int64),
        ("experts", c_int64),
        ("top_k", c_int64),
        ("groups", c_int64),
        ("rows_capacity", c_int64),
        ("group_tokens", c_int64),
        ("expert_index", c_void_p),
        ("token_mask", c_void_p),
        ("row_token", c_void_p),
        ("row_slot", c_void_p),
        ("slot_row", c_void_p),
        ("expert_offsets", c_void_p),
        ("counts", c_void_p),
    )


class RouterBackwardArgs(Structure):
    _fields_ = (
        ("precision", c_int32),
        ("renormalise", c_int32),
        ("tokens", c_int64),
        ("experts", c_int64),
        ("top_k", c_int64),
        ("group_tokens", c_int64),
        ("probabilities", c_void_p),
        ("log_sum_exp", c_void_p),
        ("expert_weight", c_void_p),
        ("expert_index", c_void_p),
        ("grad_weight", c_void_p),
        ("token_mask", c_void_p),
        ("counts", c_void_p),
        ("aux_scale", c_void_p),
        ("z_scale", c_float),
        ("grad_logits", c_void_p),
    )


class RouterSumsArgs(Structure):
    _fields_ = (
        ("tokens", c_int64),
        ("experts", c_int64),
        ("group_tokens", c_int64),
        ("probabilities", c_void_p),
        ("log_sum_exp", c_void_p),
        ("token_mask", c_void_p),
        ("probability_sum", c_void_p),
        ("z_sum", c_void_p),
    )


class SwigluForwardArgs(Structure):
    _fields_ = (
        ("precision", c_int32),
        ("rows", c_int64),
        ("intermediate", c_int64),
        ("gate_up", c_void_p),
        ("out", c_void_p),
    )


class SwigluBackwardArgs(Structure):
    _fields_ = (
        ("precision", c_int32),
        ("rows", c_int64),
        ("intermediate", c_int64),
        ("slots", c_int64),
        ("gate_up", c_void_p),
        ("grad_act", c_void_p),
        ("slot_weight", c_void_p),
        ("row_slot", c_void_p),
        ("grad_gate_up", c_void_p),
        ("weighted_act", c_void_p),
        ("grad_slot_weight", c_void_p),
    )


class CombineArgs(Structure):
    _fields_ = (
        ("precision", c_int32),
        ("tokens", c_int64),
        ("top_k", c_int64),
        ("hidden", c_int64),
        ("rows", c_void_p),
        ("slot_row", c_void_p),
        ("weight", c_void_p),
        ("addend", c_void_p),
        ("out", c_void_p),
    )


class CrossEntropyArgs(Structure):
    _fields_ = (
        ("precision", c_int32),
        ("rows", c_int64),
        ("vocabulary", c_int64),
        ("logits", c_void_p),
        ("labels", c_void_p),
        ("loss_sum", c_void_p),
        ("grad_logits", c_void_p),
        ("status", c_void_p),
    )


class AdamwArgs(Structure):
    _fields_ = (
        ("count", c_int64),
        ("weight", c_void_p),
        ("first", c_void_p),
        ("second", c_void_p),
        ("grad", c_void_p),
        ("operand", c_void_p),
        ("grad_scale", c_float),
        ("clip_scale", c_float),
        ("lr", c_float),
        ("beta1", c_float),
        ("beta2", c_float),
        ("one_minus_beta1", c_float),
        ("one_minus_beta2", c_float),
        ("correction1", c_float),
        ("correction2", c_float),
        ("epsilon", c_float),
        ("weight_decay", c_float),
        ("status", c_void_p),
    )


class RandomNormalArgs(Structure):
    _fields_ = (
        ("seed", c_uint64),
        ("stream", c_uint64),
        ("first", c_int64),
        ("count", c_int64),
        ("std", c_double),
        ("out", c_void_p),
    )


class PermutationArgs(Structure):
    _fields_ = (
        ("seed", c_uint64),
        ("stream", c_uint64),
        ("n", c_int64),
        ("first", c_int64),
        ("count", c_int64),
        ("out", c_void_p),
    )


class PhiloxArgs(Structure):
    _fields_ = (
        ("key", c_uint32 * 2),
        ("counter", c_uint32 * 4),
        ("out", c_uint32 * 4),
    )


class ScalarArgs(Structure):
    _fields_ = (
        ("name", c_char_p),
        ("x", c_double),
        ("y", c_double),
        ("out", c_double),
    )


# Every operation: its C name and the structure it takes.
OPERATIONS: Final[dict[str, type[Structure]]] = {
    "mok_product": ProductArgs,
    "mok_grouped_product_by_rows": GroupedProductArgs,
    "mok_grouped_product_by_depth": GroupedProductArgs,
    "mok_to_bf16": ToBf16Args,
    "mok_add": AddArgs,
    "mok_sum_squares": SumSquaresArgs,
    "mok_function": FunctionArgs,
    "mok_embedding_forward": EmbeddingForwardArgs,
    "mok_embedding_backward": EmbeddingBackwardArgs,
    "mok_rmsnorm_forward": RmsnormForwardArgs,
    "mok_rmsnorm_backward": RmsnormBackwardArgs,
    "mok_qk_forward": QkForwardArgs,
    "mok_qk_backward": QkBackwardArgs,
    "mok_rope_table": RopeTableArgs,
    "mok_attention_forward": AttentionForwardArgs,
    "mok_attention_backward": AttentionBackwardArgs,
    "mok_router_forward": RouterForwardArgs,
    "mok_routing_plan": RoutingPlanArgs,
    "mok_router_backward": RouterBackwardArgs,
    "mok_router_sums": RouterSumsArgs,
    "mok_swiglu_forward": SwigluForwardArgs,
    "mok_swiglu_backward": SwigluBackwardArgs,
    "mok_combine": CombineArgs,
    "mok_cross_entropy": CrossEntropyArgs,
    "mok_adamw": AdamwArgs,
    "mok_random_normal": RandomNormalArgs,
    "mok_permutation": PermutationArgs,
    "mok_philox": PhiloxArgs,
    "mok_scalar": ScalarArgs,
}

# The tensors that each operation writes, in the order of its structure: the pointers of mok.h that aren't const. What works on
# host memory of its own (mok_permutation, mok_philox, mok_scalar) is left out: it has no tensors.
OUTPUTS: Final[dict[str, tuple[str, ...]]] = {
    "mok_product": ("c",),
    "mok_grouped_product_by_rows": ("c",),
    "mok_grouped_product_by_depth": ("c",),
    "mok_to_bf16": ("out",),
    "mok_add": ("out",),
    "mok_sum_squares": ("out",),
    "mok_function": ("out",),
    "mok_embedding_forward": ("out",),
    "mok_embedding_backward": ("grad_table",),
    "mok_rmsnorm_forward": ("out", "rstd"),
    "mok_rmsnorm_backward": ("grad_x", "grad_weight"),
    "mok_qk_forward": ("out", "rstd"),
    "mok_qk_backward": ("grad_in", "grad_weight"),
    "mok_rope_table": ("cos_sin",),
    "mok_attention_forward": ("out", "row_max", "row_recip"),
    "mok_attention_backward": ("grad_q", "grad_k", "grad_v"),
    "mok_router_forward": ("probabilities", "log_sum_exp", "expert_index", "expert_weight", "status"),
    "mok_routing_plan": ("row_token", "row_slot", "slot_row", "expert_offsets", "counts"),
    "mok_router_backward": ("grad_logits",),
    "mok_router_sums": ("probability_sum", "z_sum"),
    "mok_swiglu_forward": ("out",),
    "mok_swiglu_backward": ("grad_gate_up", "weighted_act", "grad_slot_weight"),
    "mok_combine": ("out",),
    "mok_cross_entropy": ("loss_sum", "grad_logits", "status"),
    "mok_adamw": ("weight", "first", "second", "operand"),
    "mok_random_normal": ("out",),
}

# Those of them that are added to or kept in part, so that what was there before is an input too.
UPDATED: Final[dict[str, tuple[str, ...]]] = {
    "mok_embedding_backward": ("grad_table",),
    "mok_rmsnorm_backward": ("grad_weight",),
    "mok_qk_backward": ("grad_weight",),
    "mok_router_forward": ("status",),
    "mok_router_sums": ("probability_sum", "z_sum"),
    "mok_cross_entropy": ("loss_sum", "status"),
    "mok_adamw": ("weight", "first", "second"),
}


# What only the CUDA library has: csrc/cuda/blake3.h.
class Blake3Args(Structure):
    _fields_ = (
        ("count", c_int64),
        ("pointers", c_void_p),
        ("lengths", c_void_p),
        ("out", c_void_p),
    )


CUDA_OPERATIONS: Final[dict[str, type[Structure]]] = {"mok_blake3": Blake3Args}

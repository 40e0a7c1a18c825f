"""The native backend: the operations of csrc/include/mok.h on torch tensors.

Every method checks dtypes, shapes and layout, passes pointers, and writes into `out` tensors that the caller gives (or that it
allocates). The definitions are in docs/arithmetic.md; the section is named with each method. "operand" means the dtype of the
chosen precision: float32 for fp32, bfloat16 for bf16. Raises TypeError or ValueError for tensors that don't fit, KernelError for
what the library refuses (message, file and line inside).
"""

from __future__ import annotations

from mok_service.kernels.context import (
    BF16,
    F32,
    I32,
    I64,
    OPERAND_DTYPES,
    U8,
    check,
    check_rows,
    stream_number,
)
from mok_service.kernels.hashing import host_blake3
from mok_service.kernels.layers import Layers
from mok_service.kernels.moe import Experts
from mok_service.kernels.products import Products
from mok_service.kernels.update import Update

__all__ = [
    "BF16",
    "F32",
    "I32",
    "I64",
    "OPERAND_DTYPES",
    "U8",
    "NativeBackend",
    "check",
    "check_rows",
    "host_blake3",
    "stream_number",
]


class NativeBackend(Products, Layers, Experts, Update):
    """One device's kernels. `name` is "cpu" or "cuda", `device` the torch device that tensors must be on."""

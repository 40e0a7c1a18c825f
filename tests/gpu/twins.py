"""The same operation on the CPU and on the GPU, compared by bytes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from mok_service.errors import KernelError
from mok_service.kernels.native import NativeBackend

F32, BF16, I32 = torch.float32, torch.bfloat16, torch.int32
OPERANDS = {"fp32": F32, "bf16": BF16}
CODES = {"fp32": 0, "bf16": 1}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@functools.cache
def backends() -> tuple[NativeBackend, NativeBackend]:
    """The CPU and the CUDA backend. Skips the test, saying why, where there is no GPU; anything else is an error."""
    if not torch.cuda.is_available():
        pytest.skip("NOT RUN: torch sees no CUDA GPU, so the GPU's bits were not compared with the CPU's")
    try:
        return NativeBackend("cpu"), NativeBackend("cuda")
    except KernelError as error:
        if "was not built" not in str(error):
            raise
        pytest.skip(f"NOT RUN: {error}")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(g: torch.Generator, *shape: int, dtype: torch.dtype = F32, spread: int = 0) -> Tensor:
    """Normal values, times a random power of two up to 2^spread either way."""
    x = torch.randn(shape, generator=g)
    if spread:
        x = x * torch.exp2(torch.randint(-spread, spread + 1, shape, generator=g).float())
    return x.to(dtype)


def poison(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    """An output that nothing has written."""
    return torch.full(shape, -77, dtype=dtype)


def first_difference(name: str, got: Tensor, want: Tensor) -> str | None:
    """None if two tensors hold the same bits, else the first element that differs, with both patterns."""
    g, w = got.cpu().contiguous(), want.contiguous()
    bits = _BITS[g.element_size()]
    unequal = (g.view(bits) != w.view(bits)).reshape(-1)
    if not bool(unequal.any()):
        return None
    at = int(unequal.nonzero()[0])
    mask = (1 << (8 * g.element_size())) - 1
    patterns = [hex(int(t.view(bits).reshape(-1)[at]) & mask) for t in (g, w)]
    where = f"{int(unequal.sum())} of {g.numel()} differ, first [{at}] of {list(g.shape)}"
    return f"{name}: {where}: GPU {patterns[0]}, CPU {patterns[1]}"


def compare(operation: str, outputs: tuple[str, ...], **fields: Any) -> dict[str, Tensor]:
    """Run `operation` of mok.h on both; the tensors named in `outputs` must end as the same bytes.

    Two fields that are one tensor stay one tensor (in-place operations). Returns the CPU's outputs.
    """
    cpu, gpu = backends()
    host = {id(v): v.clone() for v in fields.values() if isinstance(v, Tensor)}
    device = {id(v): _move(v) for v in fields.values() if isinstance(v, Tensor)}
    cpu.call(operation, **{k: host[id(v)] if isinstance(v, Tensor) else v for k, v in fields.items()})
    gpu.call(operation, **{k: device[id(v)] if isinstance(v, Tensor) else v for k, v in fields.items()})
    torch.cuda.synchronize()
    found = [first_difference(name, device[id(fields[name])], host[id(fields[name])]) for name in outputs]
    wrong = [text for text in found if text]
    assert not wrong, f"{operation}: " + "; ".join(wrong)
    return {name: host[id(fields[name])] for name in outputs}


def _move(tensor: Tensor) -> Tensor:
    """A copy on the GPU with the same strides (a slice of rows stays one)."""
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
    return moved.copy_(tensor)

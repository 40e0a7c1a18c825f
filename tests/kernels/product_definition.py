"""Matrix products written a second time (docs/arithmetic.md section 4): bf16 by the model mmasim, fp32 exactly in float64."""

from __future__ import annotations

import numpy as np
import torch
from mmasim.nv_ptx.sim import WGMMA  # type: ignore[import-untyped]
from numpy.typing import NDArray
from torch import Tensor

F32 = NDArray[np.float32]

KINDS = ("normal", "wide", "blocks", "softmax", "raw", "finite", "subnormal", "small", "special")
TILE = 64  # rows and columns that the model gets at once: larger ones leave the cache


def bf16_matrix(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> Tensor:
    """A bfloat16 matrix of one of KINDS.

    normal; wide (powers of two from 2^-30 to 2^30); blocks (squares of 16 of very different scale, a third of the elements 0);
    softmax (rows that add up to 1, logits of deviation 20). Bit patterns: raw (any), finite, subnormal (both operands near
    2^-126), small (products around 2^-126), special (one in 64 infinite or NaN).
    """
    values = rng.standard_normal(shape, dtype=np.float32)
    patterns = rng.integers(0, 1 << 16, shape)
    match kind:
        case "wide":
            values *= np.exp2(rng.integers(-30, 31, shape)).astype(np.float32)
        case "blocks":
            scale = np.exp2(rng.integers(-120, 120, [size // 16 + 1 for size in shape]))
            values *= scale.repeat(16, 0).repeat(16, 1)[: shape[0], : shape[1]].astype(np.float32)
            values[rng.random(shape) < 1 / 3] = 0
        case "softmax":
            values = torch.softmax(torch.from_numpy(values) * 20, dim=1).numpy()
        case "raw":
            return from_patterns(patterns)
        case "finite":
            return from_patterns(np.where((patterns & 0x7F80) == 0x7F80, patterns & ~0x0080, patterns))
        case "subnormal":
            return from_patterns(patterns & 0x83FF)
        case "small":
            return from_patterns(patterns & 0x807F | rng.integers(60, 68, shape) << 7)
        case "special":
            return from_patterns(np.where(rng.random(shape) < 1 / 64, patterns | 0x7F80, patterns & ~0x4000))
    return torch.from_numpy(values).bfloat16()


def from_patterns(patterns: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(patterns.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def tensor_core_product(a: Tensor, b: Tensor, initial: Tensor | None = None) -> Tensor:
    """[M,K] . [K,N] by the model of Hopper's tensor cores, K padded with zeros to a multiple of 16; + 0.0f at the end."""
    (m, k), n = a.shape, b.shape[1]
    pad = -k % 16
    a = torch.nn.functional.pad(a, (0, pad))
    b = torch.nn.functional.pad(b, (0, 0, 0, pad))
    out = torch.zeros(m, n) if initial is None else initial.clone()
    model = WGMMA("Hopper", "m64n128k16.f32.bf16.bf16")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tiles are too small to share
    for i in range(0, m if k else 0, TILE):
        for j in range(0, n, TILE):
            part = out[i : i + TILE, j : j + TILE]
            part.copy_(model(a[i : i + TILE], b[:, j : j + TILE], part.clone()))
    torch.set_num_threads(threads)
    return out + 0.0


def fma(a: F32, b: F32, c: F32) -> F32:
    """fp32 fma of finite values: the exact product and the sum rounded to odd in float64, then once to fp32."""
    product = a.astype(np.float64) * b.astype(np.float64)  # 48 bits: exact
    addend = c.astype(np.float64)
    total = product + addend
    rest = total - product
    error = (product - (total - rest)) + (addend - rest)  # what the sum has lost (Knuth)
    even = (total.view(np.int64) & 1) == 0
    odd = np.where((error != 0) & even, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)
    return odd.astype(np.float32)


def chain_product(a: F32, b: F32, initial: F32 | None = None) -> F32:
    """[M,K] . [K,N] of finite values, k ascending, one rounding a step; + 0.0f at the end."""
    out = np.zeros((a.shape[0], b.shape[1]), np.float32) if initial is None else initial.copy()
    for k in range(a.shape[1]):
        out = fma(a[:, k : k + 1], b[k : k + 1, :], out)
    return out + np.float32(0)

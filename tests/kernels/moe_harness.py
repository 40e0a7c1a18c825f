"""Runs the attention and Mixture-of-Experts kernels on numpy arrays, on many backends at once, and compares bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mok_service.errors import KernelError
from mok_service.kernels import abi
from mok_service.kernels.native import NativeBackend
from tests.kernels.moe_definition import F32, Functions, from_bf16

UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-8}  # relative error of one rounding to the operand dtype
POISON = float("nan")  # what outputs hold before a call: an element that is not written shows

# threads, instruction set, tile limit (0: full tiles)
VARIANTS = ((1, "auto", 0), (2, "auto", 1), (3, "avx512", 80), (2, "avx2", 0), (7, "avx2", 3), (7, "portable", 1))


@lru_cache
def backends() -> dict[str, NativeBackend]:
    """The variants that this processor can run; the first one is the plain one."""
    found = {}
    for threads, isa, tile_limit in VARIANTS:
        try:
            backend = NativeBackend("cpu", threads=threads, isa=isa, tile_limit=tile_limit)
        except KernelError as error:
            if error.detail["status"] != abi.UNSUPPORTED:
                raise
            continue
        found[f"{threads} threads, {isa}, tile limit {tile_limit}"] = backend
    return found


def plain() -> NativeBackend:
    return next(iter(backends().values()))


@lru_cache
def functions() -> Functions:
    """The elementary functions of section 3 by the library itself."""

    def bind(name: str) -> Callable[[F32], F32]:
        def call(x: F32) -> F32:
            result: F32 = plain().function(name, torch.from_numpy(np.ascontiguousarray(x, np.float32))).numpy()
            return result.reshape(x.shape)

        return call

    return Functions(**{name: bind(name) for name in ("exp", "exp2", "log", "silu", "silu_grad")})


# ---- tensors


def operand_dtype(precision: str) -> torch.dtype:
    return torch.bfloat16 if precision == "bf16" else torch.float32


def tensor(x: NDArray[Any], precision: str | None = None, columns: int | None = None) -> Tensor:
    """A contiguous tensor; with `precision` an operand. `columns`: as a 2-D tensor of rows of so many columns."""
    t = torch.from_numpy(np.ascontiguousarray(x).copy())
    t = t if precision is None else t.to(operand_dtype(precision))
    return t if columns is None else t.reshape(-1, columns)


def array(t: Tensor) -> NDArray[Any]:
    """The values; bfloat16 widened exactly."""
    if t.dtype == torch.bfloat16:
        return from_bf16(t.contiguous().view(torch.int16).numpy().view(np.uint16))
    result: NDArray[Any] = t.contiguous().numpy()
    return result


def blank(*shape: int, precision: str = "fp32") -> Tensor:
    return torch.full(shape, POISON, dtype=operand_dtype(precision))


def apart(rows: Tensor, gap: int) -> Tensor:
    """The same rows, `gap` elements further apart (the gap is filled with poison)."""
    wide = torch.full((rows.shape[0], rows.shape[1] + gap), POISON, dtype=rows.dtype)
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


# ---- comparing


def assert_same_bits(got: NDArray[Any], expected: NDArray[Any], what: str) -> None:
    """Equal by bytes, or an error that names the first difference and both patterns."""
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    assert got.dtype == expected.dtype, f"{what}: dtype {got.dtype}, expected {expected.dtype}"
    integer = np.dtype(f"u{got.dtype.itemsize}")
    a, b = (np.ascontiguousarray(x).view(integer) for x in (got, expected))
    if (different := np.argwhere(a != b)).size:
        at = tuple(int(i) for i in different[0])
        raise AssertionError(
            f"{what}: {len(different)} of {a.size} elements differ, first {list(at)}: "
            f"got {got[at]!r} (0x{int(a[at]):x}), expected {expected[at]!r} (0x{int(b[at]):x})"
        )


Results = dict[str, NDArray[Any]]


def assert_all_backends(run: Callable[[NativeBackend], Results], expected: Results | None) -> None:
    """`run` gives the expected bits on every backend (without `expected`: those of the first one)."""
    for name, backend in backends().items():
        got = run(backend)
        expected = got if expected is None else expected
        assert got.keys() == expected.keys()
        for key, value in got.items():
            assert_same_bits(value, expected[key], f"{key} with {name}")


def assert_close(got: F32, exact: NDArray[np.float64], magnitude: NDArray[np.float64], relative: float, what: str) -> None:
    """|got - exact| <= relative * magnitude, elementwise; magnitude: the same formula over absolute values."""
    error = np.abs(got.astype(np.float64) - exact)
    bound = relative * magnitude + 1e-30
    worst = np.unravel_index(np.argmax(error / bound), error.shape) if error.size else None
    if worst is not None:
        assert error[worst] <= bound[worst], (
            f"{what}{[int(i) for i in worst]}: got {got[worst]!r}, exact {exact[worst]!r}: "
            f"error {error[worst]:.3g} is above {relative:.3g} of {magnitude[worst]:.3g}"
        )


def spread_normal(rng: np.random.Generator, shape: tuple[int, ...], binades: int = 2) -> F32:
    """Normal values times powers of two from 2^-binades to 2^binades."""
    scale = np.exp2(rng.integers(-binades, binades + 1, shape))
    return (rng.standard_normal(shape) * scale).astype(np.float32)

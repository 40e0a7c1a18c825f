"""The elementary functions: special values, bits against the page, errors in units in the last place, digests, arguments.

`python -m tests.kernels.test_functions` writes the digests that test_every_1021st_input compares with.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import mpmath  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mok_service.errors import KernelError
from mok_service.kernels.native import NativeBackend
from tests.kernels import functions_definition as definition
from tests.kernels.moe_definition import F32
from tests.kernels.moe_harness import assert_same_bits, backends, plain

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "functions_strided.json"
STRIDE = 1021
F64 = NDArray[np.float64]


def apply(backend: NativeBackend, name: str, x: F32) -> F32:
    result: F32 = backend.function(name, torch.from_numpy(x)).numpy()
    return result


def from_bits(bits: list[int] | NDArray[np.uint32]) -> F32:
    return np.array(bits, np.uint32).view(np.float32)


# ---- special values (appendix A)

ZERO, MINUS_ZERO, ONE, MINUS_ONE, HALF = 0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x3F000000
INF, MINUS_INF, NAN, TINY, MINUS_TINY = 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0x00000001, 0x80000001

# Outputs for +0, -0, +Inf, -Inf, the least subnormal, and its negative.
SPECIAL = {
    "exp": (ONE, ONE, INF, ZERO, ONE, ONE),
    "exp2": (ONE, ONE, INF, ZERO, ONE, ONE),
    "log": (MINUS_INF, MINUS_INF, INF, NAN, 0xC2CE8ED0, NAN),
    "sigmoid": (HALF, HALF, ONE, ZERO, HALF, HALF),
    "silu": (ZERO, MINUS_ZERO, INF, NAN, ZERO, MINUS_ZERO),
    "silu_grad": (HALF, HALF, NAN, NAN, HALF, HALF),
    "rsqrt": (INF, MINUS_INF, ZERO, NAN, 0x64B504F3, NAN),
    "sqrt": (ZERO, MINUS_ZERO, INF, NAN, 0x1A3504F3, NAN),
    "recip": (INF, MINUS_INF, ZERO, MINUS_ZERO, INF, MINUS_INF),
    "sin": (ZERO, MINUS_ZERO, NAN, NAN, TINY, MINUS_TINY),
    "cos": (ONE, ONE, NAN, NAN, ONE, ONE),
}
NANS = (0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF)


@pytest.mark.parametrize("name", SPECIAL)
def test_special_values(name: str) -> None:
    x = from_bits([ZERO, MINUS_ZERO, INF, MINUS_INF, TINY, MINUS_TINY, *NANS])
    expected = from_bits([*SPECIAL[name], *[NAN] * len(NANS)])
    for variant, backend in backends().items():
        assert_same_bits(apply(backend, name, x), expected, f"{name} with {variant}")


def test_exp2_of_integers_is_exact() -> None:
    n = np.arange(-151, 131, dtype=np.float32)
    with np.errstate(all="ignore"):
        assert_same_bits(apply(plain(), "exp2", n), np.exp2(n.astype(np.float64)).astype(np.float32), "exp2")


def test_where_exp_leaves_the_range() -> None:
    """The last finite result, the first infinite one; the last that is not zero, the first that is."""
    got = apply(plain(), "exp", from_bits([0x42B17217, 0x42B17218, 0xC2CFF1B4, 0xC2CFF1B5]))
    assert_same_bits(got, from_bits([0x7F7FFF84, INF, TINY, ZERO]), "exp")


# ---- bits against the page


@lru_cache
def probes() -> F32:
    """Every power of two with its neighbours, the seams of the reductions, and random patterns."""
    rng = np.random.default_rng(1)
    powers = (np.arange(256, dtype=np.uint32) << 23).repeat(3)
    powers[::3] -= 1
    powers[2::3] += 1
    seams = np.array([0.75, 89, 88.7228, 104, 103.972, 126, 127, 128, 129, 149.5, 150, 151, 1.2784645, np.sqrt(0.5)], np.float32)
    quarters = (np.arange(1, 200) * np.pi / 4).astype(np.float32)
    around = np.concatenate([seams, quarters]).view(np.uint32)
    patterns = np.concatenate([powers, around, around - 1, around + 1]).astype(np.uint32)
    ordinary = rng.uniform(-110, 110, 6000).astype(np.float32).view(np.uint32)
    everything = rng.integers(0, 2**32, 6000, dtype=np.uint32)
    return np.concatenate([patterns, patterns | 0x80000000, ordinary, everything]).view(np.float32)


@pytest.mark.parametrize("name", definition.FUNCTIONS)
def test_bits_are_those_of_the_page(name: str) -> None:
    x = probes()
    expected = definition.function(name, x)
    for variant, backend in backends().items():
        assert_same_bits(apply(backend, name, x), expected, f"{name} with {variant}")


@pytest.mark.parametrize("count", [0, 1, 7, 8, 15, 17, 63, 64, 65, 16383, 16385])
def test_any_count_and_in_place(count: int) -> None:
    x = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    for variant, backend in backends().items():
        for name in ("exp", "silu_grad"):
            at = torch.from_numpy(x.copy())
            backend.function(name, at, out=at)
            assert_same_bits(at.numpy(), definition.function(name, x), f"{name} with {variant}")


# ---- errors and digests on every 1021st input


def logistic(x: F64) -> F64:
    return np.asarray(1 / (1 + np.exp(-x)))


# binary64 reference, the bound of appendix A in units in the last place of max(|value|, floor), and the floor
ACCURACY: dict[str, tuple[Callable[[F64], F64], float, float]] = {
    "exp": (np.exp, 0.80, 0),
    "exp2": (np.exp2, 0.86, 0),
    "log": (np.log, 0.84, 0),
    "sigmoid": (logistic, 2.5, 0),
    "silu": (lambda x: x * logistic(x), 3.5, 2.0**-119),
    "silu_grad": (lambda x: logistic(x) * (1 + x * logistic(-x)), 8.5, 0.125),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 1.5, 0),
    "sqrt": (np.sqrt, 0.5, 0),
    "recip": (lambda x: 1 / x, 0.5, 0),
    "sin": (np.sin, 0.501, 0),
    "cos": (np.cos, 0.501, 0),
}


def every_1021st() -> F32:
    return np.arange(0, 2**32, STRIDE, dtype=np.uint32).view(np.float32)


def ulp_errors(got: F32, exact: F64, floor: float) -> F64:
    """|got - exact| in units in the last place of max(|exact|, floor); an overflow counts as 2^128."""
    assert ((np.isnan(got)) == np.isnan(exact)).all()
    value, truth = (np.clip(v.astype(np.float64), -(2.0**128), 2.0**128) for v in (got, exact))
    size = np.maximum(np.abs(truth), max(floor, 2.0**-126))
    unit = np.exp2(np.floor(np.log2(size)) - 23)
    return np.where(np.isnan(exact), 0, np.abs(value - truth) / unit)


def test_there_is_a_bound_for_every_function() -> None:
    assert set(ACCURACY) == set(definition.FUNCTIONS) == set(SPECIAL) == set(json.loads(GOLDEN.read_text())["functions"])


@pytest.mark.parametrize("name", ACCURACY)
def test_every_1021st_input(name: str) -> None:
    reference, bound, floor = ACCURACY[name]
    x = every_1021st()
    got = apply(plain(), name, x)
    digest = plain().blake3([torch.from_numpy(got)])[0]
    with np.errstate(all="ignore"):
        errors = ulp_errors(got, reference(x.astype(np.float64)), floor)
    worst = int(errors.argmax())
    assert errors[worst] <= bound, f"{name}({x[worst]!r}) = {got[worst]!r}: {errors[worst]:.3f} units, allowed {bound}"
    assert digest == json.loads(GOLDEN.read_text())["functions"][name]


@pytest.mark.parametrize("isa", ["avx512", "avx2", "portable"])
def test_instruction_sets_agree(isa: str) -> None:
    """A coarser net for each instruction set; test_bits_are_those_of_the_page has the seams."""
    backend = next((b for variant, b in backends().items() if isa in variant), None)
    if backend is None:
        pytest.skip(f"this processor has no {isa}")
    x = every_1021st()[::16].copy()
    for name in ACCURACY:
        assert_same_bits(apply(backend, name, x), apply(plain(), name, x), f"{name} with {isa}")


# ---- binary64


def scalar_cases() -> list[tuple[str, float, float]]:
    rng = np.random.default_rng(2)
    cases = [("exp", float(x), 0.0) for x in [*rng.uniform(-700, 700, 40), 0.0, 1.0, -745.0, 709.78]]
    cases += [("log", float(x), 0.0) for x in [*rng.uniform(0.5, 2, 30), *np.exp2(rng.uniform(-1000, 1000, 30)), 1.0]]
    cases += [("cos", float(x), 0.0) for x in [*rng.uniform(-10, 10, 30), *rng.uniform(-(2**31), 2**31, 30), 0.0]]
    cases += [("pow", float(b), float(t)) for b in (0.9, 0.95, 0.999, 0.9999) for t in (1, 2, 10, 1000, 100000)]
    return cases


def exact_scalar(name: str, x: float, y: float) -> mpmath.mpf:
    with mpmath.workprec(300):
        return mpmath.power(x, y) if name == "pow" else getattr(mpmath, name)(mpmath.mpf(x))


def test_scalars_have_the_bits_of_the_page_and_the_stated_error() -> None:
    page = {"exp": definition.exp64, "log": definition.log64, "cos": definition.cos64}
    for name, x, y in scalar_cases():
        got = plain().scalar(name, x, y)
        if x != -745.0:  # the page's second writing has no subnormal results
            expected = definition.pow64(x, y) if name == "pow" else page[name](x)
            assert got.hex() == expected.hex(), f"{name}({x!r}, {y!r})"
        exact = exact_scalar(name, x, y)
        size = abs(exact) * (2 + abs(mpmath.log(exact))) if name == "pow" else mpmath.mpf(1) if name == "cos" else abs(exact)
        allowed = 3 * 2.0**-53 * size + mpmath.ldexp(1, -1074)
        assert abs(got - exact) <= allowed, f"{name}({x!r}, {y!r}) = {got!r}, exact {exact}"


@pytest.mark.parametrize(
    ("name", "x", "y", "message"),
    [
        ("tan", 1.0, 0.0, '"tan"; allowed: pow, cos, exp, log'),
        ("log", 0.0, 0.0, "x is 0; allowed for log: above 0"),
        ("pow", -1.0, 2.0, "x is -1; allowed for pow: above 0"),
        ("pow", 1.0, float("inf"), "y is inf; allowed: a finite number"),
        ("exp", float("nan"), 0.0, "x is nan; allowed: a finite number"),
        ("cos", 2.0**31 + 1, 0.0, "x is 2147483649; allowed for cos: -2^31 to 2^31"),
    ],
)
def test_scalar_refuses(name: str, x: float, y: float, message: str) -> None:
    with pytest.raises(KernelError, match=message.replace("^", r"\^")):
        plain().scalar(name, x, y)


def test_function_refuses() -> None:
    x = torch.zeros(4)
    with pytest.raises(KernelError, match='name is "gelu"; allowed: exp, exp2, log,'):
        plain().function("gelu", x)
    with pytest.raises(KernelError, match="count is -1; allowed: 0 or more"):
        plain().call("mok_function", name=b"exp", count=-1, **{"in": x, "out": x})
    with pytest.raises(KernelError, match="args->out is NULL"):
        plain().call("mok_function", name=b"exp", count=4, **{"in": x, "out": None})


def write_golden() -> None:
    x = every_1021st()
    digests = {name: plain().blake3([torch.from_numpy(apply(plain(), name, x))])[0] for name in ACCURACY}
    what = f"BLAKE3 of the outputs for the inputs with bits 0, {STRIDE}, {2 * STRIDE}, ... below 2^32, little-endian fp32"
    GOLDEN.write_text(json.dumps({"arithmetic": "mok-1", "what": what, "functions": digests}, indent=2) + "\n")


if __name__ == "__main__":
    write_golden()

"""Attention, query/key norm and rotation: bits against the definition, gradients against float64, seams, errors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mok_service.errors import KernelError
from mok_service.kernels.native import NativeBackend
from tests.kernels import moe_definition as definition
from tests.kernels.moe_definition import F32
from tests.kernels.moe_harness import (
    UNIT,
    Results,
    apart,
    array,
    assert_all_backends,
    assert_close,
    blank,
    functions,
    operand_dtype,
    plain,
    spread_normal,
    tensor,
)

PRECISIONS = ("fp32", "bf16")
PROPERTY = settings(max_examples=25, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Attention:
    """One problem. q, out_gradient [B, L, heads, D]; k, v [B, L, kv_heads, D], values of the operand dtype."""

    precision: str
    q: F32
    k: F32
    v: F32
    out_gradient: F32

    @property
    def scale(self) -> np.float32:
        return np.float32(np.float32(1) / np.sqrt(np.float32(self.q.shape[3])))


def attention_problem(
    precision: str, sequences: int, length: int, heads: int, kv_heads: int, size: int, seed: int, binades: int = 1
) -> Attention:
    rng = np.random.default_rng(seed)
    shapes = [(sequences, length, n, size) for n in (heads, kv_heads, kv_heads, heads)]
    return Attention(precision, *(definition.op(precision, spread_normal(rng, shape, binades)) for shape in shapes))


def run_attention(backend: NativeBackend, p: Attention) -> Results:
    sequences, length, heads, size = p.q.shape
    kv_heads, tokens = p.k.shape[2], sequences * length
    q, gradient = (tensor(x, p.precision, heads * size) for x in (p.q, p.out_gradient))
    k, v = (tensor(x, p.precision, kv_heads * size) for x in (p.k, p.v))
    v = apart(v, 3)
    sizes: dict[str, Any] = {"sequences": sequences, "heads": heads, "kv_heads": kv_heads, "scale": float(p.scale)}
    out = blank(tokens, heads * size, precision=p.precision)
    row_max, row_recip = blank(tokens, heads), blank(tokens, heads)
    backend.attention(q, k, v, **sizes, out=out, row_max=row_max, row_recip=row_recip)
    grad_q, grad_k = blank(tokens, heads * size), blank(tokens, kv_heads * size)
    grad_v = apart(blank(tokens, kv_heads * size, precision=p.precision), 5)
    backend.attention_backward(q, k, v, out, gradient, row_max, row_recip, **sizes, grad_q=grad_q, grad_k=grad_k, grad_v=grad_v)
    results = {
        "out": array(out).reshape(p.q.shape),
        "row_max": array(row_max).reshape(p.q.shape[:3]),
        "row_recip": array(row_recip).reshape(p.q.shape[:3]),
        "grad_q": array(grad_q).reshape(p.q.shape),
        "grad_k": array(grad_k).reshape(p.k.shape),
        "grad_v": array(grad_v).reshape(p.v.shape),
    }
    assert torch.isnan(torch.as_strided(grad_v, (tokens, 5), (grad_v.stride(0), 1), kv_heads * size)[:-1]).all()
    return results


def define_attention(p: Attention) -> Results:
    f = functions()
    out, row_max, row_recip = definition.attention_forward(f, p.precision, p.q, p.k, p.v, p.scale)
    grad_q, grad_k, grad_v = definition.attention_backward(
        f, p.precision, p.q, p.k, p.v, out, p.out_gradient, row_max, row_recip, p.scale
    )
    return {"out": out, "row_max": row_max, "row_recip": row_recip, "grad_q": grad_q, "grad_k": grad_k, "grad_v": grad_v}


SHAPES = (
    (1, 1, 1, 1, 2),
    (2, 16, 2, 2, 16),
    (1, 17, 4, 2, 6),
    (2, 33, 3, 1, 32),
    (1, 70, 4, 2, 8),
    (1, 5, 2, 1, 256),
    (1, 20, 19, 1, 4),  # more query heads of one key head than a task takes
)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("sequences", "length", "heads", "kv_heads", "size"), SHAPES)
def test_attention_has_the_defined_bits(
    precision: str, sequences: int, length: int, heads: int, kv_heads: int, size: int
) -> None:
    problem = attention_problem(precision, sequences, length, heads, kv_heads, size, seed=length)
    assert_all_backends(lambda backend: run_attention(backend, problem), define_attention(problem))


@PROPERTY
@given(st.data())
def test_attention_has_the_defined_bits_for_ragged_shapes(data: st.DataObject) -> None:
    kv_heads, shared = data.draw(st.integers(1, 3), "kv_heads"), data.draw(st.integers(1, 3), "heads of a kv head")
    problem = attention_problem(
        data.draw(st.sampled_from(PRECISIONS), "precision"),
        data.draw(st.integers(1, 2), "sequences"),
        data.draw(st.integers(1, 40), "length"),
        kv_heads * shared,
        kv_heads,
        2 * data.draw(st.integers(1, 20), "half of head_size"),
        data.draw(st.integers(0, 2**32 - 1), "seed"),
        data.draw(st.sampled_from([0, 1, 4]), "binades"),
    )
    assert_all_backends(lambda backend: run_attention(backend, problem), define_attention(problem))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_attention_drops_probabilities_below_the_normal_range(precision: str) -> None:
    """Dots hundreds of binades apart: p is +0 below 2^-126, everywhere the same."""
    problem = attention_problem(precision, 1, 40, 2, 1, 8, seed=3, binades=6)
    expected = define_attention(problem)
    assert (np.abs(expected["row_max"]) * problem.scale > 200).any()
    assert_all_backends(lambda backend: run_attention(backend, problem), expected)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_long_sequences_cross_every_tile_and_stay_the_same(precision: str) -> None:
    """More keys than a key tile; no definition here (too slow), but every variant against the plain one."""
    problem = attention_problem(precision, 1, 540, 2, 1, 16, seed=8)
    assert_all_backends(lambda backend: run_attention(backend, problem), None)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_sequences_do_not_see_each_other(precision: str) -> None:
    """A batch gives the bits of its sequences one by one."""
    p = attention_problem(precision, 3, 21, 4, 2, 8, seed=5)
    together = run_attention(plain(), p)
    for s in range(3):
        alone = Attention(p.precision, *(x[s : s + 1] for x in (p.q, p.k, p.v, p.out_gradient)))
        one = {key: value[s : s + 1] for key, value in together.items()}
        assert_all_backends(partial(run_attention, p=alone), one)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_nan_reaches_every_query_that_sees_it(precision: str) -> None:
    """As 0x7FFFFFFF (0x7FFF); whether it also reaches earlier queries of the step, which fails, is not defined (9)."""
    p = attention_problem(precision, 1, 40, 1, 1, 4, seed=6)
    k, v = p.k.copy(), p.v.copy()
    k[0, 20, 0, 0] = np.nan
    v[0, 30] = np.inf
    out = run_attention(plain(), Attention(precision, p.q, k, v, p.out_gradient))["out"][0, :, 0].view(np.uint32)
    assert (out[20:] == (0x7FFFFFFF if precision == "fp32" else 0x7FFF0000)).all()


def exact_attention(p: Attention) -> tuple[dict[str, NDArray[np.float64]], dict[str, NDArray[np.float64]], float]:
    """Float64 autograd, the same formulas over absolute values, and the largest sum of |q||k| in units of the exponent."""
    sequences, length, heads, size = p.q.shape
    shared, scale = heads // p.k.shape[2], float(p.scale)
    q, k, v = (torch.tensor(x.astype(np.float64), requires_grad=True) for x in (p.q, p.k, p.v))
    gradient = torch.tensor(p.out_gradient.astype(np.float64))
    wide_k, wide_v = k.repeat_interleave(shared, 2), v.repeat_interleave(shared, 2)
    mask = torch.tril(torch.ones(length, length, dtype=torch.bool))
    dots = torch.einsum("bihd,bjhd->bhij", q, wide_k) * scale
    probabilities = torch.softmax(dots.masked_fill(~mask, -torch.inf), dim=3)
    out = torch.einsum("bhij,bjhd->bihd", probabilities, wide_v)
    out.backward(gradient)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        a_q, a_k, a_v, a_do = q.abs(), wide_k.abs(), wide_v.abs(), gradient.abs()
        a_out = torch.einsum("bhij,bjhd->bihd", probabilities, a_v)
        delta = (a_do * a_out).sum(3).transpose(1, 2)
        ds = probabilities * (torch.einsum("bihd,bjhd->bhij", a_do, a_v) + delta[..., None])
        dk = scale * torch.einsum("bhij,bihd->bjhd", ds, a_q)
        dv = torch.einsum("bhij,bihd->bjhd", probabilities, a_do)
        magnitudes = {
            "out": a_out,
            "grad_q": scale * torch.einsum("bhij,bjhd->bihd", ds, a_k),
            "grad_k": dk.reshape(sequences, length, -1, shared, size).sum(3),
            "grad_v": dv.reshape(sequences, length, -1, shared, size).sum(3),
        }
        reach = float((torch.einsum("bihd,bjhd->bhij", a_q, a_k) * scale).max())
    grads = (x.grad for x in (q, k, v))
    exact = dict(zip(("out", "grad_q", "grad_k", "grad_v"), (out.detach(), *grads), strict=True))
    as_numpy = [{key: value.numpy() for key, value in x.items() if value is not None} for x in (exact, magnitudes)]
    return as_numpy[0], as_numpy[1], reach


@PROPERTY
@given(st.data())
def test_attention_gradients_match_float64_autograd(data: st.DataObject) -> None:
    """Bound, relative to the formula over absolute values.

    fp32: (2*length*heads of a kv head + 2*size + 16 + 4*reach) roundings of 2^-24: chains, and the exponent, whose error is
    the dot's. bf16: three operand roundings of 2^-8 (p and O in delta, dS; p, the result) and the fp32 part.
    """
    kv_heads, shared = data.draw(st.integers(1, 2), "kv_heads"), data.draw(st.integers(1, 2), "heads of a kv head")
    length, size = data.draw(st.integers(1, 80), "length"), 2 * data.draw(st.integers(1, 64), "half of head_size")
    precision = data.draw(st.sampled_from(PRECISIONS), "precision")
    p = attention_problem(precision, 1, length, kv_heads * shared, kv_heads, size, data.draw(st.integers(0, 999), "seed"), 0)
    got = run_attention(plain(), p)
    exact, magnitude, reach = exact_attention(p)
    relative = (2 * length * shared + 2 * size + 16 + 4 * size * reach) * UNIT["fp32"]
    relative += 3.1 * UNIT["bf16"] if precision == "bf16" else 0
    for key, value in exact.items():
        assert_close(got[key], value, magnitude[key], relative, key)


# ---- query/key norm and rotation


@dataclass(frozen=True)
class Rotation:
    """One problem. x, gradient [tokens, heads, D]; weight or None; table [positions, D]: cosines, then sines."""

    precision: str
    norm: str
    x: F32
    weight: F32 | None
    weight_gradient: F32 | None
    positions: NDArray[np.int32]
    table: F32
    gradient: F32


EPSILON = 1e-6


def rotation_problem(precision: str, norm: str, tokens: int, heads: int, size: int, seed: int, binades: int = 2) -> Rotation:
    rng = np.random.default_rng(seed)
    columns = {"none": 0, "head": size, "full": heads * size}[norm]
    angles = rng.uniform(-np.pi, np.pi, (64, size // 2))
    return Rotation(
        precision,
        norm,
        definition.op(precision, spread_normal(rng, (tokens, heads, size), binades)),
        spread_normal(rng, (columns,), 1) if columns else None,
        spread_normal(rng, (columns,), 1) if columns else None,
        rng.integers(0, 64, tokens).astype(np.int32),
        np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32),
        spread_normal(rng, (tokens, heads, size), binades),
    )


def run_rotation(backend: NativeBackend, p: Rotation) -> Results:
    tokens, heads, size = p.x.shape
    x = apart(tensor(p.x, p.precision, heads * size), 7)
    weight = None if p.weight is None else tensor(p.weight)
    rstd = {"none": None, "head": blank(tokens, heads), "full": blank(tokens)}[p.norm]
    positions, table = tensor(p.positions), tensor(p.table)
    out = blank(tokens, heads * size, precision=p.precision)
    backend.qk(x, heads, weight, p.norm, EPSILON, positions, table, out, rstd)
    grad_x = apart(torch.zeros(tokens, heads * size, dtype=operand_dtype(p.precision)), 2)
    grad_weight = None if p.weight_gradient is None else tensor(p.weight_gradient)
    gradient = tensor(p.gradient, columns=heads * size)
    backend.qk_backward(x, heads, weight, p.norm, rstd, positions, table, gradient, grad_x, grad_weight)
    result: Results = {"out": array(out).reshape(p.x.shape), "grad_x": array(grad_x).reshape(p.x.shape)}
    if rstd is not None and grad_weight is not None:
        result |= {"rstd": array(rstd).reshape(-1), "grad_weight": array(grad_weight)}
    return result


def define_rotation(p: Rotation) -> Results:
    cos, sin = np.split(p.table[p.positions], 2, axis=1)
    out, rstd = definition.qk_forward(p.precision, p.norm, p.x, p.weight, EPSILON, cos, sin)
    grad_x, sums = definition.qk_backward(p.precision, p.norm, p.x, p.weight, rstd, cos, sin, p.gradient)
    result = {"out": out, "grad_x": grad_x}
    if rstd is not None and sums is not None and p.weight_gradient is not None:
        result |= {"rstd": rstd, "grad_weight": p.weight_gradient + sums}
    return result


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("norm", ["none", "head", "full"])
@pytest.mark.parametrize(("tokens", "heads", "size"), [(1, 1, 2), (300, 3, 10), (130, 5, 64), (3, 2, 256), (0, 2, 4)])
def test_rotation_has_the_defined_bits(precision: str, norm: str, tokens: int, heads: int, size: int) -> None:
    """Blocks of 256 norm rows are crossed, also in the middle of a token."""
    problem = rotation_problem(precision, norm, tokens, heads, size, seed=tokens)
    assert_all_backends(lambda backend: run_rotation(backend, problem), define_rotation(problem))


@PROPERTY
@given(st.data())
def test_rotation_has_the_defined_bits_for_ragged_shapes(data: st.DataObject) -> None:
    problem = rotation_problem(
        data.draw(st.sampled_from(PRECISIONS), "precision"),
        data.draw(st.sampled_from(["none", "head", "full"]), "norm"),
        data.draw(st.integers(1, 80), "tokens"),
        data.draw(st.integers(1, 9), "heads"),
        2 * data.draw(st.integers(1, 70), "half of head_size"),
        data.draw(st.integers(0, 2**32 - 1), "seed"),
        data.draw(st.sampled_from([0, 3, 30]), "binades"),
    )
    with np.errstate(over="ignore", invalid="ignore"):
        assert_all_backends(lambda backend: run_rotation(backend, problem), define_rotation(problem))


@PROPERTY
@given(st.data())
def test_rotation_gradients_match_float64_autograd(data: st.DataObject) -> None:
    """Bound: 40 + columns/8 roundings of 2^-24 (256 + tokens*heads for the weight), and in bf16 one of 2^-8."""
    precision, norm = (
        data.draw(st.sampled_from(PRECISIONS), "precision"),
        data.draw(st.sampled_from(["none", "head", "full"]), "norm"),
    )
    tokens, heads, size = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 4)), 2 * data.draw(st.integers(1, 64))
    p = rotation_problem(precision, norm, tokens, heads, size, data.draw(st.integers(0, 999), "seed"))
    got = run_rotation(plain(), p)

    x = torch.tensor(p.x.astype(np.float64), requires_grad=True)
    gradient = torch.tensor(p.gradient.astype(np.float64))
    cos, sin = (torch.tensor(t.astype(np.float64))[:, None] for t in np.split(p.table[p.positions], 2, axis=1))
    half = size // 2
    weight, n, rows = None, x, None
    if p.weight is not None:
        weight = torch.tensor(p.weight.astype(np.float64), requires_grad=True)
        rows = x if norm == "head" else x.reshape(tokens, -1)
        rstd = torch.rsqrt((rows * rows).mean(-1, keepdim=True) + EPSILON)
        n = (rows * rstd * weight).reshape(x.shape)
    low, high = n[..., :half], n[..., half:]
    out = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=2)
    out.backward(gradient)  # type: ignore[no-untyped-call]

    def rotated(t: torch.Tensor) -> torch.Tensor:
        low, high, c, s = t[..., :half].abs(), t[..., half:].abs(), cos.abs(), sin.abs()
        return torch.cat([low * c + high * s, high * c + low * s], dim=2)

    assert x.grad is not None
    relative = (40 + heads * size / 8) * UNIT["fp32"] + (UNIT["bf16"] if precision == "bf16" else 0)
    assert_close(got["out"], out.detach().numpy(), rotated(n.detach()).numpy(), relative, "out")
    dn = rotated(gradient)
    if weight is None or rows is None or p.weight_gradient is None:
        assert_close(got["grad_x"], x.grad.numpy(), dn.numpy(), relative, "grad_x")
        return
    with torch.no_grad():
        g = dn.reshape(rows.shape) * weight.abs()
        xh = (rows * rstd).abs()
        dx = rstd * (g + xh * (g * xh).mean(-1, keepdim=True))
        dw = (dn.reshape(rows.shape) * xh).reshape(-1, len(weight)).sum(0)
    assert weight.grad is not None
    assert_close(got["grad_x"], x.grad.numpy(), dx.reshape(x.shape).numpy(), relative, "grad_x")
    exact = p.weight_gradient + weight.grad.numpy()
    magnitude = np.abs(p.weight_gradient) + dw.numpy()
    assert_close(got["grad_weight"], exact, magnitude, (300 + tokens * heads + heads * size / 8) * UNIT["fp32"], "grad_weight")


# ---- errors


def test_wrong_arguments_are_named() -> None:
    backend, x = plain(), torch.zeros(4, 8)
    sizes: dict[str, Any] = {"sequences": 1, "length": 4, "heads": 4, "kv_heads": 2, "head_size": 2, "ld_v": 8, "scale": 1.0}
    fields: dict[str, Any] = {
        "precision": 0,
        "q": x,
        "k": x,
        "v": x,
        "out": x.clone(),
        "row_max": x.clone(),
        "row_recip": x.clone(),
    }
    attention_cases: list[tuple[dict[str, Any], str]] = [
        ({"kv_heads": 3}, "heads is 4 and kv_heads 3"),
        ({"ld_v": 3}, "ld_v is 3; allowed: kv_heads \\* head_size = 4"),
        ({"scale": 0.0}, "scale is 0; allowed: a finite number above 0"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"precision": 2}, "precision is 2; allowed: 0 \\(fp32\\), 1 \\(bf16\\)"),
        ({"length": -1}, "length is -1"),
        ({"head_size": 0}, "head_size is 0"),
        ({"q": None}, "q is NULL"),
    ]
    for wrong, message in attention_cases:
        with pytest.raises(KernelError, match=message):
            backend.call("mok_attention_forward", **{**fields, **sizes, **wrong})
    rotation: dict[str, Any] = {
        "precision": 0, "norm": 0, "tokens": 4, "heads": 2, "head_size": 4, "ld_in": 8, "epsilon": 0.0, "in": x,
        "positions": torch.zeros(4, dtype=torch.int32), "cos_sin": torch.zeros(1, 4), "out": x.clone(),
    }  # fmt: skip
    rotation_cases: list[tuple[dict[str, Any], str]] = [
        ({"head_size": 3}, "head_size is 3; allowed: even numbers"),
        ({"norm": 3}, "norm is 3"),
        ({"norm": 1}, "weight is NULL"),
        ({"ld_in": 7}, "ld_in is 7; allowed: heads \\* head_size = 8"),
        ({"positions": torch.tensor([0, 0, -5, 0], dtype=torch.int32)}, "positions\\[2\\] is -5"),
    ]
    for wrong, message in rotation_cases:
        with pytest.raises(KernelError, match=message):
            backend.call("mok_qk_forward", **{**rotation, **wrong})


def test_no_tokens_is_no_work() -> None:
    empty = torch.zeros(0, 8)
    sizes: dict[str, Any] = {"sequences": 3, "heads": 4, "kv_heads": 4, "scale": 0.5}
    plain().attention(empty, empty, empty, **sizes, out=empty, row_max=torch.zeros(0, 4), row_recip=torch.zeros(0, 4))

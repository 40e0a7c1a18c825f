"""Embedding, RMSNorm, cross entropy, sums of squares, AdamW: bits against the page, float64, ragged sizes, faults, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mok_service.errors import KernelError
from mok_service.kernels.native import NativeBackend
from tests.kernels import rows_definition as definition
from tests.kernels.moe_definition import F32, I32, from_bf16, rms_rstd, to_bf16
from tests.kernels.moe_harness import (
    UNIT,
    Results,
    array,
    assert_all_backends,
    assert_close,
    assert_same_bits,
    blank,
    operand_dtype,
    plain,
    spread_normal,
    tensor,
)

PRECISIONS = ("fp32", "bf16")
COLUMNS = (1, 2, 7, 8, 9, 63, 64, 65, 127, 128, 129, 200, 1000)
EPSILON = 1e-6


# ---- embedding


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("tokens", "vocabulary", "hidden"), [(0, 3, 4), (1, 1, 1), (5, 3, 65), (300, 70000, 33)])
def test_embedding_copies_rows(precision: str, tokens: int, vocabulary: int, hidden: int) -> None:
    rng = np.random.default_rng(3)
    ids = rng.integers(0, vocabulary, tokens).astype(np.int32)
    table = tensor(rng.integers(0, 2**32, (vocabulary, hidden), dtype=np.uint32).view(np.float32))  # all kinds of bits
    if precision == "bf16":
        table = table.view(torch.int32).to(torch.int16).view(torch.bfloat16)

    def run(backend: NativeBackend) -> Results:
        return {"out": array(backend.embedding(tensor(ids), table, blank(tokens, hidden)))}

    assert_all_backends(run, {"out": array(table)[ids]})


@pytest.mark.parametrize(("tokens", "vocabulary", "hidden"), [(0, 3, 4), (1, 1, 1), (9, 2, 64), (700, 1, 65), (500, 40, 1030)])
def test_embedding_backward(tokens: int, vocabulary: int, hidden: int) -> None:
    rng = np.random.default_rng(4)
    ids = rng.integers(0, vocabulary, tokens).astype(np.int32)
    gradient, table = spread_normal(rng, (tokens, hidden)), spread_normal(rng, (vocabulary, hidden))

    def run(backend: NativeBackend) -> Results:
        out = tensor(table)
        backend.embedding_backward(tensor(ids), tensor(gradient), out)
        return {"grad_table": array(out)}

    expected = definition.embedding_backward(ids, gradient, table)
    assert_all_backends(run, {"grad_table": expected})
    exact, magnitude = table.astype(np.float64), np.abs(table).astype(np.float64)
    np.add.at(exact, ids, gradient.astype(np.float64))
    np.add.at(magnitude, ids, np.abs(gradient).astype(np.float64))
    assert_close(expected, exact, magnitude, (tokens + 1) * UNIT["fp32"], "grad_table")


def test_embedding_leaves_other_rows_alone() -> None:
    """Also their NaN bits and zeros of either sign."""
    table = tensor(np.array([[0x7FC12345], [0x80000000], [0x3F800000]], np.uint32).view(np.float32))
    before = array(table).copy()
    plain().embedding_backward(tensor(np.array([2], np.int32)), tensor(np.array([[1]], np.float32)), table)
    assert_same_bits(array(table)[:2], before[:2], "rows without tokens")
    assert array(table)[2, 0] == 2


@pytest.mark.parametrize("identifier", [-1, 3])
def test_embedding_refuses_ids(identifier: int) -> None:
    ids, out = tensor(np.array([0, identifier], np.int32)), blank(2, 4)
    with pytest.raises(KernelError, match=rf"ids\[1\] is {identifier}; allowed: 0 to 2"):
        plain().embedding(ids, torch.zeros(3, 4), out)
    assert out.isnan().all()
    grad_table = torch.zeros(3, 4)
    with pytest.raises(KernelError, match=rf"ids\[1\] is {identifier}; allowed: 0 to 2"):
        plain().embedding_backward(ids, torch.ones(2, 4), grad_table)
    assert (grad_table == 0).all()


# ---- RMSNorm


def norm_problem(rows: int, columns: int) -> tuple[F32, F32, F32, F32, F32]:
    """x, weight, gradient, addend, the weight gradient so far."""
    rng = np.random.default_rng(rows * 4099 + columns)
    shapes = ((rows, columns), (columns,), (rows, columns), (rows, columns), (columns,))
    x, weight, gradient, addend, sums = (spread_normal(rng, shape) for shape in shapes)
    return x, weight, gradient, addend, sums


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("rows", "columns"), [*((3, c) for c in COLUMNS), (1, 4095), (2, 4097), (0, 5), (300, 33)])
def test_rmsnorm(precision: str, rows: int, columns: int) -> None:
    x, weight, *_ = norm_problem(rows, columns)

    def run(backend: NativeBackend) -> Results:
        out, rstd = blank(rows, columns, precision=precision), blank(rows)
        backend.rmsnorm(tensor(x), tensor(weight), EPSILON, out, rstd)
        return {"out": array(out), "rstd": array(rstd)}

    out, rstd = definition.rmsnorm(precision, x, weight, EPSILON) if rows else (x, np.zeros(0, np.float32))
    assert_all_backends(run, {"out": out, "rstd": rstd})
    x64 = x.astype(np.float64)
    exact = x64 / np.sqrt((x64**2).mean(axis=1, keepdims=True) + EPSILON) * weight
    units = (columns / 8 + 10) * UNIT["fp32"] + (UNIT["bf16"] if precision == "bf16" else 0)
    assert_close(out, exact, np.abs(exact), units, "out")


@pytest.mark.parametrize("with_addend", [False, True])
@pytest.mark.parametrize(
    ("rows", "columns"), [*((3, c) for c in COLUMNS), (1, 4097), (0, 5), (255, 9), (256, 3), (257, 65), (1300, 12)]
)
def test_rmsnorm_backward(rows: int, columns: int, with_addend: bool) -> None:
    x, weight, gradient, addend, sums = norm_problem(rows, columns)
    rstd = rms_rstd(x, EPSILON) if rows else np.zeros(0, np.float32)

    def run(backend: NativeBackend) -> Results:
        grad_x, grad_weight = tensor(addend) if with_addend else blank(rows, columns), tensor(sums)
        before = grad_x if with_addend else None
        backend.rmsnorm_backward(
            tensor(x), tensor(weight), tensor(rstd), tensor(gradient), grad_x, addend=before, grad_weight=grad_weight
        )
        return {"grad_x": array(grad_x), "grad_weight": array(grad_weight)}

    if rows == 0:
        assert_all_backends(run, {"grad_x": x, "grad_weight": sums})
        return
    dx, dw = definition.rmsnorm_backward(x, weight, rstd, gradient, addend if with_addend else None, sums)
    assert_all_backends(run, {"grad_x": dx, "grad_weight": dw})
    check_norm_gradients(norm_problem(rows, columns), dx - addend if with_addend else dx, dw, with_addend)


def check_norm_gradients(problem: tuple[F32, F32, F32, F32, F32], dx: F32, dw: F32, rounded_twice: bool) -> None:
    """Against float64 autograd; the magnitudes are the formulas of section 7 over absolute values."""
    x, weight, gradient, addend, sums = problem
    rows, columns = x.shape
    x64, w64 = (torch.from_numpy(v.astype(np.float64)).requires_grad_() for v in (x, weight))
    out = x64 * torch.rsqrt((x64**2).mean(dim=1, keepdim=True) + EPSILON) * w64
    exact_dx, exact_dw = torch.autograd.grad(out, (x64, w64), torch.from_numpy(gradient.astype(np.float64)))
    r = 1 / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + EPSILON)
    normed, weighted = np.abs(x) * r, np.abs(gradient * weight).astype(np.float64)
    magnitude = r * (weighted + normed * (normed * weighted).mean(axis=1, keepdims=True))
    if rounded_twice:
        magnitude = magnitude + np.abs(addend)
    units = (columns / 4 + 20) * UNIT["fp32"]
    assert_close(dx, exact_dx.numpy(), magnitude, units, "grad_x")
    total = np.abs(sums) + (np.abs(gradient) * normed).sum(axis=0)
    assert_close(dw, exact_dw.numpy() + sums, total, (columns / 8 + min(rows, 256) + 20) * UNIT["fp32"], "grad_weight")


def test_rmsnorm_without_weight_gradient() -> None:
    x, weight, gradient, _, _ = norm_problem(5, 70)
    rstd = rms_rstd(x, EPSILON)
    grad_x = blank(5, 70)
    plain().rmsnorm_backward(tensor(x), tensor(weight), tensor(rstd), tensor(gradient), grad_x)
    assert_same_bits(array(grad_x), definition.rmsnorm_backward(x, weight, rstd, gradient, None, weight)[0], "grad_x")


def test_rmsnorm_writes_one_nan() -> None:
    x = np.array([[1, -np.nan, 3]], np.float32)
    out, rstd = blank(1, 3), blank(1)
    plain().rmsnorm(tensor(x), torch.ones(3), EPSILON, out, rstd)
    assert_same_bits(array(out).view(np.uint32), np.full((1, 3), 0x7FFFFFFF, np.uint32), "out")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"precision": 2}, r"precision is 2; allowed: 0 \(fp32\), 1 \(bf16\)"),
        ({"rows": -1}, "rows is -1; allowed: 0 to"),
        ({"columns": 0}, "columns is 0; allowed: 1 to"),
        ({"epsilon": -1.0}, "epsilon is -1; allowed: 0 or more"),
        ({"weight": None}, "args->weight is NULL"),
    ],
)
def test_rmsnorm_refuses(changed: dict[str, Any], message: str) -> None:
    x, out, rstd = torch.ones(2, 3), blank(2, 3), blank(2)
    fields = {"precision": 0, "rows": 2, "columns": 3, "epsilon": 0.0, "x": x, "weight": torch.ones(3), "out": out, "rstd": rstd}
    with pytest.raises(KernelError, match=message):
        plain().call("mok_rmsnorm_forward", **{**fields, **changed})
    assert out.isnan().all()


# ---- cross entropy


def run_loss(backend: NativeBackend, precision: str, logits: F32, labels: I32, *, sum_before: int = 0) -> Results:
    loss_sum, status = torch.full((1,), sum_before, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    grad = blank(*logits.shape, precision=precision)
    backend.cross_entropy(tensor(logits), tensor(labels), loss_sum, status, grad)
    return {"loss_sum": loss_sum.numpy(), "status": status.numpy(), "grad": array(grad)}


def expected_loss(precision: str, logits: F32, labels: I32, *, sum_before: int = 0) -> Results:
    page = definition.cross_entropy(precision, logits, labels)
    total = np.array([page.loss_sum + sum_before], np.int64)
    return {"loss_sum": total, "status": np.array([page.status], np.int32), "grad": page.grad}


LOSS_SHAPES = [(1, 1), (3, 2), (2, 7), (5, 63), (4, 64), (3, 65), (2, 4095), (2, 4096), (2, 4097), (3, 12345), (90, 50)]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("rows", "vocabulary"), LOSS_SHAPES)
def test_cross_entropy(precision: str, rows: int, vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = spread_normal(rng, (rows, vocabulary), 4)
    labels = rng.integers(-1, vocabulary, rows).astype(np.int32)
    labels[0] = vocabulary - 1
    expected = expected_loss(precision, logits, labels, sum_before=-5)
    assert_all_backends(lambda backend: run_loss(backend, precision, logits, labels, sum_before=-5), expected)

    exact = torch.from_numpy(logits.astype(np.float64)).requires_grad_()
    loss = torch.nn.functional.cross_entropy(exact, torch.from_numpy(labels).long(), ignore_index=-1, reduction="sum")
    (exact_grad,) = torch.autograd.grad(loss, exact)
    size = np.abs(logits).max(axis=1)[labels >= 0].astype(np.float64).sum() + np.log(vocabulary) * rows
    assert abs((int(expected["loss_sum"][0]) + 5) * 2.0**-32 - float(loss.detach())) <= 8 * UNIT["fp32"] * size
    p = np.where((labels >= 0)[:, None], torch.softmax(exact.detach(), dim=1).numpy(), 0)
    units = (vocabulary / 8 if vocabulary < 64 else 40) * UNIT["fp32"] + (UNIT["bf16"] if precision == "bf16" else 0)
    magnitude = p.copy()  # a gradient at the label is p - 1
    magnitude[np.flatnonzero(labels >= 0), labels[labels >= 0]] += 1
    magnitude *= 1 + np.abs(logits).max(axis=1, keepdims=True)  # the rounding of logit - M
    assert_close(expected["grad"], exact_grad.numpy(), magnitude, units + 4 * UNIT["fp32"], "grad")


def test_a_large_vocabulary() -> None:
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((2, 151936)).astype(np.float32) * np.float32(3)
    labels = np.array([151935, 0], np.int32)
    assert_all_backends(lambda b: run_loss(b, "bf16", logits, labels), expected_loss("bf16", logits, labels))


def test_loss_without_gradient() -> None:
    logits, labels = np.array([[1, 2, 3]], np.float32), np.array([1], np.int32)
    loss_sum, status = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    plain().cross_entropy(tensor(logits), tensor(labels), loss_sum, status)
    assert int(loss_sum) == definition.cross_entropy("fp32", logits, labels).loss_sum


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, -np.nan])
@pytest.mark.parametrize("column", [0, 70, 99])
def test_a_logit_that_is_not_finite_sets_the_status(value: float, column: int) -> None:
    rng = np.random.default_rng(6)
    logits, labels = spread_normal(rng, (4, 100)), np.array([3, 5, -1, 7], np.int32)
    logits[1, column] = value
    assert_all_backends(lambda b: run_loss(b, "fp32", logits, labels), expected_loss("fp32", logits, labels))
    assert expected_loss("fp32", logits, labels)["status"][0] == 1
    labels[1] = -1  # a row without a label isn't read
    assert_all_backends(lambda b: run_loss(b, "fp32", logits, labels), expected_loss("fp32", logits, labels))
    assert expected_loss("fp32", logits, labels)["status"][0] == 0


@pytest.mark.parametrize(("spread", "status"), [(2.0**20 - 1, 0), (2.0**20, 1), (3e38, 1)])
def test_a_loss_of_two_to_the_20_sets_the_status(spread: float, status: int) -> None:
    logits, labels = np.array([[0, spread]], np.float32), np.array([0], np.int32)
    got = run_loss(plain(), "fp32", logits, labels)
    assert got["status"][0] == status
    assert got["loss_sum"][0] == (0 if status else round(spread * 2**32))
    assert_all_backends(lambda b: run_loss(b, "fp32", logits, labels), expected_loss("fp32", logits, labels))


def test_the_status_is_never_cleared() -> None:
    status = torch.ones(1, dtype=torch.int32)
    plain().cross_entropy(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), status)
    assert int(status) == 1


def test_cross_entropy_refuses_labels() -> None:
    loss_sum, status = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    for label in (-2, 3):
        labels = torch.tensor([0, label], dtype=torch.int32)
        with pytest.raises(KernelError, match=rf"labels\[1\] is {label}; allowed: -1 to 2"):
            plain().cross_entropy(torch.zeros(2, 3), labels, loss_sum, status)
    assert int(loss_sum) == 0


# ---- sums of squares


@pytest.mark.parametrize(
    ("matrices", "rows", "columns"),
    [
        (1, 1, 1),
        (2, 1, 63),
        (1, 64, 64),
        (3, 65, 65),
        (1, 63, 129),
        (2, 130, 4097),
        (1, 1, 9000),
        (4, 200, 1),
        (2, 0, 5),
        (0, 3, 3),
    ],
)
def test_sum_squares(matrices: int, rows: int, columns: int) -> None:
    x = spread_normal(np.random.default_rng(7), (matrices, rows, columns), 6)
    expected = np.array([definition.sum_squares(matrix) for matrix in x], np.float32)
    assert_all_backends(lambda backend: {"out": array(backend.sum_squares(tensor(x), blank(matrices)))}, {"out": expected})
    exact = (x.astype(np.float64) ** 2).sum(axis=(1, 2))
    assert_close(expected, exact, exact, 40 * UNIT["fp32"], "out")


def test_sum_squares_of_nan_and_of_negative_sizes() -> None:
    x = np.ones((1, 3, 3), np.float32)
    x[0, 1, 1] = -np.nan
    out = array(plain().sum_squares(tensor(x), blank(1)))
    assert out.view(np.uint32)[0] == 0x7FFFFFFF
    with pytest.raises(KernelError, match="are 1, -3, 3; allowed: 0 or more"):
        plain().call("mok_sum_squares", matrices=1, rows=-3, columns=3, **{"in": tensor(x), "out": blank(1)})
    with pytest.raises(KernelError, match="allowed: a product that fits memory"):
        plain().call("mok_sum_squares", matrices=2**40, rows=2**30, columns=3, **{"in": tensor(x), "out": blank(1)})


# ---- AdamW


def scalars(step: int, weight_decay: float = 0.1) -> dict[str, float]:
    return {
        "grad_scale": 1 / 3000,
        "clip_scale": 0.7,
        "lr": 3e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "one_minus_beta1": 1 - 0.9,
        "one_minus_beta2": 1 - 0.95,
        "correction1": 1 / (1 - 0.9**step),
        "correction2": 1 / (1 - 0.95**step),
        "epsilon": 1e-8,
        "weight_decay": weight_decay,
    }


def adamw_problem(count: int) -> tuple[F32, F32, F32, F32]:
    """weight, first moment, second moment, gradient; some moments and gradients are 0 or subnormal."""
    rng = np.random.default_rng(count)
    weight, first, grad = (spread_normal(rng, (count,), 8) for _ in range(3))
    second = np.abs(spread_normal(rng, (count,), 8))
    first[::7] = second[::7] = grad[::7] = 0
    grad[1::11] *= np.float32(1e-38)
    return weight, first * np.float32(1e-3), second * np.float32(1e-6), grad


def update(
    backend: NativeBackend,
    tensors: list[Tensor],
    fields: dict[str, float],
    operand: Tensor | None = None,
    *,
    failed: bool = False,
) -> None:
    weight, first, second, grad = tensors
    backend.adamw(weight, first, second, grad, operand, torch.full((1,), int(failed), dtype=torch.int32), **fields)


@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 8191, 8193, 20000])
@pytest.mark.parametrize("with_operand", [False, True])
def test_adamw(count: int, with_operand: bool) -> None:
    problem, fields = adamw_problem(count), scalars(3)

    def run(backend: NativeBackend) -> Results:
        tensors = [tensor(x) for x in problem]
        operand = blank(count, precision="bf16") if with_operand else None
        update(backend, tensors, fields, operand)
        results = dict(zip(("weight", "first", "second", "grad"), map(array, tensors), strict=True))
        return results if operand is None else {**results, "operand": array(operand)}

    weight, first, second = definition.adamw(*problem, fields)
    expected: Results = {"weight": weight, "first": first, "second": second, "grad": problem[3]}
    if with_operand:
        expected["operand"] = from_bf16(to_bf16(weight))
    assert_all_backends(run, expected)


def test_adamw_follows_float64() -> None:
    """50 steps; the bound is 4 roundings of the weight a step, and 1e-3 of the steps themselves for m and v."""
    rng = np.random.default_rng(8)
    exact = [x.astype(np.float64) for x in (rng.standard_normal(1000), np.zeros(1000), np.zeros(1000))]
    tensors = [tensor(x.astype(np.float32)) for x in exact]
    for step in range(1, 51):
        grad, s = rng.standard_normal(1000).astype(np.float32), scalars(step)
        update(plain(), [*tensors, tensor(grad)], s)
        g = grad.astype(np.float64) * s["grad_scale"] * s["clip_scale"]
        exact[1] = s["beta1"] * exact[1] + s["one_minus_beta1"] * g
        exact[2] = s["beta2"] * exact[2] + s["one_minus_beta2"] * g * g
        u = exact[1] * s["correction1"] / (np.sqrt(exact[2] * s["correction2"]) + s["epsilon"])
        exact[0] = exact[0] - s["lr"] * (u + s["weight_decay"] * exact[0])
    bound = 4 * 50 * UNIT["fp32"] * np.abs(exact[0]) + 50 * 3e-4 * 1e-3
    assert (np.abs(array(tensors[0]) - exact[0]) <= bound).all()


def test_adamw_stores_nothing_after_a_failure() -> None:
    problem = adamw_problem(100)
    tensors, operand = [tensor(x) for x in problem], torch.zeros(100, dtype=operand_dtype("bf16"))
    update(plain(), tensors, scalars(1), operand, failed=True)
    for got, before in zip(tensors, problem, strict=True):
        assert_same_bits(array(got), before, "after a failed step")
    assert (operand == 0).all()


def test_adamw_refuses() -> None:
    x = torch.zeros(4)
    fields: dict[str, Any] = {name: x for name in ("weight", "first", "second", "grad")}
    with pytest.raises(KernelError, match="status is NULL; allowed: a pointer to the step's status"):
        plain().call("mok_adamw", count=4, **fields, **scalars(1))
    with pytest.raises(KernelError, match="count is -4; allowed: 0 or more"):
        plain().call("mok_adamw", count=-4, status=torch.zeros(1, dtype=torch.int32), **fields, **scalars(1))

"""Sections 6, 7, 12 and 13 of docs/arithmetic.md, written a second time in numpy; compared with the kernels by bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.kernels import functions_definition as functions
from tests.kernels.moe_definition import F32, I32, ONE, fma, op, rms_backward, rms_rstd, row_sum, tree

PANEL, BLOCK = 4096, 64


def embedding_backward(ids: I32, gradient: F32, table: F32) -> F32:
    """The table after one group's tokens (6)."""
    table = table.copy()
    for identifier in np.unique(ids):
        total = np.zeros(table.shape[1], np.float32)
        for position in np.flatnonzero(ids == identifier):
            total = total + gradient[position]
        table[identifier] = table[identifier] + total
    return table


def rmsnorm(precision: str, x: F32, weight: F32, epsilon: float) -> tuple[F32, F32]:
    """(out, rstd) (7)."""
    rstd = rms_rstd(x, epsilon)
    return op(precision, (x * rstd[:, None]) * weight), rstd


def rmsnorm_backward(x: F32, weight: F32, rstd: F32, gradient: F32, addend: F32 | None, sums: F32) -> tuple[F32, F32]:
    """(grad_x, grad_weight), which was `sums` before (7)."""
    dx, dw = rms_backward(x, weight, rstd, gradient)
    return dx if addend is None else addend + dx, sums + dw


@dataclass(frozen=True)
class Loss:
    loss_sum: int
    grad: F32
    status: int


def cross_entropy(precision: str, logits: F32, labels: I32) -> Loss:
    """Section 12. A row that is not finite has a gradient of +0 and no loss."""
    total, status = 0, 0
    gradient = np.zeros(logits.shape, np.float32)
    for row, label in enumerate(labels):
        x = logits[row]
        if label < 0:
            continue
        if not np.isfinite(x).all():
            status = 1
            continue
        largest = x.max()
        e = functions.function("exp", x - largest)
        panels = [row_sum(e[start : start + PANEL]) for start in range(0, len(e), PANEL)]
        summed = tree(np.stack(panels))
        loss = (largest + functions.function("log", summed.reshape(1))[0]) - x[label]
        if abs(loss) < 2.0**20:
            total += round(float(loss) * 2.0**32)
        else:
            status = 1
        r = ONE / summed
        onehot = np.zeros(len(x), np.float32)
        onehot[label] = ONE
        gradient[row] = np.where(onehot == ONE, fma(e, r, -onehot), e * r)
    return Loss(total, op(precision, gradient), status)


def sum_squares(matrix: F32) -> np.float32:
    """13.1 for one matrix [R, C]."""
    blocks = []
    for top in range(0, matrix.shape[0], BLOCK):
        for left in range(0, matrix.shape[1], BLOCK):
            part = matrix[top : top + BLOCK, left : left + BLOCK]
            blocks.append(tree(row_sum(part, part)))
    return np.float32(tree(np.stack(blocks)) if blocks else 0)


def adamw(weight: F32, first: F32, second: F32, grad: F32, scalars: dict[str, float]) -> tuple[F32, F32, F32]:
    """13.3: weight, first and second moment after the update."""
    s = {name: np.float32(value) for name, value in scalars.items()}
    g = (grad * s["grad_scale"]) * s["clip_scale"]
    m = fma(s["beta1"], first, s["one_minus_beta1"] * g)
    v = fma(s["beta2"], second, s["one_minus_beta2"] * (g * g))
    u = (m * s["correction1"]) / (np.sqrt(v * s["correction2"]) + s["epsilon"])
    return fma(-s["lr"], fma(s["weight_decay"], weight, u), weight), m, v

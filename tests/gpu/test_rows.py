"""Elementwise and row operations: CPU against GPU by bytes."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.twins import BF16, CODES, F32, I32, OPERANDS, compare, generator, normal, poison

pytestmark = pytest.mark.gpu
PRECISIONS = ["fp32", "bf16"]


def raw_floats(g: torch.Generator, count: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (count,), generator=g, dtype=torch.int64).to(I32).view(F32)


def test_conversion_and_addition_of_raw_patterns() -> None:
    g = generator(1)
    x, y = raw_floats(g, 1_000_003), raw_floats(g, 1_000_003)
    compare("mok_to_bf16", ("out",), count=x.numel(), **{"in": x, "out": poison(x.numel(), dtype=BF16)})
    compare("mok_add", ("out",), count=x.numel(), a=x, b=y, out=poison(x.numel()))
    compare("mok_add", ("out",), count=x.numel(), a=x, b=y, out=x)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 64, 64), (2, 65, 129), (1, 1, 5000), (5, 200, 77), (1, 3000, 2050), (2, 0, 5)])
def test_sum_squares(shape: tuple[int, int, int]) -> None:
    matrices, rows, columns = shape
    x = normal(generator(2), matrices, rows, columns, spread=6)
    compare("mok_sum_squares", ("out",), matrices=matrices, rows=rows, columns=columns, **{"in": x, "out": poison(matrices)})


@pytest.mark.parametrize("count", [1, 255, 100_003])
@pytest.mark.parametrize("status", [0, 1])
def test_adamw(count: int, status: int) -> None:
    g = generator(3)
    state = dict(weight=normal(g, count), first=normal(g, count) * 0.01, second=normal(g, count).square() * 1e-3)
    compare(
        "mok_adamw",
        ("weight", "first", "second", "operand"),
        count=count,
        **state,
        grad=normal(g, count, spread=8),
        operand=poison(count, dtype=BF16),
        grad_scale=1 / 777,
        clip_scale=0.75,
        lr=3e-4,
        beta1=0.9,
        beta2=0.95,
        one_minus_beta1=0.1,
        one_minus_beta2=0.05,
        correction1=1 / (1 - 0.9**3),
        correction2=1 / (1 - 0.95**3),
        epsilon=1e-8,
        weight_decay=0.1,
        status=torch.tensor([status], dtype=I32),
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("tokens", "vocabulary", "hidden"), [(1, 1, 1), (700, 50, 130), (2000, 900, 2049), (513, 100000, 64)])
def test_embedding(precision: str, tokens: int, vocabulary: int, hidden: int) -> None:
    g = generator(4)
    ids = torch.randint(0, vocabulary, (tokens,), generator=g, dtype=I32)
    table = normal(g, vocabulary, hidden, dtype=OPERANDS[precision])
    common = dict(tokens=tokens, vocabulary=vocabulary, hidden=hidden, ids=ids)
    compare("mok_embedding_forward", ("out",), precision=CODES[precision], table=table, out=poison(tokens, hidden), **common)
    gradients = normal(g, tokens, hidden, spread=4)
    compare("mok_embedding_backward", ("grad_table",), grad_out=gradients, grad_table=normal(g, vocabulary, hidden), **common)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 63), (300, 64), (513, 200), (1025, 2048), (40, 4500), (9, 70000)])
def test_rmsnorm(precision: str, rows: int, columns: int) -> None:
    g = generator(5)
    x, weight = normal(g, rows, columns, spread=3), normal(g, columns)
    rstd = compare(
        "mok_rmsnorm_forward",
        ("out", "rstd"),
        precision=CODES[precision],
        rows=rows,
        columns=columns,
        epsilon=1e-5,
        x=x,
        weight=weight,
        out=poison(rows, columns, dtype=OPERANDS[precision]),
        rstd=poison(rows),
    )["rstd"]
    gradient = normal(g, rows, columns, spread=3)
    common = dict(rows=rows, columns=columns, x=x, weight=weight, rstd=rstd, grad_out=gradient)
    compare("mok_rmsnorm_backward", ("grad_x",), addend=None, grad_x=poison(rows, columns), grad_weight=None, **common)
    residual = normal(g, rows, columns)
    compare(
        "mok_rmsnorm_backward",
        ("grad_x", "grad_weight"),
        addend=residual,
        grad_x=residual,
        grad_weight=normal(g, columns),
        **common,
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("norm", [0, 1, 2])
@pytest.mark.parametrize(
    ("tokens", "heads", "size", "extra"), [(1, 1, 2, 0), (70, 3, 10, 7), (300, 4, 64, 64), (520, 16, 128, 256)]
)
def test_query_key_norm_and_rotation(precision: str, norm: int, tokens: int, heads: int, size: int, extra: int) -> None:
    g = generator(6)
    columns, dtype = heads * size, OPERANDS[precision]
    positions = torch.randint(0, 333, (tokens,), generator=g, dtype=I32)
    table = compare("mok_rope_table", ("cos_sin",), positions=333, head_size=size, base=10000.0, cos_sin=poison(333, size))[
        "cos_sin"
    ]
    x = normal(g, tokens, columns + extra, dtype=dtype)
    weight = None if norm == 0 else normal(g, size if norm == 1 else columns)
    rows = tokens * heads if norm == 1 else tokens
    common = dict(
        precision=CODES[precision],
        norm=norm,
        tokens=tokens,
        heads=heads,
        head_size=size,
        ld_in=columns + extra,
        weight=weight,
        positions=positions,
        cos_sin=table,
        **{"in": x},
    )
    found = compare(
        "mok_qk_forward",
        ("out", *(("rstd",) if norm else ())),
        epsilon=1e-6,
        out=poison(tokens, columns, dtype=dtype),
        rstd=poison(rows) if norm else None,
        **common,
    )
    compare(
        "mok_qk_backward",
        ("grad_in", *(("grad_weight",) if norm else ())),
        ld_grad_in=columns + 8,
        rstd=found.get("rstd"),
        grad_out=normal(g, tokens, columns, spread=3),
        grad_in=poison(tokens, columns + 8, dtype=dtype),
        grad_weight=None if weight is None else normal(g, weight.numel()),
        **common,
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1), (5, 50), (33, 4096), (17, 4097), (40, 50304), (3, 151936)])
def test_cross_entropy(precision: str, rows: int, vocabulary: int) -> None:
    g = generator(7)
    labels = torch.randint(-1, vocabulary, (rows,), generator=g, dtype=I32)
    logits = normal(g, rows, vocabulary) * 4
    fields = dict(
        precision=CODES[precision],
        rows=rows,
        vocabulary=vocabulary,
        labels=labels,
        loss_sum=torch.tensor([12345]),
        grad_logits=poison(rows, vocabulary, dtype=OPERANDS[precision]),
        status=torch.zeros(1, dtype=I32),
    )
    compare("mok_cross_entropy", ("loss_sum", "grad_logits", "status"), logits=logits, **fields)
    compare("mok_cross_entropy", ("loss_sum", "status"), logits=logits, **{**fields, "grad_logits": None})
    for value in (float("inf"), float("-inf"), float("nan"), 3e38):
        bad = logits.clone()
        bad[rows // 2, vocabulary // 2] = value
        compare("mok_cross_entropy", ("status",), logits=bad, **fields)


def test_random_normal() -> None:
    for first, count in ((0, 1), (1, 1), (3, 100_001), (2**40 + 1, 77_777)):
        compare(
            "mok_random_normal",
            ("out",),
            seed=2**63 + 5,
            stream=0x9E3779B97F4A7C15,
            first=first,
            count=count,
            std=0.02,
            out=poison(count),
        )

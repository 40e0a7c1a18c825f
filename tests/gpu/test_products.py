"""Matrix products and attention: CPU against GPU by bytes."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.twins import CODES, I32, OPERANDS, compare, generator, normal, poison

pytestmark = pytest.mark.gpu
PRECISIONS = ["fp32", "bf16"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (65, 33, 70), (128, 256, 512), (300, 200, 1003), (5, 700, 64)])
@pytest.mark.parametrize("trans", range(4))
def test_product(precision: str, shape: tuple[int, int, int], trans: int) -> None:
    g = generator(21)
    m, n, k = shape
    ta, tb = trans & 1, trans >> 1
    a = normal(g, *((k, m) if ta else (m, k)), dtype=OPERANDS[precision], spread=4)
    b = normal(g, *((n, k) if tb else (k, n)), dtype=OPERANDS[precision], spread=4)
    common = dict(
        precision=CODES[precision],
        trans_a=ta,
        trans_b=tb,
        m=m,
        n=n,
        k=k,
        lda=a.shape[1],
        ldb=b.shape[1],
        ldc=n,
        a=a,
        b=b,
    )
    carried, residual = normal(g, m, n), normal(g, m, n)
    compare("mok_product", ("c",), out_bf16=0, c=poison(m, n), initial=None, addend=None, **common)
    compare("mok_product", ("c",), out_bf16=0, c=carried, initial=carried, addend=None, **common)
    compare("mok_product", ("c",), out_bf16=0, c=residual, initial=None, addend=residual, **common)
    compare("mok_product", ("c",), out_bf16=1, c=poison(m, n, dtype=torch.bfloat16), initial=None, addend=residual, **common)


def offsets_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=I32)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("gather", [False, True])
def test_grouped_by_rows(precision: str, trans_b: int, gather: bool) -> None:
    g = generator(22)
    offsets = offsets_of([0, 130, 1, 0, 64, 300, 17])
    rows, n, k = 600, 96, 200
    a = normal(g, 90 if gather else rows, k, dtype=OPERANDS[precision])
    b = normal(g, 7, *((n, k) if trans_b else (k, n)), dtype=OPERANDS[precision])
    index = torch.randint(-1, 90, (rows,), generator=g, dtype=I32) if gather else None
    for out_bf16, dtype in ((0, torch.float32), (1, torch.bfloat16)):
        compare(
            "mok_grouped_product_by_rows",
            ("c",),
            precision=CODES[precision],
            out_bf16=out_bf16,
            trans_b=trans_b,
            groups=7,
            m=rows,
            n=n,
            k=k,
            row_offsets=offsets,
            a_rows=index,
            b_rows=None,
            a=a,
            b=b,
            c=poison(rows, n, dtype=dtype),
            initial=None,
        )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("gather", range(4))
def test_grouped_by_depth(precision: str, gather: int) -> None:
    g = generator(23)
    offsets = offsets_of([0, 128, 16, 0, 64, 304, 32])
    rows, m, n = 600, 72, 200
    a, b = normal(g, rows, m, dtype=OPERANDS[precision]), normal(g, rows, n, dtype=OPERANDS[precision])
    index = [torch.randint(-1, rows, (rows,), generator=g, dtype=I32) if gather >> i & 1 else None for i in range(2)]
    carried = normal(g, 7, m, n)
    common = dict(
        precision=CODES[precision],
        out_bf16=0,
        trans_b=0,
        groups=7,
        m=m,
        n=n,
        k=rows,
        row_offsets=offsets,
        a_rows=index[0],
        b_rows=index[1],
        a=a,
        b=b,
    )
    compare("mok_grouped_product_by_depth", ("c",), c=poison(7, m, n), initial=None, **common)
    compare("mok_grouped_product_by_depth", ("c",), c=carried, initial=carried, **common)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("sequences", "length", "heads", "kv_heads", "size"),
    [(1, 1, 1, 1, 1), (3, 17, 4, 2, 10), (2, 100, 3, 1, 64), (1, 300, 8, 2, 128), (2, 129, 2, 2, 48), (1, 700, 4, 4, 128)],
)
def test_attention(precision: str, sequences: int, length: int, heads: int, kv_heads: int, size: int) -> None:
    g = generator(24)
    dtype, tokens = OPERANDS[precision], sequences * length
    qkv = dict(
        q=normal(g, tokens, heads * size, dtype=dtype),
        k=normal(g, tokens, kv_heads * size, dtype=dtype),
        v=normal(g, tokens, kv_heads * size + 24, dtype=dtype),
    )
    common = dict(
        precision=CODES[precision],
        sequences=sequences,
        length=length,
        heads=heads,
        kv_heads=kv_heads,
        head_size=size,
        ld_v=kv_heads * size + 24,
        scale=size**-0.5,
        **qkv,
    )
    found = compare(
        "mok_attention_forward",
        ("out", "row_max", "row_recip"),
        out=poison(tokens, heads * size, dtype=dtype),
        row_max=poison(tokens, heads),
        row_recip=poison(tokens, heads),
        **common,
    )
    compare(
        "mok_attention_backward",
        ("grad_q", "grad_k", "grad_v"),
        ld_grad_v=kv_heads * size + 8,
        **found,
        grad_out=normal(g, tokens, heads * size, dtype=dtype),
        grad_q=poison(tokens, heads * size),
        grad_k=poison(tokens, kv_heads * size),
        grad_v=poison(tokens, kv_heads * size + 8, dtype=dtype),
        **common,
    )

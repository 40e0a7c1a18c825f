"""Products of the CPU library: tensor-core bits in bf16, those of a plain chain in fp32, on all instruction sets and tiles."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mok_service.errors import KernelError
from mok_service.kernels import abi
from mok_service.kernels.native import NativeBackend
from tests.kernels.moe_harness import apart, assert_same_bits
from tests.kernels.product_definition import bf16_matrix, chain_product, tensor_core_product

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
# threads, instruction set, tile limit (0: full tiles)
VARIANTS = (
    (1, "auto", 0),
    (2, "avx512", 0),
    (7, "avx512", 2),
    (3, "avx2", 0),
    (2, "avx2", 3),
    (2, "portable", 0),
    (1, "portable", 11),
)


@lru_cache
def backends() -> dict[str, NativeBackend]:
    """The variants that this processor can run."""
    found = {}
    for threads, isa, tile_limit in VARIANTS:
        try:
            found[f"{threads} threads, {isa}, tile limit {tile_limit}"] = NativeBackend(
                "cpu", threads=threads, isa=isa, tile_limit=tile_limit
            )
        except KernelError as error:
            if error.detail.get("status") != abi.UNSUPPORTED:
                raise
    return found


def plain() -> NativeBackend:
    return next(iter(backends().values()))


def same_bits(got: Tensor, expected: Tensor, what: str) -> None:
    """bfloat16 and float32 tensors compared by bytes."""
    integer = {torch.bfloat16: torch.int16, torch.float32: torch.float32}[got.dtype]
    assert got.dtype == expected.dtype
    assert_same_bits(got.contiguous().view(integer).numpy(), expected.contiguous().view(integer).numpy(), what)


def operand(rng: np.random.Generator, precision: str, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)).to(PRECISIONS[precision])


def reference(a: Tensor, b: Tensor, initial: Tensor | None = None) -> Tensor:
    if a.dtype == torch.bfloat16:
        return tensor_core_product(a, b, initial)
    return torch.from_numpy(chain_product(a.numpy(), b.numpy(), None if initial is None else initial.numpy()))


# ---- bf16 against the model


# kind of A, kind of B, rows, columns, depth: 10.5 million outputs together
MODEL_CASES = [
    ("raw", "raw", 1024, 1024, 16),
    ("finite", "finite", 1024, 1024, 16),
    ("subnormal", "subnormal", 768, 1024, 16),
    ("small", "small", 1024, 1024, 16),
    ("special", "special", 1024, 1024, 16),
    ("normal", "normal", 1024, 1024, 16),
    ("wide", "wide", 1024, 1024, 16),
    ("softmax", "normal", 512, 1024, 16),
    *((kind, kind, 512, 512, k) for kind in ("normal", "wide", "finite") for k in (1, 2, 7, 15)),
    *((kind, "normal", 512, 256, k) for kind in ("softmax", "wide", "normal") for k in (17, 31, 40)),
    ("blocks", "blocks", 384, 384, 80),
    ("blocks", "normal", 256, 256, 80),
    ("softmax", "wide", 192, 128, 256),
    ("wide", "wide", 192, 128, 257),
    ("normal", "normal", 64, 128, 2049),
    ("wide", "normal", 64, 64, 4096),
]


def test_there_are_ten_million_outputs() -> None:
    assert sum(m * n for _, _, m, n, _ in MODEL_CASES) >= 10_000_000
    assert {1, 4096} <= {k for *_, k in MODEL_CASES}


@pytest.mark.parametrize("case", MODEL_CASES, ids=lambda case: "-".join(map(str, case)))
def test_bf16_product_has_the_bits_of_the_tensor_core_model(case: tuple[str, str, int, int, int]) -> None:
    kind_a, kind_b, m, n, k = case
    rng = np.random.default_rng(m + n + k)
    a, b = bf16_matrix(rng, kind_a, (m, k)), bf16_matrix(rng, kind_b, (k, n))
    expected = tensor_core_product(a, b)
    for name, backend in backends().items():
        same_bits(backend.matmul(a, b), expected, f"{case} with {name}")


@pytest.mark.parametrize("kind", ["normal", "wide", "finite", "special"])
def test_bf16_chain_goes_on_from_any_accumulator(kind: str) -> None:
    rng = np.random.default_rng(5)
    a, b = bf16_matrix(rng, kind, (192, 48)), bf16_matrix(rng, kind, (48, 200))
    patterns = rng.integers(0, 1 << 32, (192, 200), dtype=np.uint64).astype(np.uint32)
    patterns[:64] &= 0x807FFFFF  # subnormal
    patterns[64:128] = patterns[64:128] & 0x83FFFFFF | 0x3C000000  # near 1
    initial = torch.from_numpy(patterns.view(np.float32))
    expected = tensor_core_product(a, b, initial)
    for name, backend in backends().items():
        same_bits(backend.matmul(a, b, initial=initial, out=torch.empty(192, 200)), expected, f"{kind} with {name}")


def test_significands_of_all_ones_overflow_nothing() -> None:
    """32-bit sums of a block overflow if every significand is 0xFF: the kernels must notice."""
    rng = np.random.default_rng(6)
    a = torch.from_numpy(np.where(rng.random((64, 64)) < 0.1, 0x3FFE, 0x3FFF).astype(np.int16)).view(torch.bfloat16)
    b = torch.full((64, 96), 0x3FFF, dtype=torch.int16).view(torch.bfloat16)
    expected = tensor_core_product(a, b)
    for name, backend in backends().items():
        same_bits(backend.matmul(a, b), expected, name)
        same_bits(backend.matmul(-a, b), -expected, name)


def test_elements_far_below_the_largest_are_not_lost() -> None:
    """Products 250 binades below those that the matrices could have, alone in a sum: the large elements meet zeros."""
    a, b = torch.zeros(3, 32), torch.zeros(32, 5)
    a[:, :16], b[:16] = 2.0**-66, 2.0**-81
    a[:, 16], b[17] = 2.0**60, 2.0**45
    for name, backend in backends().items():
        out = backend.matmul(a.bfloat16(), b.bfloat16())
        assert out.eq(2.0**-143).all(), f"{out} with {name}"
        kept = backend.matmul(a.bfloat16(), b.bfloat16(), initial=torch.full((3, 5), 2.0**-149), out=torch.empty(3, 5))
        assert kept.eq(2.0**-143 + 2.0**-149).all(), f"{kept} with {name}"


def test_probe_of_the_tensor_core_rule() -> None:
    """The one-line probe: -0.75 on Hopper and Blackwell, -0.5 on Ampere, -0.875 with fp32 fma."""
    a = torch.tensor([[-8192, -0.5, -0.25, -0.125]]).bfloat16()
    b = torch.tensor([[1024], [1], [1], [1]]).bfloat16()
    for backend in backends().values():
        out = torch.full((1, 1), 2.0**23)
        assert backend.matmul(a, b, initial=out, out=out).item() == -0.75
        assert backend.matmul(a.float(), b.float(), initial=torch.full((1, 1), 2.0**23), out=out).item() == -0.875


# ---- both precisions against a second writing


def dense_case(rng: np.random.Generator, precision: str) -> dict[str, Any]:
    sizes = [0, 1, 2, 3, 5, 12, 15, 16, 17, 33, 64, 65, 97, 130]
    m, n = (int(rng.choice(sizes)) for _ in range(2))
    k = int(rng.choice([*sizes, 257, 300]))
    a, b = operand(rng, precision, (m, k)), operand(rng, precision, (k, n))
    return {"a": a, "b": b, "scale": 2.0 ** int(rng.integers(-20, 20)), "gaps": rng.integers(0, 9, 3), "mode": rng.integers(0, 6)}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("seed", range(40))
def test_dense_product_of_any_shape(precision: str, seed: int) -> None:
    """Every transposition, rows apart, initial values and addends in place or not, fp32 and bf16 output: equal to the definition
    and untouched between the rows."""
    rng = np.random.default_rng(seed)
    case = dense_case(rng, precision)
    a, b, (gap_a, gap_b, gap_c) = case["a"] * case["scale"], case["b"], case["gaps"]
    m, n = a.shape[0], b.shape[1]
    extra = torch.from_numpy(rng.standard_normal((m, n), dtype=np.float32))
    mode = ("none", "initial", "in place", "addend", "addend in place", "bf16")[case["mode"]]
    chain = reference(a, b, extra if mode in ("initial", "in place") else None)
    expected = extra + chain if mode.startswith("addend") else chain.bfloat16() if mode == "bf16" else chain
    for name, backend in backends().items():
        trans_a, trans_b = bool(rng.integers(2)), bool(rng.integers(2))
        left = apart(a.t().contiguous() if trans_a else a, int(gap_a))
        right = apart(b.t().contiguous() if trans_b else b, int(gap_b))
        out = apart(extra if mode.endswith("in place") else torch.full((m, n), torch.nan), int(gap_c))
        extras: dict[str, Any] = {}
        if mode == "bf16":
            out = apart(torch.full((m, n), torch.nan, dtype=torch.bfloat16), int(gap_c))
        elif mode != "none":
            extras["addend" if mode.startswith("addend") else "initial"] = out if "in place" in mode else apart(extra, int(gap_c))
        backend.matmul(left, right, trans_a=trans_a, trans_b=trans_b, out=out, **extras)
        what = f"{precision} {m}x{n}x{a.shape[1]} {mode} {trans_a=} {trans_b=} with {name}"
        same_bits(out, expected, what)
        whole = out.as_strided((m, n + int(gap_c)), (n + int(gap_c), 1)) if m else out
        assert whole[:, n:].isnan().all(), f"{what}: wrote between the rows"


def offsets_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)


def gathered_rows(source: Tensor, rows: Tensor | None) -> Tensor:
    """source[rows], a row of zeros for -1."""
    if rows is None:
        return source
    return torch.cat([source, torch.zeros(1, source.shape[1], dtype=source.dtype)])[rows.long()]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("counts", [[3, 0, 50, 17, 1], [0, 0], [], [130]], ids=str)
def test_grouped_product_by_rows(precision: str, trans_b: bool, gather: bool, counts: list[int]) -> None:
    rng = np.random.default_rng(len(counts))
    offsets, n, k = offsets_of(counts), 9 if counts == [130] else 70, 45
    total = int(offsets[-1])
    a = operand(rng, precision, (max(total, 1), k))
    b = operand(rng, precision, (len(counts), n, k) if trans_b else (len(counts), k, n))
    rows = torch.from_numpy(rng.integers(-1, a.shape[0], total + 5).astype(np.int32)) if gather else None
    gathered = gathered_rows(a, rows)
    expected = torch.full((total + 5, n), torch.nan)
    for g in range(len(counts)):
        first, last = int(offsets[g]), int(offsets[g + 1])
        expected[first:last] = reference(gathered[first:last], b[g].t() if trans_b else b[g])
    for name, backend in backends().items():
        out = torch.full((total + 5, n), torch.nan)
        backend.grouped_matmul_rows(a, b, offsets, out, trans_b=trans_b, a_rows=rows)
        same_bits(out, expected, f"{precision} {trans_b=} {gather=} with {name}")
        rounded = torch.full((total + 5, n), torch.nan, dtype=torch.bfloat16)
        backend.grouped_matmul_rows(a, b, offsets, rounded, trans_b=trans_b, a_rows=rows)
        same_bits(rounded[:total], expected[:total].bfloat16(), f"bf16 output, {precision} {trans_b=} {gather=} with {name}")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("counts", [[48, 0, 16, 160], [0], [], [304]], ids=str)
def test_grouped_product_by_depth_and_its_carried_chain(precision: str, gather: bool, counts: list[int]) -> None:
    """The gradient of all rows equals that of two calls that carry the chain, and rows of zeros change nothing."""
    rng = np.random.default_rng(3)
    offsets, m, n = offsets_of(counts), 37, 70
    total = int(offsets[-1])
    source = total + 3
    a, b = operand(rng, precision, (source, m)), operand(rng, precision, (source, n))
    a_rows, b_rows = ((torch.from_numpy(rng.integers(-1, source, total).astype(np.int32)) if gather else None) for _ in range(2))
    a_seen, b_seen = gathered_rows(a, a_rows), gathered_rows(b, b_rows)
    start = torch.from_numpy(rng.standard_normal((len(counts), m, n), dtype=np.float32))
    runs = [slice(int(offsets[g]), int(offsets[g + 1])) for g in range(len(counts))]
    expected = torch.stack([reference(a_seen[run].t(), b_seen[run], start[g]) for g, run in enumerate(runs)]) if counts else start
    for name, backend in backends().items():
        out = start.clone()
        backend.grouped_matmul_depth(a, b, offsets, out, a_rows=a_rows, b_rows=b_rows, initial=out)
        same_bits(out, expected, f"{precision} {gather=} with {name}")
        if gather or not counts:
            continue
        out = start.clone()
        for begin, end in ((0, 16), (16, max(counts))):  # the same rows in two calls
            cut = [slice(min(run.start + begin, run.stop), min(run.start + end, run.stop)) for run in runs]
            parts = offsets_of([part.stop - part.start for part in cut])
            pieces = [torch.cat([x[part] for part in cut]) for x in (a, b)]
            backend.grouped_matmul_depth(pieces[0], pieces[1], parts, out, initial=out)
        same_bits(out, expected, f"two calls, {precision} with {name}")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_large_products_cross_every_block(precision: str) -> None:
    """More depth, rows and packed columns than a block of the library holds."""
    rng = np.random.default_rng(8)
    m, n, k = 151, 150, 2100
    a, b = operand(rng, precision, (m, k)), operand(rng, precision, (k, n))
    wide = operand(rng, precision, (k, 3200))
    wide[:, :n] = b
    first = plain().matmul(a, b)
    some = slice(0, m, 30)
    same_bits(first[some, :20], reference(a[some].contiguous(), b[:, :20].contiguous()), f"{precision}, some rows and columns")
    left, right = a.t().contiguous(), b.t().contiguous()
    for name, backend in backends().items():
        same_bits(backend.matmul(left, right, trans_a=True, trans_b=True), first, f"{precision} with {name}")
        same_bits(backend.matmul(a[:3], wide)[:, :n], first[:3], f"{precision}, wide, with {name}")


# ---- values that are not numbers, zeros


@pytest.mark.parametrize("precision", PRECISIONS)
def test_nan_is_canonical_and_zero_is_positive(precision: str) -> None:
    a = torch.tensor([[torch.nan, 1.0], [0.0, -0.0], [torch.inf, 1.0]]).to(PRECISIONS[precision])
    b = torch.tensor([[1.0, 0.0], [-0.0, 0.0]]).to(PRECISIONS[precision])
    initial = torch.tensor([[0.0, 0.0], [-0.0, -0.0], [0.0, 0.0]])
    for name, backend in backends().items():
        bits = backend.matmul(a, b, initial=initial, out=torch.empty(3, 2)).view(torch.int32)
        assert bits.tolist() == [[0x7FFFFFFF, 0x7FFFFFFF], [0, 0], [0x7F800000, 0x7FFFFFFF]], name
        empty = backend.matmul(a[:, :0], b[:0], initial=initial - 0.0, out=torch.empty(3, 2))
        assert empty.view(torch.int32).eq(0).all(), f"no depth: + 0.0f, with {name}"


def test_nan_with_another_payload_is_canonical_in_fp32() -> None:
    patterns = np.array([[0x7F800001, 0x3F800000]], np.uint32).view(np.float32)
    for backend in backends().values():
        out = backend.matmul(torch.from_numpy(patterns), torch.ones(2, 1))
        assert out.view(torch.int32).item() == 0x7FFFFFFF


# ---- mistakes


def product_fields(**changes: Any) -> dict[str, Any]:
    x = torch.ones(4, 4)
    fields = dict(precision=0, out_bf16=0, trans_a=0, trans_b=0, m=4, n=4, k=4, lda=4, ldb=4, ldc=4, a=x, b=x, c=x.clone())
    return fields | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": 2}, "precision is 2; allowed: 0"),
        ({"out_bf16": 7}, "out_bf16 is 7; allowed: 0, 1"),
        ({"trans_a": -1}, "trans_a is -1; allowed"),
        ({"m": -1}, "m is -1; allowed: 0 to"),
        ({"k": 1 << 40}, "k is 1099511627776; allowed: 0 to"),
        ({"lda": 3}, "lda is 3; allowed: 4 or more"),
        ({"trans_b": 1, "ldb": 2}, "ldb is 2; allowed: 4 or more"),
        ({"ldc": 1}, "ldc is 1; allowed: 4 or more"),
        ({"a": None}, "a is NULL"),
        ({"c": None}, "c is NULL"),
    ],
)
def test_mistakes_in_a_product_are_named(changes: dict[str, Any], message: str) -> None:
    fields = product_fields(**changes)
    before = None if fields["c"] is None else fields["c"].clone()
    with pytest.raises(KernelError, match=r"mok_product.*\(csrc/cpu/.*:\d+\)") as caught:
        plain().call("mok_product", **fields)
    assert message in str(caught.value)
    assert caught.value.detail["status"] == abi.INVALID
    assert before is None or torch.equal(before, fields["c"])


def test_output_in_bf16_may_not_be_the_initial_value() -> None:
    out = torch.ones(4, 4)
    with pytest.raises(KernelError, match="c is initial or addend with out_bf16 = 1"):
        plain().call("mok_product", **product_fields(out_bf16=1, c=out, initial=out))


@pytest.mark.parametrize(
    ("offsets", "rows", "message"),
    [
        ([0, 16, 8], None, r"row_offsets\[2\] is 8"),
        ([0, 16, 48], None, r"row_offsets\[2\] is 48; allowed: multiples of 16 from 16 to 32"),
        ([0, 7, 32], None, r"row_offsets\[1\] is 7; allowed: multiples of 16"),
        ([0, 16, 32], [-2] * 32, r"a_rows\[0\] is -2; allowed: -1"),
    ],
)
def test_mistakes_in_a_grouped_product_are_named(offsets: list[int], rows: list[int] | None, message: str) -> None:
    a, b, out = torch.ones(32, 3), torch.ones(32, 5), torch.zeros(2, 3, 5)
    gather = None if rows is None else torch.tensor(rows, dtype=torch.int32)
    with pytest.raises(KernelError, match=message):
        plain().grouped_matmul_depth(a, b, torch.tensor(offsets, dtype=torch.int32), out, a_rows=gather)
    assert not out.any()


# ---- elementwise neighbours


def test_add_and_conversion_for_every_kind_of_float() -> None:
    patterns = np.random.default_rng(9).integers(0, 1 << 32, (2, 100_003), dtype=np.uint64).astype(np.uint32)
    a, b = torch.from_numpy(patterns.view(np.float32))
    sums = (a.double() + b.double()).float()  # exact before one rounding or beyond 53 bits by less than half a unit's change
    numbers = ~sums.isnan() & ((a.abs() / b.abs()).log2().abs() < 28)
    bits = patterns[0].astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    rounded[(bits & 0x7FFFFFFF) > 0x7F800000] = 0x7FFF
    for name, backend in backends().items():
        total = backend.add(a, b)
        same_bits(total[numbers], sums[numbers], name)
        assert (total[total.isnan()].view(torch.int32) == 0x7FFFFFFF).all(), name
        assert (backend.to_operand(a, "bf16").view(torch.int16).numpy().view(np.uint16) == rounded).all(), name

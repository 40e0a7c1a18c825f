"""Random streams: published Philox vectors, normal deviates, permutations, the rotary table."""

from __future__ import annotations

import hashlib
from typing import Any

import mpmath  # type: ignore[import-untyped]
import numpy as np
import pytest
import torch

from mok_service.errors import KernelError
from mok_service.kernels.native import NativeBackend, stream_number
from tests.kernels import functions_definition as definition
from tests.kernels.moe_harness import Results, array, assert_all_backends, assert_same_bits, backends, blank, plain

ALL_ONES = 0xFFFFFFFF

# Random123, tests/kat_vectors: philox4x32 with 10 rounds (counter, key, output)
PUBLISHED = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox(key: tuple[int, ...], counter: tuple[int, ...]) -> tuple[int, ...]:
    struct = plain().call("mok_philox", key=key, counter=counter)
    return tuple(struct.out)


@pytest.mark.parametrize(("counter", "key", "expected"), PUBLISHED)
def test_published_vectors(counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert philox(key, counter) == expected
    assert definition.philox(key, counter) == expected


def test_philox_at_random() -> None:
    rng = np.random.default_rng(9)
    for _ in range(200):
        k0, k1, c0, c1, c2, c3 = (int(w) for w in rng.integers(0, 2**32, 6))
        assert philox((k0, k1), (c0, c1, c2, c3)) == definition.philox((k0, k1), (c0, c1, c2, c3))


# ---- normal deviates


def draw(backend: NativeBackend, seed: int, stream: int, first: int, count: int, std: float = 1.0) -> Any:
    out = blank(count)
    backend.call("mok_random_normal", seed=seed, stream=stream, first=first, count=count, std=std, out=out)
    return array(out)


@pytest.mark.parametrize(
    ("seed", "first", "count"), [(0, 0, 1), (1, 1, 1), (2, 3, 2), (2**64 - 1, 2**40 + 1, 99), (7, 0, 600), (8, 2**62, 30)]
)
def test_normal_has_the_bits_of_the_page(seed: int, first: int, count: int) -> None:
    stream = stream_number("init/layers.0.router.weight")
    exact = [0.02 * definition.normal(seed, stream, i) for i in range(first, first + count)]
    expected = np.array(exact, np.float64).astype(np.float32)
    assert_all_backends(lambda b: {"out": draw(b, seed, stream, first, count, 0.02)}, {"out": expected})


def test_normal_does_not_depend_on_how_it_is_cut() -> None:
    whole = draw(plain(), 5, 6, 0, 40001)

    def run(backend: NativeBackend) -> Results:
        parts = [draw(backend, 5, 6, first, min(777, 40001 - first)) for first in range(0, 40001, 777)]
        return {"whole": draw(backend, 5, 6, 0, 40001), "parts": np.concatenate(parts)}

    assert_all_backends(run, {"whole": whole, "parts": whole})


def test_normal_is_normal() -> None:
    """Moments of 2^20 draws within 5 standard errors; quantiles (Kolmogorov) at 1.95/sqrt(n): chance below 1e-3, but the seed is
    fixed.
    """
    n = 2**20
    x = np.sort(draw(plain(), 11, 12, 0, n).astype(np.float64))
    assert abs(x.mean()) < 5 / np.sqrt(n)
    assert abs((x**2).mean() - 1) < 5 * np.sqrt(2 / n)
    assert abs((x**3).mean()) < 5 * np.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < 5 * np.sqrt(96 / n)
    cdf = torch.special.ndtr(torch.from_numpy(x)).numpy()
    assert np.abs(cdf - (np.arange(n) + 0.5) / n).max() < 1.95 / np.sqrt(n)
    pairs = draw(plain(), 11, 12, 0, n).reshape(-1, 2).astype(np.float64)
    assert abs((pairs[:, 0] * pairs[:, 1]).mean()) < 5 / np.sqrt(n / 2)


def test_streams_and_seeds_differ() -> None:
    draws = [draw(plain(), seed, stream, 0, 64) for seed in (0, 1, 2**32) for stream in (0, 1, 2**32)]
    assert len({d.tobytes() for d in draws}) == 9


def test_the_number_of_a_stream() -> None:
    assert stream_number("order/0") == int.from_bytes(hashlib.sha256(b"order/0").digest()[:8], "little")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"first": -1}, "first and count are -1 and 4; allowed"),
        ({"first": 2**63 - 3}, "allowed: 0 or more, with a sum below"),
        ({"std": -1.0}, "std is -1; allowed: a finite number, 0 or more"),
        ({"std": float("nan")}, "std is nan; allowed"),
        ({"out": None}, "args->out is NULL"),
    ],
)
def test_normal_refuses(changed: dict[str, Any], message: str) -> None:
    out = blank(4)
    with pytest.raises(KernelError, match=message):
        plain().call("mok_random_normal", **{"seed": 0, "stream": 0, "first": 0, "count": 4, "std": 1.0, "out": out, **changed})
    assert out.isnan().all()


# ---- permutations


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 15, 16, 17, 64, 65, 1000, 4097])
def test_permutation(n: int) -> None:
    stream = stream_number("order/3")
    got = plain().permutation(42, "order/3", n, 0, n)
    assert sorted(got) == list(range(n))
    some = range(0, n, max(1, n // 50))
    assert [got[i] for i in some] == [definition.permute(42, stream, n, i) for i in some]
    for variant, backend in backends().items():
        assert backend.permutation(42, "order/3", n, n // 3, n - n // 3) == got[n // 3 :], variant


@pytest.mark.parametrize("n", [2**20 + 1, 2**32, 2**48 - 1, 2**48])
def test_permutation_of_large_domains(n: int) -> None:
    stream = stream_number("order/0")
    got = plain().permutation(2**64 - 1, "order/0", n, n - 20, 20)
    assert got == [definition.permute(2**64 - 1, stream, n, i) for i in range(n - 20, n)]
    assert len(set(got)) == 20 and all(0 <= i < n for i in got)


def test_permutations_are_even() -> None:
    """Where each of 5 elements lands over 4000 seeds: chi-squared, 16 degrees of freedom, below the 0.999 quantile."""
    counts = np.zeros((5, 5))
    for seed in range(4000):
        for i, at in enumerate(plain().permutation(seed, "order/0", 5, 0, 5)):
            counts[i, at] += 1
    assert ((counts - 800) ** 2 / 800).sum() < 39.3
    assert len({tuple(plain().permutation(seed, "order/0", 3, 0, 3)) for seed in range(200)}) == 6


@pytest.mark.parametrize(
    ("n", "first", "count", "message"),
    [
        (0, 0, 0, "n is 0; allowed: 1 to 281474976710656"),
        (2**48 + 1, 0, 1, "n is 281474976710657; allowed: 1 to 281474976710656"),
        (5, 6, 0, "first is 6; allowed: 0 to 5"),
        (5, 3, 3, "count is 3; allowed: 0 to 2"),
    ],
)
def test_permutation_refuses(n: int, first: int, count: int, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        plain().permutation(0, "order/0", n, first, count)


# ---- the rotary table


@pytest.mark.parametrize(("positions", "head_size", "base"), [(5, 2, 1e4), (40, 6, 1e6), (3, 128, 1e4), (1, 4, 1.0)])
def test_rope_table(positions: int, head_size: int, base: float) -> None:
    expected = definition.rope_table(range(positions), head_size, base)
    assert_all_backends(lambda b: {"table": array(b.rope_table(positions, head_size, base))}, {"table": expected})


def test_rope_table_is_exact_far_out() -> None:
    """131,072 positions: the largest error of sampled entries is below 0.51 units in the last place of an fp32 number near 1."""
    positions, head_size, base = 131072, 8, 1e6
    table = array(plain().rope_table(positions, head_size, base)).astype(np.float64)
    rng = np.random.default_rng(10)
    with mpmath.workprec(120):
        for position, i in zip(rng.integers(0, positions, 300), rng.integers(0, 4, 300), strict=True):
            angle = int(position) * mpmath.power(base, -mpmath.mpf(2 * int(i)) / head_size)
            for column, exact in ((i, mpmath.cos(angle)), (i + 4, mpmath.sin(angle))):
                assert abs(table[position, column] - exact) <= 0.51 * 2.0**-24


def test_rope_table_cut_differently() -> None:
    short, long = (array(plain().rope_table(n, 64, 1e4)) for n in (100, 3000))
    assert_same_bits(long[:100], short, "the first 100 positions")


@pytest.mark.parametrize(
    ("positions", "head_size", "base", "message"),
    [
        (-1, 4, 1e4, "positions is -1; allowed: 0 to"),
        (1, 0, 1e4, "head_size is 0; allowed: 2 to"),
        (1, 5, 1e4, "head_size is 5; allowed: an even number"),
        (1, 4, 0.5, "base is 0.5; allowed: 1 or more, finite"),
    ],
)
def test_rope_table_refuses(positions: int, head_size: int, base: float, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        plain().call("mok_rope_table", positions=positions, head_size=head_size, base=base, cos_sin=torch.zeros(64))

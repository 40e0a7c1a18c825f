"""Contexts of the CPU library: options, the floating-point environment, callers side by side, memory that runs out, symbols."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mok_service.errors import KernelError
from mok_service.kernels import abi
from mok_service.kernels.library import library_path
from mok_service.kernels.native import NativeBackend


def test_context_says_what_runs() -> None:
    info = NativeBackend("cpu", threads=3, isa="portable", tile_limit=2).info()
    assert info["context"] == {"backend": "cpu", "isa": "portable", "threads": 3, "tile_limit": 2}
    assert info["build"]["arithmetic"] == abi.ARITHMETIC
    assert "portable" in info["build"]["instruction_sets"]
    automatic = NativeBackend("cpu").info()["context"]
    assert automatic["threads"] >= 1
    assert automatic["isa"] in info["build"]["instruction_sets"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": -1}, "threads is -1; allowed: 0"),
        ({"threads": 5000}, "allowed: 0 .* to 1024"),
        ({"tile_limit": -2}, "tile_limit is -2"),
    ],
)
def test_wrong_options_are_named(options: dict[str, int], message: str) -> None:
    with pytest.raises(KernelError, match=message) as caught:
        NativeBackend("cpu", **options)  # type: ignore[arg-type]
    assert caught.value.detail["status"] == abi.INVALID


def test_flush_to_zero_of_the_caller_changes_nothing_and_stays() -> None:
    """Subnormals are kept whatever the caller's thread has set, and its setting is there again afterwards."""
    small = torch.full((4, 4), 2.0**-140)
    backends = [NativeBackend("cpu", threads=threads) for threads in (1, 3)]
    assert torch.set_flush_denormal(True)
    try:
        sums = [backend.add(small, small) for backend in backends]
        products = [backend.matmul(small, torch.eye(4)) for backend in backends]
        rounded = [
            backend.matmul(torch.full((4, 16), 2.0**-70).bfloat16(), torch.full((16, 4), 2.0**-75).bfloat16())
            for backend in backends
        ]
        still_set = (small * 1.0).view(torch.int32).eq(0).all()
    finally:
        torch.set_flush_denormal(False)
    assert still_set
    for values, expected in ((sums, 2.0**-139), (products, 2.0**-140), (rounded, 2.0**-141)):
        for value in values:
            assert value.eq(expected).all()


def test_callers_of_one_context_wait_for_each_other() -> None:
    backend = NativeBackend("cpu", threads=2)
    generator = torch.Generator().manual_seed(1)
    pairs = [(torch.randn(60, 70, generator=generator), torch.randn(70, 50, generator=generator)) for _ in range(40)]
    expected = [backend.matmul(a, b) for a, b in pairs]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda pair: backend.matmul(*pair), pairs))
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def test_memory_that_runs_out_is_an_error_and_writes_nothing() -> None:
    program = """
import resource, torch
from mok_service.errors import KernelError
from mok_service.kernels import abi
from mok_service.kernels.native import NativeBackend
backend = NativeBackend("cpu", threads=2)
a, out = torch.ones(1500, 1500).bfloat16(), torch.full((1500, 1500), 7.0)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), resource.RLIM_INFINITY))
try:
    backend.matmul(a, a, out=out)
except KernelError as error:
    assert error.detail["status"] == abi.OUT_OF_MEMORY, error
    assert "no memory for" in str(error), error
    assert bool((out == 7).all())
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert backend.matmul(a, a, out=out)[0, 0] == 1500
    print("refused, then done")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "refused, then done\n", done.stderr


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm of binutils")
def test_library_exports_its_interface_and_nothing_else() -> None:
    listing = subprocess.run(["nm", "-D", "--defined-only", str(library_path("cpu"))], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in listing.stdout.splitlines()}
    assert set(abi.OPERATIONS) <= names
    assert not [name for name in names if not name.startswith("mok_")]

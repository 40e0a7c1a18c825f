"""What the Python surface refuses, and how it says so: nothing crashes, nothing is half-written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mok_service.errors import KernelError
from mok_service.kernels import load_backend
from mok_service.kernels.library import library_path
from mok_service.kernels.native import NativeBackend, stream_number

BACKEND = load_backend("cpu", threads=2)
BF16 = torch.bfloat16


def z(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: BACKEND.matmul(z(2, 3), z(4, 5)), ValueError, "inner sizes are 3 and 4"),
        (lambda: BACKEND.matmul(z(2, 3), z(3, 4, dtype=BF16)), TypeError, "torch.float32 and torch.bfloat16"),
        (lambda: BACKEND.matmul(z(2, 3).double(), z(3, 4).double()), TypeError, "torch.float64"),
        (lambda: BACKEND.matmul(z(3, 2).T, z(3, 4)), ValueError, r"strides \[1, 2\]"),
        (lambda: BACKEND.matmul(z(2, 3), z(3, 4), out=z(2, 5)), ValueError, r"out has shape \[2, 5\]; allowed: \[2, 4\]"),
        (lambda: BACKEND.add(z(3), z(4)), ValueError, r"b has shape \[4\]; allowed: \[3\]"),
        (lambda: BACKEND.function("tanh", z(3)), KernelError, "tanh"),
        (lambda: BACKEND.scalar("sin", 1.0), KernelError, "sin"),
        (lambda: BACKEND.permutation(0, "s", 5, 3, 4), KernelError, "count"),
        (lambda: BACKEND.embedding(torch.tensor([9], dtype=torch.int32), z(4, 3), z(1, 3)), KernelError, "9"),
        (lambda: NativeBackend("cpu", threads=-1), KernelError, "-1"),
        (lambda: NativeBackend("cpu", isa="sse"), ValueError, "isa = 'sse'; allowed: auto, portable, avx2, avx512"),
        (lambda: load_backend("tpu"), KernelError, "'tpu'"),
    ],
)  # fmt: skip
def test_refusals(call: Callable[[], object], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        call()


def test_a_refusal_names_its_source_line() -> None:
    with pytest.raises(KernelError, match=r"mok_embedding_forward: invalid argument: .*\.cpp:\d+"):
        BACKEND.embedding(torch.tensor([9], dtype=torch.int32), z(4, 3), z(1, 3))


def test_a_refused_call_writes_nothing() -> None:
    out = torch.full((2, 3), 7.0)
    with pytest.raises(KernelError):
        BACKEND.embedding(torch.tensor([1, 9], dtype=torch.int32), z(4, 3), out)
    assert (out == 7.0).all()


def test_no_cuda_library_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOK_CUDA_LIBRARY", "/nowhere/libmok_cuda.so")
    with pytest.raises(KernelError, match=r"the CUDA backend was not built: .*nvcc"):
        library_path("cuda")


def test_out_of_memory_is_an_error() -> None:
    """A product whose packed operands can't be had: a status, not a crash."""
    a = torch.zeros(1, 1).expand(1, 1 << 46)
    with pytest.raises((KernelError, ValueError), match=r"out of memory|strides"):
        BACKEND.matmul(a, a, trans_b=True)


def test_streams_are_sha256_of_their_names() -> None:
    assert stream_number("order/0") == 0xCB362D48313A3F92

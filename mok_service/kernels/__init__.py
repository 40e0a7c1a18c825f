"""Kernel backends: implementations of the arithmetic (docs/arithmetic.md) behind csrc/include/mok.h."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mok_service.kernels.native import NativeBackend


def load_backend(name: str, *, threads: int = 0, isa: str = "auto", device: int = 0) -> NativeBackend:
    """The kernels of one device: `name` is "cpu" or "cuda".

    `threads` (cpu): 0 takes all cores of this process. `isa` (cpu): auto, portable, avx2 or avx512; none of these changes a bit.
    Raises KernelError when the library or the device isn't there.
    """
    from mok_service.kernels.native import NativeBackend

    return NativeBackend(name, threads=threads, isa=isa, device=device)

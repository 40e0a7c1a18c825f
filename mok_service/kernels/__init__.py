"""Kernel backends: implementations of the arithmetic (docs/arithmetic.md) behind csrc/include/mok.h."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from mok_service.kernels.native import NativeBackend


def load_backend(
    name: str,
    *,
    threads: int = 0,
    isa: str = "auto",
    device: int = 0,
    own_stream: bool = False,
    library: Path | None = None,
) -> NativeBackend:
    """The kernels of one device: `name` is "cpu" or "cuda".

    `threads` (cpu): 0 takes all cores of this process. `isa` (cpu): auto, portable, avx2 or avx512; none of these changes a bit.
    `own_stream` (cuda): a stream of its own in place of the default one; a training step is then recorded as a CUDA graph.
    `library`: another build than the installed one, to be compared with it.
    Raises KernelError when the library or the device isn't there.
    """
    from mok_service.kernels.native import NativeBackend

    stream = None
    if own_stream and name == "cuda":
        import torch

        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return NativeBackend(name, threads=threads, isa=isa, device=device, stream=stream, library=library)

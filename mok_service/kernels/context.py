"""One device's context of the native library, and the checks that every operation makes of its tensors."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mok_service.errors import KernelError
from mok_service.kernels import abi
from mok_service.kernels.hashing import Helpers, host_bytes, in_parts
from mok_service.kernels.library import load_library

F32, BF16, I32, I64, U8 = torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8
OPERAND_DTYPES = {"fp32": F32, "bf16": BF16}
CODES = {F32: 0, BF16: 1}
HUGE_PAGE_BYTES = 1 << 21
BeginBlake3 = Callable[[], Callable[[], list[str]]]
_OPERATIONS = abi.OPERATIONS | abi.CUDA_OPERATIONS
_STATUS = {
    abi.INVALID: "invalid argument",
    abi.OUT_OF_MEMORY: "out of memory",
    abi.UNSUPPORTED: "unsupported",
    abi.DEVICE: "device",
    abi.INTERNAL: "internal",
}


def stream_number(name: str) -> int:
    """The 64-bit number of a random stream [14.1]: the low 64 bits, little endian, of SHA-256 of its name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def check(
    tensor: Tensor, name: str, dtype: torch.dtype | tuple[torch.dtype, ...], shape: tuple[int, ...] | None = None
) -> Tensor:
    """`tensor` itself, when it is contiguous and has the dtype and (if given) the shape that an operation needs."""
    allowed = dtype if isinstance(dtype, tuple) else (dtype,)
    if tensor.dtype not in allowed:
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: {', '.join(map(str, allowed))}")
    if shape is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; allowed: {list(shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {list(tensor.stride())}; allowed: contiguous, row-major")
    return tensor


def check_rows(tensor: Tensor, name: str, dtype: torch.dtype, shape: tuple[int, int]) -> int:
    """Like `check` for a 2-D slice whose rows may lie apart; returns the distance of two rows in elements."""
    if tensor.dtype != dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: {dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; allowed: {list(shape)}")
    if tensor.stride(1) != 1 or tensor.stride(0) < shape[1]:
        raise ValueError(f"{name} has strides {list(tensor.stride())}; allowed: [>= {shape[1]}, 1]")
    return int(tensor.stride(0))


def host_zeros(count: int, dtype: torch.dtype) -> Tensor:
    """Zeros, flat, in host memory; what is large is in huge pages where Linux gives them on request: fewer misses of the TLB."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or count * dtype.itemsize < HUGE_PAGE_BYTES:
        return torch.zeros(count, dtype=dtype)
    roomy = torch.empty(count + HUGE_PAGE_BYTES // dtype.itemsize, dtype=dtype)
    start = -roomy.data_ptr() % HUGE_PAGE_BYTES // dtype.itemsize
    flat = roomy[start : start + count]
    size = ctypes.c_size_t(count * dtype.itemsize)
    ctypes.CDLL(None).madvise(ctypes.c_void_p(flat.data_ptr()), size, advice)  # a kernel without huge pages refuses: no harm
    return flat.zero_()


class Context:
    """One device's kernels. `name` is "cpu" or "cuda", `device` the torch device that tensors must be on.

    `place` says in words what the operations to come belong to; only a trace reads it. `rows_are_counted`: the host knows how
    many rows a routing has, where else all that there is room for are passed.
    """

    def __init__(
        self,
        name: str,
        *,
        threads: int = 0,
        isa: str = "auto",
        device: int = 0,
        tile_limit: int = 0,
        stream: torch.cuda.Stream | None = None,
        library: Path | None = None,
    ) -> None:
        """`threads` 0: all cores of this process. `isa`: auto, portable, avx2, avx512. `tile_limit` > 0 shrinks cache
        blocks (tests). `stream` (cuda): where operations are enqueued, None for the default stream; work of torch on the same
        tensors belongs inside `active()`. `library`: another build than the installed one.
        """
        self.name = name
        self.place = ""
        self.rows_are_counted = name == "cpu"
        self._library = load_library(name, library)
        self.device = torch.device("cpu") if name == "cpu" else torch.device("cuda", device)
        if isa not in abi.ISAS:
            raise ValueError(f"isa = {isa!r}; allowed: {', '.join(abi.ISAS)}")
        self.stream = stream
        options = abi.ContextOptions(
            threads=threads,
            isa=abi.ISAS[isa],
            device=device,
            tile_limit=tile_limit,
            stream=None if stream is None else stream.cuda_stream or None,
        )
        self._context = ctypes.c_void_p()
        self._raise(self._library.mok_context_create(ctypes.byref(options), ctypes.byref(self._context)), "mok_context_create")
        self._helpers = Helpers(self.info()["context"]["threads"]) if name == "cpu" else None

    def __del__(self) -> None:
        context = getattr(self, "_context", None)
        if context:
            self._library.mok_context_destroy(context)
            context.value = None

    # ---- plumbing --------------------------------------------------------------------------------------------------------

    def active(self) -> contextlib.AbstractContextManager[object]:
        """Inside it, torch's own work goes to this backend's stream as well."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def info(self) -> dict[str, Any]:
        """What runs: instruction set and threads, or the device's name; and how the library was built."""
        return {
            "backend": self.name,
            "arithmetic": self._library.mok_arithmetic().decode(),
            "context": json.loads(self._library.mok_context_info(self._context)),
            "build": json.loads(self._library.mok_build_info()),
        }

    def _raise(self, status: int, operation: str) -> None:
        if status != abi.OK:
            message = self._library.mok_last_error().decode(errors="replace")
            raise KernelError(f"{operation}: {_STATUS.get(status, status)}: {message}", operation=operation, status=status)

    def call(self, operation: str, **fields: Any) -> Any:
        """Run one operation of mok.h; a tensor stands for its pointer, None for NULL. Returns the struct."""
        struct = _OPERATIONS[operation]()
        for name, value in fields.items():
            if isinstance(value, Tensor):
                if value.device != self.device:
                    raise ValueError(f"{name} is on {value.device}; allowed: {self.device}")
                value = value.data_ptr()
            setattr(struct, name, value)
        self._raise(getattr(self._library, operation)(self._context, ctypes.byref(struct)), operation)
        return struct

    def empty(self, *shape: int, dtype: torch.dtype = F32) -> Tensor:
        """An uninitialised tensor on this backend's device."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def zeros(self, count: int, dtype: torch.dtype = F32) -> Tensor:
        """A flat tensor of zeros on this backend's device, for what is kept from step to step."""
        return host_zeros(count, dtype) if self.name == "cpu" else torch.zeros(count, dtype=dtype, device=self.device)

    def blake3(self, tensors: Sequence[Tensor]) -> list[str]:
        """BLAKE3 (64 hex digits) of each tensor's little-endian, row-major bytes; on a GPU only these 32 bytes come back."""
        return self.prepare_blake3(tensors)()()

    def prepare_blake3(self, tensors: Sequence[Tensor]) -> BeginBlake3:
        """`blake3` of the same tensors again and again: each call begins it for what they hold then, and what it returns gives
        the digests. In between the tensors must stay as they are. On a CPU threads of the lowest priority hash meanwhile, on a
        GPU the hashing is enqueued. Raises ValueError for a tensor that isn't contiguous.
        """
        for tensor in tensors:
            check(tensor, "tensor", tensor.dtype)
        return self._on_host(tensors) if self._helpers is not None else self._on_device(tensors)

    def _on_host(self, tensors: Sequence[Tensor]) -> BeginBlake3:
        assert self._helpers is not None
        helpers, parts = self._helpers, in_parts([host_bytes(tensor) for tensor in tensors])
        return lambda: helpers.begin(parts).result

    def _on_device(self, tensors: Sequence[Tensor]) -> BeginBlake3:
        kept = list(tensors)
        pointers = (ctypes.c_void_p * len(kept))(*(tensor.data_ptr() for tensor in kept))
        lengths = (ctypes.c_int64 * len(kept))(*(tensor.numel() * tensor.element_size() for tensor in kept))

        def begin() -> Callable[[], list[str]]:
            out = self.empty(len(kept), 32, dtype=U8)
            self.call(
                "mok_blake3", count=len(kept), pointers=ctypes.addressof(pointers), lengths=ctypes.addressof(lengths), out=out
            )
            return lambda: [bytes(row).hex() for row in out.tolist()]

        return begin

"""BLAKE3 of tensors in host memory, made by threads beside the one that asks for them, and by that one."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

from mok_service.provenance.digest import blake3_of

LOWEST_PRIORITY: Final = 19  # of Linux: such a thread runs where no other one wants to
HELPED_BYTES_MIN: Final = 1 << 20  # less is hashed before a thread wakes


class Helpers:
    """Threads that hash when nothing else wants their cores. They start at their first work."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, "hash", initializer=_give_way)

    def begin(self, data: Sequence[memoryview]) -> Hashing:
        hashing = Hashing(data)
        if sum(part.nbytes for part in data) >= HELPED_BYTES_MIN:
            for _ in range(self.threads):
                self._pool.submit(hashing.work)
        return hashing


class Hashing:
    """The digests of some tensors. Who asks for the result computes what the helpers haven't; they are never waited for, since a
    thread of the lowest priority may have begun a tensor and not run since.
    """

    def __init__(self, data: Sequence[memoryview]) -> None:
        self._data = data
        self._digests: list[str | None] = [None] * len(data)
        self._next = itertools.count()

    def work(self) -> None:
        """Tensor after tensor that no thread has begun; any number of threads may."""
        while (index := next(self._next)) < len(self._data):
            self._digests[index] = blake3_of(self._data[index]).hex

    def result(self) -> list[str]:
        """The BLAKE3 (64 hex digits) of each tensor. Afterwards the tensors may change: nothing that is read later counts."""
        self.work()
        return [blake3_of(data).hex if found is None else found for data, found in zip(self._data, self._digests, strict=True)]


def host_bytes(tensor: Tensor) -> memoryview:
    """The little-endian, row-major bytes of a tensor in host memory: its own memory where it is contiguous."""
    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def host_blake3(tensor: Tensor) -> str:
    """BLAKE3 (64 hex digits) of the little-endian, row-major bytes of a tensor in host memory."""
    return blake3_of(host_bytes(tensor)).hex


def _give_way() -> None:
    if sys.platform == "linux":  # elsewhere a priority belongs to the whole process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)

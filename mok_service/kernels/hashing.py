"""BLAKE3 of tensors in host memory, made by threads beside the one that asks for them, and by that one."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

import torch
from blake3 import blake3
from torch import Tensor

from mok_service.provenance.digest import blake3_of

LOWEST_PRIORITY: Final = 19  # of Linux: such a thread runs where no other one wants to
HELPED_BYTES_MIN: Final = 1 << 20  # less is hashed before a thread wakes
PART_BYTES: Final = 2 << 20
THREADS_A_HELPER: Final = 8


class Helpers:
    """Threads that hash when nothing else wants their cores. They start at their first work."""

    def __init__(self, threads: int) -> None:
        """`threads`: of the training that they help. They are few: each of their calls needs the interpreter lock, which that
        needs between its operations. One keeps up with the steps of eight threads.
        """
        self._count = -(-threads // THREADS_A_HELPER)
        self._pool = ThreadPoolExecutor(self._count, "hash", initializer=_give_way)

    def begin(self, parts: Sequence[Sequence[memoryview]]) -> Hashing:
        hashing = Hashing(parts)
        if sum(data.nbytes for part in parts for data in part) >= HELPED_BYTES_MIN:
            with suppress(RuntimeError):  # no thread to be had: then without help
                for _ in range(self._count):
                    self._pool.submit(hashing.work)
        return hashing


class Hashing:
    """The digests of some tensors. Who asks for the result computes what the helpers haven't; they are never waited for, since a
    thread of the lowest priority may have begun a part and not run since.
    """

    def __init__(self, parts: Sequence[Sequence[memoryview]]) -> None:
        self._parts = parts
        self._hashed: list[list[Any] | None] = [None] * len(parts)
        self._next = itertools.count()

    def work(self) -> None:
        """Part after part that no thread has begun; any number of threads may."""
        while (index := next(self._next)) < len(self._parts):
            self._hashed[index] = _hash(self._parts[index])

    def result(self) -> list[str]:
        """The BLAKE3 (64 hex digits) of each tensor. Afterwards the tensors may change: nothing that is read later counts."""
        self.work()
        hashed = [_hash(part) if found is None else found for part, found in zip(self._parts, self._hashed, strict=True)]
        return [one.hexdigest() for part in hashed for one in part]


def in_parts(data: Sequence[memoryview]) -> list[list[memoryview]]:
    """Tensors that follow each other, so many that a part is worth a thread's while."""
    parts: list[list[memoryview]] = [[]]
    size = 0
    for one in data:
        if size >= PART_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(one)
        size += one.nbytes
    return parts


def _hash(part: Sequence[memoryview]) -> list[Any]:
    return list(map(blake3, part))  # no line of Python between two tensors: the interpreter lock is held as shortly as can be


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

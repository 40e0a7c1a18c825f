"""Digests: frozen values that carry their algorithm, and the digest of a state made of named tensors.

Nothing here knows torch: a tensor is its name, dtype, shape and the BLAKE3 of its little-endian, row-major bytes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from blake3 import blake3

from mok_service.provenance.canonical import canonical_bytes

Algorithm = Literal["sha256", "blake3"]
STATE_TYPE = "mok.state/v1"
_TEXT = re.compile(r"(sha256|blake3):([0-9a-f]{64})")


@dataclass(frozen=True, slots=True, order=True)
class Digest:
    """32 bytes and the name of the hash function that made them; prints as `sha256:<64 hex digits>`."""

    algorithm: Algorithm
    hex: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """The inverse of `str`. Raises ValueError on anything else."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"not a digest: {text!r}; allowed: sha256: or blake3: and 64 lowercase hex digits")
        return cls(match[1], match[2])  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.hex}"


def sha256(data: bytes | bytearray | memoryview) -> Digest:
    """SHA-256 of bytes."""
    return Digest("sha256", hashlib.sha256(data).hexdigest())


def sha256_file(path: Path) -> Digest:
    """SHA-256 of a file's bytes, read in pieces."""
    with path.open("rb") as file:
        return Digest("sha256", hashlib.file_digest(file, "sha256").hexdigest())


def blake3_of(data: bytes | bytearray | memoryview, threads: int = 1) -> Digest:
    """BLAKE3 of a contiguous buffer of bytes, equal to what `b3sum` prints for a file that holds them."""
    return Digest("blake3", blake3(data, max_threads=threads).hexdigest())


def canonical_digest(value: Mapping[str, Any]) -> Digest:
    """SHA-256 of a value's canonical JSON (RFC 8785). `value["type"]` is the domain tag."""
    assert "type" in value, "a digested value names its type"
    return sha256(canonical_bytes(value))


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """One logical tensor of a state: never a shard, never a file."""

    name: str
    dtype: str  # the safetensors name: F32, BF16, I64 ...
    shape: tuple[int, ...]
    blake3: str  # 64 hex digits


def state_document(tensors: Iterable[TensorDigest]) -> dict[str, Any]:
    """The document whose canonical bytes are hashed: `mok.state/v1`, tensors sorted by their UTF-8 names.

    Raises ValueError when two tensors share a name.
    """
    return {
        "type": STATE_TYPE,
        "tensors": [
            {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "blake3": t.blake3} for t in _in_order(tensors)
        ],
    }


def state_digest(tensors: Iterable[TensorDigest]) -> Digest:
    """The digest of a state: independent of devices, shards, files and order; see `state_document`."""
    return canonical_digest(state_document(tensors))


class StateForm:
    """Digests of states whose tensors have the same names, dtypes and shapes, as those of one run do after every step: only the
    hashes are written anew. Raises ValueError as `state_document` does.
    """

    def __init__(self, tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> None:
        """`tensors`: name, dtype and shape of each."""
        rows = _in_order(TensorDigest(*what, str(index)) for index, what in enumerate(tensors))
        self._order = [int(row.blake3) for row in rows]
        # A row's first field in canonical order is its hash, the last one its shape.
        rests = [canonical_bytes({"name": t.name, "dtype": t.dtype, "shape": list(t.shape)}).decode()[1:] for t in rows]
        self._between = [f'",{rest}' for rest in rests]

    def digest(self, hashes: Sequence[str]) -> Digest:
        """`state_digest` of these tensors with these BLAKE3, 64 lowercase hex digits each, in the order of `tensors`."""
        rows = ",".join([f'{{"blake3":"{hashes[index]}{rest}' for index, rest in zip(self._order, self._between, strict=True)])
        return sha256(f'{{"tensors":[{rows}],"type":"{STATE_TYPE}"}}'.encode())


def _in_order(tensors: Iterable[TensorDigest]) -> list[TensorDigest]:
    rows = sorted(tensors, key=lambda t: t.name.encode())
    for first, second in itertools.pairwise(rows):
        if first.name == second.name:
            raise ValueError(f"two tensors of one state are called {first.name!r}")
    return rows


def read_state_document(content: bytes, expected: Digest) -> list[TensorDigest]:
    """The tensors that a state's document lists. Raises ValueError for other bytes than those that `expected` is of."""
    got = sha256(content)
    if got != expected:
        raise ValueError(f"the document of the state has {got}, recorded is {expected}")
    rows = json.loads(content)["tensors"]
    return [TensorDigest(row["name"], row["dtype"], tuple(row["shape"]), row["blake3"]) for row in rows]


@dataclass(frozen=True, slots=True)
class TensorFault:
    """The first tensor (by name) in which two states differ, and how many differ in all."""

    name: str
    field: str  # dtype, shape, blake3; or presence
    expected: str
    got: str
    count: int

    def __str__(self) -> str:
        others = f" (and {self.count - 1} more tensors differ)" if self.count > 1 else ""
        return f"tensor {self.name!r}: {self.field} expected {self.expected}, got {self.got}{others}"


def tensor_fault(expected: Sequence[TensorDigest], got: Sequence[TensorDigest]) -> TensorFault | None:
    """What is wrong with a state's tensors; None when they are those expected."""
    left, right = {t.name: t for t in expected}, {t.name: t for t in got}
    wrong = [name for name in sorted(left.keys() | right.keys(), key=str.encode) if left.get(name) != right.get(name)]
    if not wrong:
        return None
    a, b = left.get(wrong[0]), right.get(wrong[0])
    if a is None or b is None:
        there = ("present", "missing")
        return TensorFault(wrong[0], "presence", there[a is None], there[b is None], len(wrong))
    field = next(f for f in ("dtype", "shape", "blake3") if getattr(a, f) != getattr(b, f))
    return TensorFault(wrong[0], field, str(getattr(a, field)), str(getattr(b, field)), len(wrong))

"""Measuring the bytes of checkpoints for `verify.check`: files by SHA-256, and the state in them by its tensors' digests.

Bytes come in pieces, from a disk or over HTTP, and are read once. Nothing here needs torch: a safetensors file is the length
of its header (8 bytes, little-endian), the header (JSON: name -> dtype, shape, data_offsets) and the tensors' bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from blake3 import blake3

from mok_service.errors import NotFound
from mok_service.provenance.chain import StateDigests
from mok_service.provenance.digest import Digest, TensorDigest, state_digest
from mok_service.provenance.verify import FoundCheckpoint, FoundFile

HEADER_BYTES_MAX: Final = 100_000_000  # the format's own limit
WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"

Read = Callable[[int, str], Iterable[bytes]]  # step, file name -> the file's bytes; raises NotFound


def measure(record: Mapping[str, Any], read: Read) -> dict[int, FoundCheckpoint]:
    """What `verify.check` takes: the bytes of every checkpoint that isn't deleted. A file that isn't there is left out."""
    return {
        checkpoint["step"]: _checkpoint(checkpoint, read)
        for checkpoint in record["checkpoints"] if not checkpoint["deleted_at"]
    }


def _checkpoint(checkpoint: Mapping[str, Any], read: Read) -> FoundCheckpoint:
    files: dict[str, FoundFile] = {}
    tensors: dict[str, list[TensorDigest]] = {}
    fault = None
    for file in checkpoint["files"]:
        name = file["name"]
        try:
            stream = _Stream(read(checkpoint["step"], name))
            try:
                if name.endswith(".safetensors"):
                    tensors[name] = list(_tensors(stream))
            except ValueError as error:
                fault = fault or f"{name}: {error}"
            stream.skip()
        except NotFound:  # raised by read, or when the first piece is asked for
            continue
        files[name] = FoundFile(stream.size, stream.sha256.hexdigest())
    if fault is not None or tensors.keys() != {WEIGHTS, OPTIMIZER}:
        return FoundCheckpoint(files, None, fault)
    weights, optimizer = (state_digest(tensors[name]) for name in (WEIGHTS, OPTIMIZER))
    state = StateDigests(weights, optimizer, Digest.parse(checkpoint["state"]["cursor"]))
    return FoundCheckpoint(files, state)


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _tensors(stream: _Stream) -> Iterator[TensorDigest]:
    """The tensors of a safetensors file, in order of their bytes. Raises ValueError for anything else."""
    position = 0
    for entry in _header(stream):
        if entry.begin != position or entry.end < entry.begin:
            raise ValueError(f"tensor {entry.name!r} doesn't begin where the one before it ends")
        digest = blake3()
        for piece in stream.take(entry.end - entry.begin):
            digest.update(piece)
        position = entry.end
        yield TensorDigest(entry.name, entry.dtype, entry.shape, digest.hexdigest())


def _header(stream: _Stream) -> list[_Entry]:
    length = int.from_bytes(b"".join(stream.take(8)), "little")
    if length > HEADER_BYTES_MAX:
        raise ValueError(f"no safetensors file: its header would have {length} bytes")
    try:
        header = json.loads(b"".join(stream.take(length)))
        return sorted(
            (_Entry(name, str(value["dtype"]), tuple(map(int, value["shape"])), *map(int, value["data_offsets"]))
             for name, value in header.items() if name != "__metadata__"),
            key=lambda entry: (entry.begin, entry.end),
        )
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no safetensors file: {type(error).__name__} in its header") from None


class _Stream:
    """Bytes that come in pieces; everything taken or skipped is counted and hashed."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._rest = memoryview(b"")
        self.size = 0
        self.sha256 = hashlib.sha256()

    def take(self, count: int) -> Iterator[memoryview]:
        """The next `count` bytes. Raises ValueError when there are fewer."""
        while count > 0:
            if not self._rest and not self._next():
                raise ValueError(f"the file ends {count} bytes too early")
            piece, self._rest = self._rest[:count], self._rest[count:]
            count -= len(piece)
            yield piece

    def skip(self) -> None:
        """All the rest."""
        while self._next():
            pass

    def _next(self) -> bool:
        piece = next(self._pieces, None)
        if piece is None:
            self._rest = memoryview(b"")
            return False
        self._rest = memoryview(piece)
        self.size += len(piece)
        self.sha256.update(piece)
        return True

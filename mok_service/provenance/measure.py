"""Measuring the bytes of checkpoints for `verify.check`: files by SHA-256, and the state in them by its tensors' digests.

Bytes come in pieces, from a disk or over HTTP, and are read once. A checkpoint that lists its tensors (`weights.json`,
`optimizer.json`) gets those named that are wrong: the digest on record is that of the list. Nothing here needs torch.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from blake3 import blake3

from mok_service.errors import NotFound
from mok_service.provenance.chain import StateDigests
from mok_service.provenance.checkpoint import DOCUMENTS, OPTIMIZER, WEIGHTS
from mok_service.provenance.digest import Digest, TensorDigest, read_state_document, state_digest, tensor_fault
from mok_service.provenance.safetensors import Entry, header_length, parse_header
from mok_service.provenance.verify import FoundCheckpoint, FoundFile

DOCUMENT_BYTES_MAX: Final = 1 << 30  # a tensor takes about 200

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
    documents: dict[str, bytes] = {}
    faults: dict[str, str] = {}
    for file in checkpoint["files"]:
        name = file["name"]
        try:
            stream = Stream(read(checkpoint["step"], name))
            try:
                if name.endswith(".safetensors"):
                    tensors[name] = list(_tensors(stream))
                elif name in DOCUMENTS.values() and file["size"] <= DOCUMENT_BYTES_MAX:
                    documents[name] = b"".join(stream.take(file["size"]))
            except ValueError as error:
                faults[name] = str(error)
            stream.skip()
        except NotFound:  # raised by read, or when the first piece is asked for
            continue
        files[name] = FoundFile(stream.size, stream.sha256.hexdigest())
    stated = checkpoint["state"]
    for name, digest in ((WEIGHTS, stated["weights"]), (OPTIMIZER, stated["optimizer"])):
        with contextlib.suppress(KeyError, ValueError):  # no such document, or not the one on record: then it is named itself
            fault = tensor_fault(read_state_document(documents[DOCUMENTS[name]], Digest.parse(digest)), tensors[name])
            if fault is not None:
                faults.setdefault(name, str(fault))
    if tensors.keys() != {WEIGHTS, OPTIMIZER}:
        return FoundCheckpoint(files, None, faults)
    weights, optimizer = (state_digest(tensors[name]) for name in (WEIGHTS, OPTIMIZER))
    return FoundCheckpoint(files, StateDigests(weights, optimizer, Digest.parse(stated["cursor"])), faults)


def _tensors(stream: Stream) -> Iterator[TensorDigest]:
    """The tensors of a safetensors file, in order of their bytes. Raises ValueError for anything else."""
    for entry in read_header(stream):
        digest = blake3()
        for piece in stream.take(entry.end - entry.begin):
            digest.update(piece)
        yield TensorDigest(entry.name, entry.dtype, entry.shape, digest.hexdigest())


def read_header(stream: Stream) -> list[Entry]:
    """The tensors of a safetensors file by the order of their bytes. Raises ValueError for anything else."""
    length = header_length(b"".join(stream.take(8)))
    return parse_header(b"".join(stream.take(length)))


class Stream:
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

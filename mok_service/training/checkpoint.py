"""Checkpoints: the state after a step as safetensors, committed atomically, with its digests.

A checkpoint is a folder `step-00000020` holding

    model.safetensors       master weights, float32, Hugging Face names
    config.json             the model in Hugging Face's terms: `from_pretrained` loads the folder
    optimizer.safetensors   first/<name>, second/<name>, float32; previous_norm: the gradient norm that clipping keeps
    weights.json            every tensor's BLAKE3: the document (`mok.state/v1`) whose SHA-256 is the digest of the weights
    optimizer.json          the same of the optimizer's state
    checkpoint.json         step, chain head, digests of the state and of each file

Checkpoints of earlier versions lack the two documents; they load as well. A checkpoint is written under another name, flushed to
the disk, and renamed: a partial one is never listed. What a process that died left of one goes with the next one's write.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mok_service.errors import Tampered
from mok_service.kernels.native import host_blake3
from mok_service.provenance.canonical import canonical_bytes
from mok_service.provenance.chain import StateDigests
from mok_service.provenance.checkpoint import (
    DOCUMENTS,
    OPTIMIZER,
    OPTIMIZER_DOCUMENT,
    WEIGHTS,
    WEIGHTS_DOCUMENT,
    CheckpointFile,
    CheckpointInfo,
)
from mok_service.provenance.digest import (
    Digest,
    TensorDigest,
    TensorFault,
    canonical_digest,
    read_state_document,
    sha256,
    sha256_file,
    state_digest,
    state_document,
    tensor_fault,
)
from mok_service.provenance.safetensors import check_file

MANIFEST = "checkpoint.json"
_TYPE = "mok.checkpoint/v1"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class State:
    """A training state in host memory, as named tensors."""

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def cursor_digest(step: int) -> Digest:
    """The data cursor is the number of steps done: batch(step) is a pure function."""
    return canonical_digest({"type": "mok.cursor/v1", "step": str(step)})


class CheckpointStore:
    """The checkpoints of one run, in one local folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def list(self) -> list[CheckpointInfo]:
        """Every committed checkpoint, by ascending step."""
        if not self.root.is_dir():
            return []
        steps = sorted(int(m[1]) for p in self.root.iterdir() if (m := _NAME.fullmatch(p.name)) and (p / MANIFEST).is_file())
        return [self.info(step) for step in steps]

    def info(self, step: int) -> CheckpointInfo:
        """Raises Tampered when the manifest can't be read as one."""
        path = self.root / folder_name(step) / MANIFEST
        try:
            info = CheckpointInfo.from_dict(json.loads(path.read_bytes()))
            if info.step != step:
                raise ValueError(f"it is for step {info.step}")
            return info
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Tampered(f"{path.parent.name}/{MANIFEST} can't be read: {error}", step=step) from error

    def save(self, step: int, head: Digest, state: State, digests: StateDigests, config: Mapping[str, Any]) -> CheckpointInfo:
        """Commit the state after `step`. A checkpoint of the very same record that is there already is left as it is."""
        final = self.root / folder_name(step)
        if (final / MANIFEST).is_file() and (there := self.info(step)).head == head:
            return there
        self._clear_abandoned()
        partial = self.root / f".{folder_name(step)}.{os.getpid()}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            with _locked(partial, needed=False):
                info = _write(partial, CheckpointInfo(step, final.name, (), digests, head), state, config)
                shutil.rmtree(final, ignore_errors=True)  # without a manifest, or of another record
                partial.rename(final)
                _flush(self.root)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        return info

    def _clear_abandoned(self) -> None:
        """Remove what processes that died while they saved have left: it can be as large as a checkpoint."""
        for partial in self.root.glob(".step-*.partial"):
            with suppress(OSError), _locked(partial, needed=True):  # one that is in use can't be locked
                shutil.rmtree(partial)

    def load(self, info: CheckpointInfo) -> State:
        """Read and check a checkpoint. Raises Tampered naming the file, and the tensor, whose bytes aren't the recorded ones."""
        folder = self.root / info.folder
        check_files(folder, info)
        try:
            state = State(load_tensors(folder / WEIGHTS), load_tensors(folder / OPTIMIZER))
        except ValueError as error:
            raise Tampered(f"{info.folder}: {error}", step=info.step) from None
        for part, file, tensors, expected in (
            ("weights", WEIGHTS, state.weights, info.state.weights),
            ("optimizer", OPTIMIZER, state.optimizer, info.state.optimizer),
        ):  # fmt: skip
            rows = tensor_rows(tensors)
            got = state_digest(rows)
            if got != expected:
                raise _tampered(
                    info, file, f": the {part} have digest {got}, recorded is {expected}", _fault(folder, info, file, rows),
                    part=part, expected=str(expected), got=str(got),
                )  # fmt: skip
        return state


def _write(folder: Path, about: CheckpointInfo, state: State, config: Mapping[str, Any]) -> CheckpointInfo:
    """Write a checkpoint's files and flush them to the disk. `about` lacks the files."""
    save_file(dict(state.weights), folder / WEIGHTS, metadata={"format": "pt"})
    save_file(dict(state.optimizer), folder / OPTIMIZER)
    for name, tensors, digest in (
        (WEIGHTS_DOCUMENT, state.weights, about.state.weights), (OPTIMIZER_DOCUMENT, state.optimizer, about.state.optimizer),
    ):  # fmt: skip
        (folder / name).write_bytes(_document(f"{about.folder}/{name}", about.step, tensors, digest))
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    files = tuple(
        CheckpointFile(p.name, p.stat().st_size, sha256_file(p).hex) for p in sorted(folder.iterdir(), key=lambda p: p.name)
    )
    info = replace(about, files=files)
    (folder / MANIFEST).write_text(json.dumps({"type": _TYPE, **info.as_dict()}, indent=2, sort_keys=True) + "\n")
    for path in folder.iterdir():
        _flush(path)
    _flush(folder)
    return info


@contextmanager
def _locked(folder: Path, *, needed: bool) -> Iterator[None]:
    """Lock a folder, whatever it is called meanwhile. Raises OSError when a living process has it locked, or the file system
    has no such locks, if the lock is `needed`."""
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if needed:
                raise
        yield
    finally:
        os.close(held)


def check_files(folder: Path, info: CheckpointInfo) -> None:
    """Raises Tampered naming the first file of a checkpoint that is missing or whose bytes aren't the recorded ones.

    Where the checkpoint lists its tensors, the message names those of the file that are wrong.
    """
    for file in info.files:
        path = folder / file.name
        if path.parent != folder or not path.is_file():
            raise Tampered(f"{info.folder}/{file.name} is missing", step=info.step, file=file.name)
        got = sha256_file(path).hex
        if got != file.sha256:
            try:
                rows = tensor_rows(load_tensors(path)) if file.name in DOCUMENTS else None
            except (OSError, ValueError, SafetensorError):
                rows = None
            raise _tampered(
                info, file.name, f" has sha256:{got}, recorded is sha256:{file.sha256}",
                None if rows is None else _fault(folder, info, file.name, rows),
                expected=f"sha256:{file.sha256}", got=f"sha256:{got}",
            )  # fmt: skip


def _tampered(info: CheckpointInfo, file: str, problem: str, fault: TensorFault | None, **detail: str) -> Tampered:
    tensors = {} if fault is None else {"tensor": fault.name}
    why = "" if fault is None else f": {fault}"
    return Tampered(f"{info.folder}/{file}{problem}{why}", step=info.step, file=file, **detail, **tensors)


def _fault(folder: Path, info: CheckpointInfo, file: str, rows: list[TensorDigest]) -> TensorFault | None:
    """The first tensor of a file that isn't as the document on record lists it, when there is that document."""
    name = DOCUMENTS[file]
    digest = info.state.weights if file == WEIGHTS else info.state.optimizer
    try:
        return tensor_fault(read_state_document((folder / name).read_bytes(), digest), rows)
    except (OSError, ValueError):
        return None


def _document(name: str, step: int, tensors: Mapping[str, Tensor], digest: Digest) -> bytes:
    """The canonical bytes that list these tensors. Raises Tampered when their digest isn't the one that the step recorded."""
    content = canonical_bytes(state_document(tensor_rows(tensors)))
    if sha256(content) != digest:
        raise Tampered(f"{name}: the state to be saved has digest {sha256(content)}, its step recorded {digest}", step=step)
    return content


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, by name. Raises ValueError when its header isn't exactly that of its bytes."""
    check_file(path)
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)


def tensor_rows(tensors: Mapping[str, Tensor]) -> list[TensorDigest]:
    """The digests of tensors in host memory."""
    return [
        TensorDigest(name, DTYPES[tensor.dtype], tuple(tensor.shape), host_blake3(tensor)) for name, tensor in tensors.items()
    ]


DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8"}


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""A checkpoint as a value: the state after a step, the files that hold it, and their digests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Self

from mok_service.provenance.chain import StateDigests
from mok_service.provenance.digest import Digest

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
# The documents (`digest.state_document`) whose SHA-256 are the digests of the state. Older checkpoints lack them.
WEIGHTS_DOCUMENT, OPTIMIZER_DOCUMENT = "weights.json", "optimizer.json"
DOCUMENTS: Final = {WEIGHTS: WEIGHTS_DOCUMENT, OPTIMIZER: OPTIMIZER_DOCUMENT}


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    name: str      # inside the checkpoint's folder: relative, with forward slashes
    size: int      # bytes
    sha256: str    # 64 hex digits


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What is known of a committed checkpoint. The digests of its files stay on record when its bytes are deleted."""

    step: int
    folder: str                          # name below the run's checkpoint store
    files: tuple[CheckpointFile, ...]    # sorted by name
    state: StateDigests
    head: Digest                         # of the step record of this step

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files)

    def as_dict(self) -> dict[str, Any]:
        return {
            "step": self.step, "folder": self.folder, "state": self.state.as_dict(), "head": str(self.head),
            "files": [{"name": f.name, "size": f.size, "sha256": f.sha256} for f in self.files],
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Self:
        files = tuple(CheckpointFile(f["name"], f["size"], f["sha256"]) for f in value["files"])
        return cls(value["step"], value["folder"], files, StateDigests.from_dict(value["state"]), Digest.parse(value["head"]))

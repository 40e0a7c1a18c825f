"""The data manifest: every input file by name, size and digest, in the order in which it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from mok_service.provenance.digest import Digest, canonical_digest


@dataclass(frozen=True, slots=True)
class ManifestFile:
    name: str      # as the source names it: relative, with forward slashes
    size: int      # bytes
    sha256: str    # 64 hex digits


@dataclass(frozen=True, slots=True)
class DataManifest:
    """What a job trains on. Written once, by the first attempt; later attempts and runs must match it."""

    source: str
    files: tuple[ManifestFile, ...]
    tokenizer: str          # "bytes", or the sha256: digest of the tokenizer.json
    tokens: int             # length of the token stream
    order: str = "mok.order/v1"  # docs/arithmetic.md, 14.4

    def document(self) -> dict[str, Any]:
        return {
            "type": "mok.manifest/v1", "source": self.source, "tokenizer": self.tokenizer, "tokens": str(self.tokens),
            "order": self.order,
            "files": [{"name": f.name, "size": str(f.size), "sha256": f.sha256} for f in self.files],
        }

    @classmethod
    def from_document(cls, value: dict[str, Any]) -> Self:
        files = tuple(ManifestFile(f["name"], int(f["size"]), f["sha256"]) for f in value["files"])
        return cls(value["source"], files, value["tokenizer"], int(value["tokens"]), value["order"])

    def digest(self) -> Digest:
        return canonical_digest(self.document())

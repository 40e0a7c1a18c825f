"""The record of a run: everything that it must be able to prove, assembled from values. No I/O.

`verify.check` judges what `assemble` made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mok_service.provenance.canonical import INTEGER_MAX, decimal_text, float64_bits
from mok_service.provenance.chain import CHAIN_VERSION, StepRecord, genesis
from mok_service.provenance.digest import Digest, canonical_digest
from mok_service.provenance.manifest import DataManifest

RECORD_TYPE: Final = "mok.record/v1"
SEED_RULE: Final = (
    "Philox4x32-10; key: the seed's low and high 32 bits; counter: index, then the stream, which is the low 64 bits of the "
    "SHA-256 of its name (docs/arithmetic.md, 14)"
)
# What doesn't show in the bits, for each arithmetic.
INVARIANCES: Final[Mapping[str, tuple[str, ...]]] = {
    "mok-1": ("threads", "instruction set", "micro-batches", "device count", "interruptions", "checkpoint interval"),
}


@dataclass(frozen=True, slots=True)
class Parts:
    """What a record is made of; mappings hold plain JSON values."""

    identity: Mapping[str, Any]               # run, job, kind, reproduces, tenant, status ..., times as text
    submitted: Mapping[str, Any]              # the spec as submitted
    training: Mapping[str, Any]               # as resolved
    training_document: Mapping[str, Any]      # the canonical document whose digest is the job's identity
    execution: Mapping[str, Any]              # of this run, as resolved
    manifest: DataManifest | None             # None before the first attempt has read the data
    records: Sequence[StepRecord]
    notes: Sequence[Mapping[str, Any]]        # beside each record: its attempt and time
    checkpoints: Sequence[Mapping[str, Any]]
    attempts: Sequence[Mapping[str, Any]]
    verifications: Sequence[Mapping[str, Any]]


def assemble(parts: Parts) -> dict[str, Any]:
    """The record, as plain JSON values. Code and environment are those of the last attempt that reported them."""
    training = canonical_digest(parts.training_document)
    environments = [attempt["environment"] for attempt in parts.attempts if attempt["environment"] is not None]
    placements = [attempt["placement"] for attempt in parts.attempts if attempt["placement"] is not None]
    environment = dict(environments[-1]) if environments else {}
    last = parts.records[-1] if parts.records else None
    manifest = parts.manifest
    succeeded = parts.identity["status"] == "succeeded"
    return {
        "type": RECORD_TYPE,
        "identity": dict(parts.identity),
        "spec": {
            "submitted": parts.submitted, "submitted_digest": str(document_digest("mok.submitted/v1", parts.submitted)),
            "training": parts.training, "training_document": parts.training_document, "training_digest": str(training),
            "execution": parts.execution, "execution_digest": str(document_digest("mok.execution/v1", parts.execution)),
        },
        "code": environment.pop("code", None),
        "environment": environment or None,
        "arithmetic": {"name": parts.training["arithmetic"], "invariances": list(INVARIANCES[parts.training["arithmetic"]])},
        "seeds": {"seed": parts.training_document["seed"], "rule": SEED_RULE},
        "data": None if manifest is None else {"manifest": manifest.document(), "digest": str(manifest.digest())},
        "layout": {
            "logical": {"sequence_length": parts.training["sequence_length"], **parts.training["batch"]},
            "physical": placements[-1] if placements else None,
        },
        "chain": _chain(parts, training),
        "final": last.state.as_dict() if succeeded and last is not None and last.state is not None else None,
        "checkpoints": list(parts.checkpoints),
        "attempts": list(parts.attempts),
        "verifications": list(parts.verifications),
    }


def _chain(parts: Parts, training: Digest) -> dict[str, Any]:
    records = parts.records
    first = None
    if records and parts.manifest is not None and records[0].state is not None:
        first = genesis(training, parts.manifest.digest(), parts.training["arithmetic"], records[0].state.weights)
    return {
        "version": CHAIN_VERSION,
        "genesis": None if first is None else str(first),
        "head": str(records[-1].head()) if records else None,
        "length": len(records),
        "records": [{**shown_step(record), **note} for record, note in zip(records, parts.notes, strict=True)],
    }


def shown_step(record: StepRecord) -> dict[str, Any]:
    """Body, head and unhashed fields, without the numbers that JSON can't hold."""
    shown = record.as_dict()
    shown["metrics"] = {name: value if math.isfinite(value) else None for name, value in shown["metrics"].items()}
    return shown


def document_digest(kind: str, value: Mapping[str, Any]) -> Digest:
    """The digest of any document of plain values under a domain tag; see `canonical_value`."""
    return canonical_digest({"type": kind, "value": canonical_value(value)})


def canonical_value(value: Any) -> Any:
    """The same value with floats as the 16 hex digits of their bits, and integers that JSON can't hold as decimal strings."""
    if isinstance(value, Mapping):
        return {key: canonical_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [canonical_value(item) for item in value]
    if isinstance(value, float):
        return float64_bits(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > INTEGER_MAX:
        return decimal_text(value)
    return value


def code_drift(expected: Mapping[str, Any] | None, got: Mapping[str, Any] | None) -> list[str]:
    """How the code of two environments differs, as sentences; empty when it is the same, or when one of them isn't known.

    Compared: package version, digests of the native libraries, commit, dirty flag and digest of the patch.
    """
    left, right = (None if e is None else e.get("code") for e in (expected, got))
    if left is None or right is None:
        return []
    found = []
    if left.get("version") != right.get("version"):
        found.append(f"version {left.get('version')} -> {right.get('version')}")
    if _differ(left.get("native") or {}, right.get("native") or {}):
        found.append(f"native libraries {_libraries(left)} -> {_libraries(right)}")
    if left.get("git") != right.get("git"):
        found.append(f"source {_source(left)} -> {_source(right)}")
    return found


def _differ(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Whether a library that both have differs, or they have none in common: a machine without a GPU lacks the one for GPUs."""
    common = left.keys() & right.keys()
    return left != right and (not common or any(left[name] != right[name] for name in common))


def _libraries(code: Mapping[str, Any]) -> str:
    native = code.get("native") or {}
    return ", ".join(f"{name} {digest}" for name, digest in sorted(native.items())) or "none"


def _source(code: Mapping[str, Any]) -> str:
    git = code.get("git")
    if git is None:
        return "outside a checkout"
    return f"commit {git.get('commit')}" + (f" with changes ({git.get('patch')})" if git.get("dirty") else "")

"""Verdicts on records: is this one consistent, and do two executions have the same bits? Pure functions; no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Final

from mok_service.errors import Tampered
from mok_service.lifecycle import VerificationVerdict
from mok_service.provenance.chain import StateDigests, StepRecord, check_links, first_difference, genesis
from mok_service.provenance.checkpoint import OPTIMIZER, OPTIMIZER_DOCUMENT, WEIGHTS, WEIGHTS_DOCUMENT
from mok_service.provenance.digest import Digest, canonical_digest
from mok_service.provenance.manifest import DataManifest
from mok_service.provenance.record import RECORD_TYPE, canonical_value, document_digest


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict, and for anything but a good one where and what."""

    verdict: VerificationVerdict
    message: str
    field: str | None = None
    step: int | None = None
    expected: str | None = None
    got: str | None = None

    @classmethod
    def tampered(cls, fault: Tampered, field: str | None = None) -> Finding:
        """The verdict TAMPERED, as `fault` says it; `field` is for a fault that names neither a field nor a part or file."""
        detail = fault.detail
        named = detail.get("field") or detail.get("part") or detail.get("file") or field
        return cls("TAMPERED", fault.message, named, detail.get("step"), _text(detail.get("expected")), _text(detail.get("got")))

    def as_dict(self) -> dict[str, Any]:
        return {"verdict": self.verdict, "message": self.message, "field": self.field, "step": self.step,
                "expected": self.expected, "got": self.got}


_LISTED: Final = {WEIGHTS_DOCUMENT: "weights", OPTIMIZER_DOCUMENT: "optimizer"}

# ---- Two executions --------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class Ending:
    """How far an execution came, and how it ended."""

    status: str                # succeeded, failed, cancelled; or what it still is
    stop_reason: str | None
    step: int | None           # last step record; None if there is none

    def __str__(self) -> str:
        after = "no step" if self.step is None else f"step {self.step}"
        why = f" ({self.stop_reason})" if self.stop_reason and self.status == "failed" else ""
        return f"{self.status}{why} after {after}"


def compare(original: Sequence[StepRecord], other: Sequence[StepRecord], original_end: Ending, other_end: Ending,
            drift: Sequence[str] = ()) -> Finding:
    """Two executions of one job, step by step from step 0; `drift` says how the code differs.

    REPRODUCED; DIVERGED at the first difference; INCONCLUSIVE when the code differs too, or when they're equal through the
    step where one of them ended early.
    """
    for expected, got in zip_longest(original, other):
        if expected is None or got is None:
            break
        finding = compare_step(expected, got, drift)
        if finding is not None:
            return finding
    return compare_ends(original_end, other_end, drift)


def compare_step(expected: StepRecord, got: StepRecord, drift: Sequence[str] = ()) -> Finding | None:
    """DIVERGED (or with drift INCONCLUSIVE) with the first field in which two executions of a step differ; None if equal."""
    difference = first_difference(expected, got)
    if difference is None:
        return None
    name, want, have = difference
    message = f"step {expected.step}: {name} expected {want}, got {have}"
    return excused(Finding("DIVERGED", message, name, expected.step, _text(want), _text(have)), drift)


def excused(finding: Finding, drift: Sequence[str]) -> Finding:
    """A difference that other code may explain says nothing about the run: DIVERGED becomes INCONCLUSIVE where `drift` is."""
    if finding.verdict != "DIVERGED" or not drift:
        return finding
    message = f"{finding.message}. The code differs too ({'; '.join(drift)}), so this is source drift"
    return replace(finding, verdict="INCONCLUSIVE", message=message)


def compare_ends(original: Ending, other: Ending, drift: Sequence[str] = ()) -> Finding:
    """The verdict on two executions whose common steps are all equal."""
    common = None if None in (original.step, other.step) else min(original.step or 0, other.step or 0)
    note = f" The code differs ({'; '.join(drift)}), and yet the bits are equal." if drift else ""
    if original.status == other.status == "succeeded" and original.step == other.step:
        return Finding("REPRODUCED", f"equal through step {common}, the last one.{note}", step=common)
    through = "no step could be compared" if common is None else f"equal through step {common}"
    return Finding("INCONCLUSIVE", f"{through}: the original {original}, this run {other}.{note}", step=common)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


# ---- One record ------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file as measured now."""

    size: int
    sha256: str   # 64 hex digits


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint's bytes as measured now. `state` if its tensors were hashed again; `faults` says by file
    what is wrong in it: where the checkpoint lists its tensors, which of them."""

    files: Mapping[str, FoundFile] = field(default_factory=dict)
    state: StateDigests | None = None
    faults: Mapping[str, str] = field(default_factory=dict)


def check(record: Mapping[str, Any], found: Mapping[int, FoundCheckpoint]) -> Finding:
    """Level check: does the record contradict itself, or the checkpoints' bytes (by step; measured by the caller)?

    1. It's a record of a version that this program knows.
    2. Specs: the documents have the digests that are stated, and say the same as the plain values.
    3. Data: the manifest has its digest.
    4. Chain: every body has its head, every link holds, from the genesis to the head.
    5. Attempts: every record's attempt is there.
    6. Checkpoints: each is the state that the chain has at its step.
    7. End: a run that succeeded has every step, the final state and a checkpoint of it.
    8. Bytes: each file of each checkpoint has its size and digest.
    INTACT; TAMPERED with the first fault; INCONCLUSIVE when bytes that should be there weren't measured.
    """
    if record.get("type") != RECORD_TYPE:                                                   # 1
        return Finding("INCONCLUSIVE", f"this record can't be checked here: its type is {record.get('type')!r}", "type",
                       expected=RECORD_TYPE, got=str(record.get("type")))
    try:
        _check_spec(record)                                                                 # 2
        _check_data(record["data"])                                                         # 3
        records = _check_chain(record)                                                      # 4
        _check_attempts(record)                                                             # 5
        _check_checkpoints(record["checkpoints"], records)                                  # 6
        _check_end(record, records)                                                         # 7
        missing = _check_bytes(record["checkpoints"], found)                                # 8
    except Tampered as fault:
        return Finding.tampered(fault, "chain")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return Finding("TAMPERED", f"the record isn't well-formed: {type(error).__name__}: {error}", "record")
    if missing:
        steps = ", ".join(map(str, missing))
        return Finding("INCONCLUSIVE", f"the record is consistent, but the checkpoints of these steps weren't at hand: {steps}",
                       "checkpoints", missing[0])
    return Finding("INTACT", f"{len(records)} step records, {len(record['checkpoints'])} checkpoints: nothing contradicts")


def _expect(name: str, expected: Any, got: Any, step: int | None = None) -> None:
    """Raises Tampered unless the two are equal."""
    if expected != got:
        where = "" if step is None else f"step {step}: "
        raise Tampered(f"{where}{name} expected {expected}, got {got}", field=name, step=step, expected=expected, got=got)


def _check_spec(record: Mapping[str, Any]) -> None:
    spec = record["spec"]
    document = dict(spec["training_document"])
    _expect("training_digest", spec["training_digest"], str(canonical_digest(document)))
    plain = canonical_value(spec["training"])
    plain["seed"] = str(plain["seed"])
    document["model"] = {**document["model"], "preset": None}  # expanded while the spec was read: no part of the identity
    del document["type"]
    for name in sorted(document.keys() | plain.keys()):
        _expect(f"training.{name}", document.get(name), plain.get(name))
    _expect("submitted_digest", spec["submitted_digest"], str(document_digest("mok.submitted/v1", spec["submitted"])))
    _expect("execution_digest", spec["execution_digest"], str(document_digest("mok.execution/v1", spec["execution"])))
    _expect("arithmetic", plain["arithmetic"], record["arithmetic"]["name"])
    _expect("seed", plain["seed"], record["seeds"]["seed"])
    _expect("layout", {"sequence_length": plain["sequence_length"], **plain["batch"]}, record["layout"]["logical"])


def _check_data(data: Mapping[str, Any] | None) -> None:
    if data is not None:
        manifest = DataManifest.from_document(data["manifest"])
        _expect("manifest", data["manifest"], manifest.document())
        _expect("manifest_digest", data["digest"], str(manifest.digest()))


def _check_chain(record: Mapping[str, Any]) -> list[StepRecord]:
    chain, rows = record["chain"], record["chain"]["records"]
    _expect("chain.length", chain["length"], len(rows))
    if not rows:
        _expect("chain.head", None, chain["head"])
        return []
    records = [StepRecord.from_dict(row) for row in rows]
    state = records[0].state
    if state is None or record["data"] is None:
        raise Tampered("step record 0 has no initial state, or there is no data manifest", field="chain", step=0)
    start = genesis(Digest.parse(record["spec"]["training_digest"]), Digest.parse(record["data"]["digest"]),
                    record["arithmetic"]["name"], state.weights)
    _expect("chain.genesis", chain["genesis"], str(start))
    _expect("chain.head", chain["head"], str(check_links(records, start)))
    return records


def _check_attempts(record: Mapping[str, Any]) -> None:
    numbers = [attempt["attempt"] for attempt in record["attempts"]]
    _expect("attempts", list(range(1, len(numbers) + 1)), numbers)
    for row in record["chain"]["records"]:
        if row["attempt"] not in numbers:
            raise Tampered(f"step {row['body']['step']} says attempt {row['attempt']}, which isn't on record", field="attempt",
                           step=int(row["body"]["step"]))


def _check_checkpoints(checkpoints: Sequence[Mapping[str, Any]], records: Sequence[StepRecord]) -> None:
    for checkpoint in checkpoints:
        step = checkpoint["step"]
        if not 0 <= step < len(records):
            raise Tampered(f"there is a checkpoint of step {step}, but no record of that step", field="checkpoint", step=step)
        _expect("checkpoint.head", str(records[step].head()), checkpoint["head"], step)
        for file in checkpoint["files"]:
            part = _LISTED.get(file["name"])
            if part is not None:
                _expect(f"checkpoint.{file['name']}", checkpoint["state"][part], f"sha256:{file['sha256']}", step)
        state = records[step].state
        if state is not None:
            for part, digest in state.as_dict().items():
                _expect(f"checkpoint.{part}", digest, checkpoint["state"][part], step)


def _check_end(record: Mapping[str, Any], records: Sequence[StepRecord]) -> None:
    if record["identity"]["status"] != "succeeded":
        _expect("final", None, record["final"])
        _expect("identity.weights", None, record["identity"]["weights"])
        return
    steps = record["spec"]["training"]["steps"]
    _expect("chain.length", steps + 1, len(records))
    state = records[-1].state
    _expect("final", None if state is None else state.as_dict(), record["final"], steps)
    _expect("identity.weights", record["identity"]["weights"], None if state is None else str(state.weights), steps)
    if state is None or not any(checkpoint["step"] == steps for checkpoint in record["checkpoints"]):
        raise Tampered(f"the run succeeded, but has no final state or no checkpoint of step {steps}", field="checkpoint",
                       step=steps)


def _check_bytes(checkpoints: Sequence[Mapping[str, Any]], found: Mapping[int, FoundCheckpoint]) -> list[int]:
    """Steps of the checkpoints whose bytes weren't measured, though they weren't deleted."""
    missing = []
    for checkpoint in checkpoints:
        step = checkpoint["step"]
        have = found.get(step)
        if have is None:
            missing += [] if checkpoint["deleted_at"] else [step]
            continue
        for file in checkpoint["files"]:
            _check_file(file, have.files.get(file["name"]), step, have.faults.get(file["name"]))
        if have.state is not None:
            for part, digest in have.state.as_dict().items():
                if digest != checkpoint["state"][part]:
                    fault = have.faults.get(WEIGHTS if part == "weights" else OPTIMIZER, digest)
                    raise Tampered(f"step {step}: the {part} in the checkpoint aren't those on record: {fault}", field=part,
                                   step=step, expected=checkpoint["state"][part], got=digest)
    return missing


def _check_file(file: Mapping[str, Any], have: FoundFile | None, step: int, fault: str | None) -> None:
    name, expected = file["name"], f"{file['size']} bytes, sha256 {file['sha256']}"
    got = "no such file" if have is None else f"{have.size} bytes, sha256 {have.sha256}"
    if expected != got:
        why = f" ({fault})" if fault else ""
        raise Tampered(f"step {step}: checkpoint file {name}: expected {expected}, got {got}{why}", field=name, step=step,
                       expected=expected, got=got)

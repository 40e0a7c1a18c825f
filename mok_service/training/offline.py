"""Auditing or rerunning an exported run: by its files, this machine's data and kernels, and nothing else.

    from mok_service.provenance.keys import public_keys
    from mok_service.training.offline import verify_folder

    outcome = verify_folder(Path("run"), public_keys(Path("trusted.pem")), "audit", segments=4, data_roots=[Path("/data")])
    print(outcome.finding.verdict, outcome.finding.message)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mok_service.environment import environment
from mok_service.errors import Diverged, MokError, NonFinite, SourceDrift, Tampered
from mok_service.export import CHECKPOINTS, RECORD, load_document, verify_export
from mok_service.kernels import load_backend
from mok_service.provenance.audit import Plan, audited, draw, report, whole
from mok_service.provenance.chain import StepRecord
from mok_service.provenance.checkpoint import CheckpointInfo
from mok_service.provenance.keys import PublicKey
from mok_service.provenance.manifest import DataManifest
from mok_service.provenance.record import RECORD_TYPE, code_drift
from mok_service.provenance.verify import Ending, Finding, compare_ends, compare_step, excused
from mok_service.spec import JobSpec, draw_seed, job_of_record, override_execution
from mok_service.training.audit import replay
from mok_service.training.checkpoint import CheckpointStore
from mok_service.training.data import open_corpus
from mok_service.training.hugging_face import initial_weights
from mok_service.training.sources import Sources

Data = tuple[Sequence[Path], Sources | None]  # the data roots, and what reads remote files
Told = Callable[[StepRecord, int, int], None]  # a record that was computed again, steps done, steps in all


@dataclass(frozen=True, slots=True)
class Outcome:
    """What verifying a folder showed. `plan` and `report` are those of an audit, as REST shows them."""

    finding: Finding
    plan: dict[str, Any] | None = None
    report: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        return {**self.finding.as_dict(), "plan": self.plan, "report": self.report}


def verify_folder(
    folder: Path,
    trusted: Mapping[str, PublicKey],
    level: Literal["audit", "rerun"],
    *,
    segments: int | None = None,
    seed: int | None = None,
    execution: Mapping[str, Any] | None = None,
    data_roots: Sequence[Path] = (),
    sources: Sources | None = None,
    told: Told = lambda record, done, of: None,
) -> Outcome:
    """Check an exported run, then compute drawn segments of it (audit) or all of it (rerun) again, here.

    1. The files by themselves, as `export.verify_export`: what is TAMPERED is not replayed.
    2. The data must be those of the record, else INCONCLUSIVE.
    3. Each record that is computed again must be the one on file, and each segment must end with the state on file.

    `segments` and `seed` are as in `provenance.audit.draw`; a seed is drawn if there is none. `execution` replaces keys of the
    record's execution spec (device, threads ...), which doesn't show in the bits; without a device, the CPU does it where the
    record's can't be used. Without a trusted key's signature a good
    outcome is INCONCLUSIVE. Raises NotFound for a folder without an export, InvalidSpec for data that aren't there or for more
    segments than there are.
    """
    checked = verify_export(folder, trusted)                                                # 1
    if checked.verdict == "TAMPERED":
        return Outcome(checked)
    record = load_document(folder, RECORD)
    if record["type"] != RECORD_TYPE:
        return Outcome(checked)
    chain = [StepRecord.from_dict(row) for row in record["chain"]["records"]]
    if not chain:
        return Outcome(Finding("INCONCLUSIVE", "the run left no step record: there is nothing to compare with", "chain"))
    plan = _plan(record, chain, level, draw_seed() if seed is None else seed, segments)
    drift = code_drift({"code": record["code"]}, environment())
    job = _usable(override_execution(job_of_record(record), execution or {}), "device" in (execution or {}))
    finding = _replayed(folder, record, chain, plan, job, (data_roots, sources), drift, told)
    good = finding is None
    if finding is None:
        finding = audited(plan, drift) if level == "audit" else _end_of_rerun(record, chain, drift)
        if checked.verdict != "INTACT":
            finding = replace(checked, message=f"{finding.message} But {checked.message}")
    if level == "rerun":
        return Outcome(finding)
    return Outcome(finding, plan.document(), report(plan) if good else None)


def _plan(record: Mapping[str, Any], chain: Sequence[StepRecord], level: str, seed: int, segments: int | None) -> Plan:
    head, last = str(record["chain"]["head"]), chain[-1].step
    if level == "rerun":
        return whole(head, last)
    return draw(seed, head, last, [c["step"] for c in record["checkpoints"] if not c["deleted_at"]], segments)


def _usable(job: JobSpec, wanted: bool) -> JobSpec:
    """The job on a device that is here. Raises what loading its kernels raises when the device is `wanted`, or a CPU."""
    try:
        load_backend(job.execution.device, threads=job.execution.threads)
    except MokError:
        if wanted or job.execution.device == "cpu":
            raise
        return override_execution(job, {"device": "cpu"})
    return job


def _replayed(
    folder: Path, record: Mapping[str, Any], chain: Sequence[StepRecord], plan: Plan, job: JobSpec, data: Data,
    drift: Sequence[str], told: Told,
) -> Finding | None:
    """The first difference; None if there is none."""
    last = chain[-1].step
    try:
        for got in _records(folder, record, plan, job, data):                               # 2
            last = got.step
            finding = compare_step(chain[got.step], got, drift)                             # 3
            if finding is not None:
                return finding
            told(got, plan.done(got.step), plan.steps)
    except SourceDrift as fault:
        return Finding("INCONCLUSIVE", f"the data here are not those of the record: {fault.message}", "manifest")
    except Tampered as fault:
        return Finding.tampered(fault, "checkpoint")
    except Diverged as fault:
        return excused(fault.detail["finding"], drift)
    except NonFinite as fault:
        return excused(Finding("DIVERGED", f"{fault.message}; the record goes on", "loss", last, None, "not finite"), drift)
    return None


def _records(
    folder: Path, record: Mapping[str, Any], plan: Plan, job: JobSpec, data: Data
) -> Iterator[StepRecord]:
    manifest = DataManifest.from_document(record["data"]["manifest"])
    data_roots, sources = data
    corpus = open_corpus(job.training.data, data_roots, job.training.model.vocabulary_size, manifest, sources)
    backend = load_backend(job.execution.device, threads=job.execution.threads, own_stream=True)
    stored = {c["step"]: CheckpointInfo.from_dict(c) for c in record["checkpoints"] if not c["deleted_at"]}
    store = CheckpointStore(folder / CHECKPOINTS)
    start = initial_weights(job, data_roots, None)
    return replay(job, corpus, backend, plan.segments, stored, store.load, initial_weights=start)


def _end_of_rerun(record: Mapping[str, Any], chain: Sequence[StepRecord], drift: Sequence[str]) -> Finding:
    identity, last = record["identity"], chain[-1].step
    original = Ending(identity["status"], identity["stop_reason"], last)
    return compare_ends(original, Ending("succeeded" if original.status == "succeeded" else "stopped", None, last), drift)

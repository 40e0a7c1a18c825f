"""A verification that runs, against the run that it verifies: each record as it is appended, and the verdict when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection

from mok_service.db import queries
from mok_service.lifecycle import FINAL, StopReason
from mok_service.provenance.audit import Plan, audited, report
from mok_service.provenance.chain import StepRecord
from mok_service.provenance.checkpoint import CheckpointInfo
from mok_service.provenance.digest import Digest
from mok_service.provenance.record import code_drift
from mok_service.provenance.verify import Ending, Finding, compare_ends, compare_step, excused
from mok_service.runs.rows import Row, record_of

if TYPE_CHECKING:
    from mok_service.runs.locked import LockedRun

_STOPS: Final[dict[str, StopReason]] = {"DIVERGED": "diverged", "INCONCLUSIVE": "source_drift", "TAMPERED": "tampered"}


def is_compared(run: LockedRun) -> bool:
    """Whether the run verifies another one, and there is no verdict yet."""
    return run["reproduces"] is not None and run["verdict"] is None


def plan_of(tx: Connection, run_id: str, kind: str) -> Plan | None:
    """What an audit is to replay; None for a run that trains."""
    if kind != "audit":
        return None
    row = queries.verification_by(tx, run_id)
    assert row is not None, "an audit carries out a verification"
    return Plan.from_document(row["plan"])


def originals(run: LockedRun, steps: Sequence[int]) -> dict[int, Row]:
    """The verified run's rows of these steps; none for a run that isn't compared."""
    if not is_compared(run):
        return {}
    return {row["step"]: row for row in queries.steps_at(run.tx, run["reproduces"], steps)}


def compare_record(run: LockedRun, original: Row | None, record: StepRecord, now: datetime) -> None:
    """Ends a verification, with a verdict, at the first record that isn't the one on file, or where that contradicts itself."""
    if not is_compared(run):
        return
    if original is None:
        if run["kind"] == "audit":
            message = f"step {record.step}: there is no record of this step any more"
            _stop(run, Finding("TAMPERED", message, "step", record.step), now)
        return
    expected = record_of(original)
    finding = compare_step(expected, record)
    if expected.head() != original["head"]:
        what = "head" if finding is None else finding.field
        message = (f"step {record.step}: the record on file hashes to {expected.head()}, and is stored as {original['head']}"
                   + ("" if finding is None else f"; {finding.message}"))
        finding = Finding("TAMPERED", message, what, record.step, str(original["head"]), str(expected.head()))
    if finding is not None:
        _stop(run, finding, now, original["attempt"])


def compare_checkpoint(run: LockedRun, info: CheckpointInfo, now: datetime) -> None:
    """Ends a rerun at the first checkpoint that isn't the state in the original's of that step: not every step's record has the
    state's digest."""
    original = queries.checkpoint(run.tx, run["reproduces"], info.step) if is_compared(run) else None
    if original is None:
        return
    for part, got in info.state.as_dict().items():
        if str(original[part]) != got:
            message = f"step {info.step}: the {part} in the checkpoint expected {original[part]}, got {got}"
            _stop(run, Finding("DIVERGED", message, part, info.step, str(original[part]), got), now)
            return


def _stop(run: LockedRun, finding: Finding, now: datetime, attempt: int | None = None) -> None:
    reason, message = conclude(run, finding, now, attempt)
    run.stop(reason, now, message)


def conclude(run: LockedRun, finding: Finding, now: datetime, attempt: int | None = None) -> tuple[StopReason, str]:
    """Stores a difference as the verdict; how the run is to stop, and its message.

    Where the code differs from that of the verified run (of this attempt, or the last), a difference says nothing about it.
    """
    if finding.verdict == "DIVERGED":
        theirs = _last_environment(run, run["reproduces"]) if attempt is None else _environment(run, run["reproduces"], attempt)
        finding = excused(finding, code_drift(theirs, _environment(run, run.id, run["attempt"])))
    run.conclude(now, **finding.as_dict())
    return _STOPS[finding.verdict], finding.message


def source_drift(run: LockedRun, expected: Digest | None, got: Digest | None, message: str, now: datetime) -> None:
    """The data isn't the job's: the run ends, and for a verification nothing can be said."""
    if is_compared(run):
        run.conclude(now, **Finding("INCONCLUSIVE", message, "manifest", None, _text(expected), _text(got)).as_dict())
    run.stop("source_drift", now, message)


def conclude_if_ended(run: LockedRun) -> None:
    """The verdict on a verification that has ended without a difference. One that was cancelled says how far it came."""
    if run["status"] not in FINAL or not is_compared(run):
        return
    original = queries.run(run.tx, run["reproduces"])
    assert original is not None
    now = run["ended_at"]
    if run["kind"] == "bisect":
        _end_of_bisect(run, now)
        return
    drift = code_drift(_last_environment(run, original["id"]), _last_environment(run, run.id))
    plan = plan_of(run.tx, run.id, run["kind"])
    if run["stop_reason"] == "non_finite" and _went_on(run, plan):
        conclude(run, Finding("DIVERGED", f"{run['message']}; the record goes on", "loss", run["step"], None, "not finite"), now)
        return
    finding = compare_ends(_ending(original), _ending(run.row), drift) if plan is None else _end_of_audit(run, plan, drift)
    assert finding.verdict != "REPRODUCED" or original["head"] == run["head"], "equal records have equal heads"
    if run["status"] == "cancelled":
        run.conclude(now, message=finding.message)
    else:
        told = report(plan) if plan is not None and finding.verdict == "AUDITED" else None
        run.conclude(now, **finding.as_dict(), report=told)


def conclude_bisect(run: LockedRun, finding: Finding, report: Mapping[str, Any] | None, now: datetime) -> None:
    """Stores what a bisect found. Both sides were computed by one worker, so a difference between them is none of its code's;
    but where its code isn't that of a run, that may be why the run's record doesn't recur."""
    if finding.verdict == "INCONCLUSIVE":
        row, own = queries.verification_by(run.tx, run.id), _last_environment(run, run.id)
        assert row is not None, "a bisect carries out a verification"
        for compared in filter(None, (row["run_id"], row["against"])):
            drift = code_drift(_last_environment(run, compared), own)
            if drift:
                message = f"{finding.message}. The code differs from that of {compared} ({'; '.join(drift)})"
                finding = replace(finding, message=message)
    run.conclude(now, **finding.as_dict(), report=report)


def _end_of_bisect(run: LockedRun, now: datetime) -> None:
    """Of one that came to no conclusion. (Where it came to one, that is on file.)"""
    why = f": {run['message']}" if run["message"] else ""
    message = f"the bisect was {run['status']} ({run['stop_reason']}){why}"
    if run["status"] == "cancelled":
        run.conclude(now, message=message)
    else:
        run.conclude(now, **Finding("INCONCLUSIVE", message).as_dict())


def _went_on(run: LockedRun, plan: Plan | None) -> bool:
    """Whether the verified run has a record of the step that this one couldn't compute."""
    step = (-1 if run["step"] is None else run["step"]) + 1 if plan is None else plan.next_step(run["step"])
    return step is not None and bool(queries.steps_at(run.tx, run["reproduces"], [step]))


def _end_of_audit(run: LockedRun, plan: Plan, drift: Sequence[str]) -> Finding:
    if run["status"] == "succeeded":
        return audited(plan, drift)
    equal = f"{plan.done(run['step'])} of the {plan.steps} steps to replay gave the bits on record"
    why = f": {run['message']}" if run["message"] else ""
    return Finding("INCONCLUSIVE", f"{equal}, then the audit was {run['status']} ({run['stop_reason']}){why}", step=run["step"])


def _ending(row: Row) -> Ending:
    return Ending(row["status"], row["stop_reason"], row["step"])


def _environment(run: LockedRun, run_id: str, attempt: int) -> dict[str, Any] | None:
    row = queries.attempt(run.tx, run_id, attempt)
    return None if row is None else row["environment"]


def _last_environment(run: LockedRun, run_id: str) -> dict[str, Any] | None:
    """Of the last attempt that reported one."""
    found = [row["environment"] for row in queries.attempts_of(run.tx, run_id) if row["environment"] is not None]
    return found[-1] if found else None


def _text(digest: Digest | None) -> str | None:
    return None if digest is None else str(digest)

"""A reproduction against its original: each record as it is appended, and the verdict when it ends."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from mok_service.db import queries
from mok_service.lifecycle import FINAL, StopReason
from mok_service.provenance.chain import StepRecord
from mok_service.provenance.digest import Digest
from mok_service.provenance.record import code_drift
from mok_service.provenance.verify import Ending, Finding, compare_ends, compare_step
from mok_service.runs.rows import Row, record_of

if TYPE_CHECKING:
    from mok_service.runs.locked import LockedRun

_STOPS: Final[dict[str, StopReason]] = {"DIVERGED": "diverged", "INCONCLUSIVE": "source_drift"}


def is_compared(run: LockedRun) -> bool:
    """Whether the run is a reproduction on which there is no verdict yet."""
    return run["reproduces"] is not None and run["verdict"] is None


def originals(run: LockedRun, first: int, last: int) -> dict[int, Row]:
    """The original's step rows `first` to `last`, by step; none for a run that isn't compared."""
    if not is_compared(run):
        return {}
    return {row["step"]: row for row in queries.steps_between(run.tx, run["reproduces"], first, last)}


def compare_record(run: LockedRun, original: Row | None, record: StepRecord, now: datetime) -> None:
    """Ends a reproduction, with a verdict, at the first record that isn't the original's."""
    if original is None or not is_compared(run):
        return
    expected = record_of(original)
    if compare_step(expected, record) is None:
        return
    drift = code_drift(_environment(run, run["reproduces"], original["attempt"]), _environment(run, run.id, run["attempt"]))
    finding = compare_step(expected, record, drift)
    assert finding is not None
    _conclude(run, finding, now)
    run.stop(_STOPS[finding.verdict], now, finding.message)


def source_drift(run: LockedRun, expected: Digest | None, got: Digest | None, message: str, now: datetime) -> None:
    """The data isn't the job's: the run ends, and for a reproduction nothing can be said."""
    if is_compared(run):
        _conclude(run, Finding("INCONCLUSIVE", message, "manifest", None, _text(expected), _text(got)), now)
    run.stop("source_drift", now, message)


def conclude_if_ended(run: LockedRun) -> None:
    """The verdict on a reproduction that has ended without a difference."""
    if run["status"] not in FINAL or not is_compared(run):
        return
    original = queries.run(run.tx, run["reproduces"])
    assert original is not None
    drift = code_drift(_last_environment(run, original["id"]), _last_environment(run, run.id))
    finding = compare_ends(_ending(original), _ending(run.row), drift)
    assert finding.verdict != "REPRODUCED" or original["head"] == run["head"], "equal records have equal heads"
    _conclude(run, finding, run["ended_at"])


def _conclude(run: LockedRun, finding: Finding, now: datetime) -> None:
    run.set(verdict=finding.verdict)
    run.add_verification(now, compares_with=run["reproduces"], level="rerun", **finding.as_dict())


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

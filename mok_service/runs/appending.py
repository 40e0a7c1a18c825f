"""Storing what an attempt reports: step records, log lines, checkpoints. Nothing stored is ever overwritten."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from mok_service.db import lineage, queries, tables
from mok_service.db.session import Database
from mok_service.errors import Conflict
from mok_service.provenance.audit import Plan
from mok_service.provenance.bisection import Doing
from mok_service.provenance.chain import StepRecord, first_difference, genesis
from mok_service.provenance.checkpoint import CheckpointInfo
from mok_service.provenance.digest import Digest
from mok_service.runs.comparing import compare_checkpoint, compare_record, originals, plan_of
from mok_service.runs.leases import stop_of
from mok_service.runs.locked import LockedRun, leased
from mok_service.runs.rows import checkpoint_row, record_of, step_row
from mok_service.runs.types import AppendResult, Lease, LogLine, finite_or_none

# After these the attempt's records are worth nothing: what it still sends is dropped.
_CLOSED: Final = frozenset({"nondeterministic", "diverged", "tampered", "source_drift", "internal"})


def append(db: Database, lease: Lease, records: Sequence[StepRecord], logs: Sequence[LogLine] = (),
           checkpoints: Sequence[CheckpointInfo] = (), now: datetime | None = None, doing: Doing | None = None) -> AppendResult:
    """Stores what an attempt did, in one transaction. Sending the same again changes nothing.

    Records come in order of steps, without gaps after what is stored. A step that is stored already must have the same
    body: another one ends the run as nondeterministic, naming step and field. A reproduction's records are compared with
    the original's: the first difference ends it, with a stored verification. A checkpoint comes with or after the record of
    its step. `doing` is what a bisect is at. Raises Conflict for a gap and for a checkpoint without a record, LeaseLost when
    another attempt has the run.
    """
    at = now if now is not None else db.now()
    with leased(db, lease) as run:
        if not _was_marked_running(run):
            raise Conflict(f"run {run.id} is {run['status']}: an attempt must be marked running before it appends", run=run.id)
        _store_logs(run, lease.attempt, logs, at)
        if doing is not None:
            run.progress(doing, at)
        if run["stop_reason"] not in _CLOSED:
            _store_records(run, records, at)
        if run["stop_reason"] not in _CLOSED:
            for info in checkpoints:
                _store_checkpoint(run, info, at)
                compare_checkpoint(run, info, at)
        return stop_of(run)


def _was_marked_running(run: LockedRun) -> bool:
    """So that the environment that made the records is on file. An attempt may be told to stop before it was ready."""
    if run["status"] != "stopping":
        return bool(run["status"] == "running")
    attempt = queries.attempt(run.tx, run.id, run["attempt"])
    return attempt is not None and attempt["running_at"] is not None


def _store_records(run: LockedRun, records: Sequence[StepRecord], now: datetime) -> None:
    if not records:
        return
    steps = [record.step for record in records]
    stored = {row["step"]: row for row in queries.steps_at(run.tx, run.id, steps)}
    theirs, plan = originals(run, steps), plan_of(run.tx, run.id, run["kind"])
    fresh: list[dict[str, Any]] = []
    for record in records:
        known = stored.get(record.step)
        if known is not None:
            expected, by = record_of(known), f"attempt {known['attempt']}"
            difference = first_difference(expected, record)
        else:
            difference, by = _broken_link(run, record, plan), "the record before it"
        if difference is not None:
            _nondeterministic(run, record.step, by, difference, now)
            compare_record(run, theirs.get(record.step), record, now)
            break
        if known is None:
            fresh.append(_new_row(run, record, now))
            compare_record(run, theirs.get(record.step), record, now)
        run.set_attempt(last_step=record.step)
        if run["stop_reason"] in _CLOSED:
            break
    queries.add(run.tx, tables.step_records, fresh)


def _broken_link(run: LockedRun, record: StepRecord, plan: Plan | None) -> tuple[str, Any, Any] | None:
    """The difference in `previous` of a record that is the next one; Conflict if it isn't the next one.

    An audit's records aren't a chain of their own: each is compared with the audited run's, links and all.
    """
    following = (0 if run["step"] is None else run["step"] + 1) if plan is None else plan.next_step(run["step"])
    if record.step != following:
        raise Conflict(f"run {run.id}: step {record.step} was sent, and the next one is step {following}", run=run.id,
                       step=record.step, expected=following)
    if plan is not None:
        return None
    expected = run["head"] if following else _genesis(run, record)
    return None if record.previous == expected else ("previous", str(expected), str(record.previous))


def _genesis(run: LockedRun, record: StepRecord) -> Digest:
    job = queries.job(run.tx, run["job_id"])
    assert job is not None and job["manifest_digest"] is not None, "mark_running has written the manifest"
    if record.state is None:
        raise Conflict(f"run {run.id}: step record 0 has no initial state", run=run.id, step=0)
    return genesis(job["training_digest"], job["manifest_digest"], job["training"]["arithmetic"], record.state.weights)


def _nondeterministic(run: LockedRun, step: int, by: str, difference: tuple[str, Any, Any], now: datetime) -> None:
    field, expected, got = difference
    run.stop("nondeterministic", now, f"nondeterministic at step {step}: {field} expected {expected} ({by}), got {got} "
                                      f"(attempt {run['attempt']})")


def _new_row(run: LockedRun, record: StepRecord, now: datetime) -> dict[str, Any]:
    head = record.head()
    run.set(step=record.step, head=head, updated_at=now)
    run.event("step", {
        "step": record.step, "attempt": run["attempt"], "loss": finite_or_none(record.loss), "loss_bits": record.loss_bits,
        "grad_norm": finite_or_none(record.grad_norm), "tokens": record.tokens, "head": str(head),
        "learning_rate": finite_or_none(record.learning_rate), "seconds": finite_or_none(record.seconds),
    }, now)
    return {**step_row(record, head), "run_id": run.id, "tenant": run["tenant"], "attempt": run["attempt"], "created_at": now}


def _store_checkpoint(run: LockedRun, info: CheckpointInfo, now: datetime) -> None:
    """A checkpoint must be the state that the chain has at its step. Committed again by a later attempt, its files may have
    other bytes (a file's metadata are no part of the state), so the row tells of the files that are there now."""
    rows = queries.steps_between(run.tx, run.id, info.step, info.step)
    if not rows:
        raise Conflict(f"run {run.id}: a checkpoint of step {info.step} was sent, and there is no record of that step",
                       run=run.id, step=info.step)
    new, record = checkpoint_row(info), rows[0]
    for name in ("head", "weights", "optimizer", "cursor"):
        if record[name] is not None and record[name] != new[name]:
            _nondeterministic(run, info.step, "its record", (f"{name} of the checkpoint", record[name], new[name]), now)
            return
    stored = queries.checkpoint(run.tx, run.id, info.step)
    if stored is None:
        queries.add(run.tx, tables.checkpoints, [{**new, "run_id": run.id, "tenant": run["tenant"], "attempt": run["attempt"],
                                                  "created_at": now}])
    else:
        for name in ("weights", "optimizer", "cursor"):
            if stored[name] != new[name]:
                difference = (f"{name} of the checkpoint", stored[name], new[name])
                _nondeterministic(run, info.step, f"attempt {stored['attempt']}", difference, now)
                return
        if (stored["files"], stored["folder"], stored["deleted_at"]) == (new["files"], new["folder"], None):
            return
        queries.update_checkpoint(run.tx, run.id, info.step, {
            "files": new["files"], "folder": new["folder"], "size": new["size"], "attempt": run["attempt"], "deleted_at": None,
        })
    lineage.add_uses(run.tx, run["tenant"], run.id, lineage.CHECKPOINT_FILE, info.step,
                     ((file.name, Digest("sha256", file.sha256)) for file in info.files))
    run.event("checkpoint", {"step": info.step, "attempt": run["attempt"], "size": new["size"], "head": str(info.head),
                             "weights": str(info.state.weights)}, now)


def _store_logs(run: LockedRun, attempt: int, lines: Sequence[LogLine], now: datetime) -> None:
    """Lines that are new, by their number in the attempt."""
    if not lines:
        return
    last = queries.last_log_sequence(run.tx, run.id, attempt)
    fresh = [line for line in sorted(lines, key=lambda line: line.sequence) if last is None or line.sequence > last]
    rows = []
    for line in fresh:
        number = run["log_count"] + 1
        run.set(log_count=number)
        rows.append({"run_id": run.id, "number": number, "tenant": run["tenant"], "attempt": attempt, "sequence": line.sequence,
                     "level": line.level, "step": line.step, "message": line.message, "created_at": line.at})
        run.event("log", {"number": number, "attempt": attempt, "level": line.level, "step": line.step,
                          "message": line.message}, now)
    queries.add(run.tx, tables.logs, rows)

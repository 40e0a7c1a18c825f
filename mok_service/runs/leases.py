"""A scheduler's work on one run: claim it, start it, keep it, end it. Every write is fenced by the lease's token."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection

from mok_service.db import lineage, queries, queue, tables
from mok_service.db.ids import new_id
from mok_service.db.session import Database
from mok_service.lifecycle import AttemptEnd, DesiredState, StopReason
from mok_service.placement import Held, Room
from mok_service.provenance.digest import Digest
from mok_service.provenance.manifest import DataManifest
from mok_service.runs.comparing import conclude, conclude_bisect, is_compared, source_drift
from mok_service.runs.locked import LockedRun, final_status, lease_lost, leased
from mok_service.runs.queue import Fits, choose, order, remembered
from mok_service.runs.rows import Row, run_of
from mok_service.runs.standing import read_queue
from mok_service.runs.types import AppendResult, Capacity, Lease, Outcome, Run
from mok_service.spec import ExecutionSpec


def claim(db: Database, now: datetime, worker: str, capacity: Capacity, *, lease_seconds: float = 30.0,
          boot_id: str = "") -> Lease | None:
    """Takes the run whose turn it is by the order of the queue (docs/queue.md); None when none may start.

    `capacity` says what has room on the cluster beside the active runs of every scheduler, and on which node. Claims come one
    after the other, under a lock, so that several schedulers never take more than there is. The attempt's row, with its node,
    is inserted in the same transaction.
    """
    with db.write() as tx:
        queries.lock_claims(tx)
        found = _next_run(tx, now, capacity)
        if found is None:
            return None
        row, node = found
        run = LockedRun(tx, row)
        lease = Lease(run.id, run["attempt"] + 1, secrets.token_hex(16), now + timedelta(seconds=lease_seconds), lease_seconds,
                      run["tenant"], node)
        queries.add(tx, tables.attempts, [{
            "run_id": run.id, "attempt": lease.attempt, "id": new_id("att"), "tenant": run["tenant"], "worker": worker,
            "boot_id": boot_id, "claimed_at": now, "from_step": run["step"], "from_head": run["head"],
            "node": node,
        }])
        run.set(attempt=lease.attempt, lease_token=lease.token, lease_worker=worker, lease_boot=boot_id, retry_at=None,
                lease_expires_at=lease.expires_at, started_at=run["started_at"] or now)
        run.transition("claimed", now)
        run.save()
        return lease


def _next_run(tx: Connection, now: datetime, capacity: Capacity) -> tuple[Row, str | None] | None:
    """The row, locked, of the run that the order of the queue gives its turn (runs/queue.py), and the node for it."""
    seen = read_queue(tx, now)
    fits, left = remembered(room_of(capacity)), order(seen.queued, seen.active, seen.shares, now)
    while (choice := choose(left, seen.active, fits, seen.shares, now)) is not None:
        row = queries.lock_candidate(tx, choice.run.id, now)
        if row is not None:
            if choice.passed is None:
                queue.put_turn(tx, choice.run.execution.priority, now)
            return row, choice.node
        left = [run for run in left if run != choice.run]  # its user is cancelling it at this moment
    return None


def room_of(capacity: Capacity) -> Fits:
    """Whether a run has room beside others, where only the number of devices of each kind matters."""
    if not isinstance(capacity, Mapping):
        return capacity

    def fits(candidate: ExecutionSpec, active: Sequence[Held]) -> Room | None:
        used = sum(held.execution.count for held in active if held.execution.device == candidate.device)
        return Room() if used + candidate.count <= capacity.get(candidate.device, 0) else None

    return fits


def renew(db: Database, lease: Lease, now: datetime) -> DesiredState:
    """Prolongs the lease to `now + lease.lease_seconds`, and says what to do with the attempt.

    "run": go on. "pause": stop it with a checkpoint. "cancel": stop it; a checkpoint is of no use. After both: `finish`.
    "cancel" also tells of run deadlines and the like: how the run ends is decided by its own stop reason.
    """
    with db.write() as tx:
        row = queries.renew_lease(tx, lease.run_id, lease.token, now + timedelta(seconds=lease.lease_seconds))
    if row is None:
        raise lease_lost(lease)
    if row["status"] != "stopping":
        return "run"
    return "pause" if row["stop_reason"] == "user_paused" else "cancel"


def mark_starting(db: Database, lease: Lease, now: datetime) -> None:
    """To be called before anything is made for the attempt (placement group, actor): from here on devices may be held.

    A run that was cancelled after its claim has no lease any more, so LeaseLost says that nothing is to be made.
    """
    with leased(db, lease) as run:
        run.transition("starting", now)
        run.set_attempt(started_at=now)


def mark_running(db: Database, lease: Lease, now: datetime, environment: Mapping[str, Any], placement: Mapping[str, Any],
                 manifest: DataManifest) -> AppendResult:
    """The worker is ready to step: its environment and placement go on record, its data are compared with the job's.

    The first attempt of a job's first run writes the job's manifest, once and for ever. Other data end the run (source_drift).
    """
    with leased(db, lease) as run:
        run.set_attempt(running_at=now, environment=dict(environment), placement=dict(placement))
        native = (environment.get("code") or {}).get("native") or {}
        lineage.add_uses(run.tx, run["tenant"], run.id, lineage.NATIVE_LIBRARY, lease.attempt,
                         ((name, Digest.parse(digest)) for name, digest in native.items()))
        if run["status"] != "stopping":
            run.transition("running", now)
            if run["run_deadline_at"] is None:
                run.set(run_deadline_at=now + timedelta(seconds=run["execution"]["run_deadline_seconds"]))
        _compare_manifest(run, manifest, now)
        return stop_of(run)


def _compare_manifest(run: LockedRun, manifest: DataManifest, now: datetime) -> None:
    job = queries.job(run.tx, run["job_id"], lock=True)
    assert job is not None
    got = manifest.digest()
    if job["manifest"] is None:
        queries.update_job(run.tx, run["job_id"], {"manifest": manifest.document(), "manifest_digest": got})
        lineage.add_manifest(run.tx, run["tenant"], got, ((file.name, Digest("sha256", file.sha256)) for file in manifest.files))
    elif job["manifest_digest"] != got:
        expected = DataManifest.from_document(job["manifest"])
        source_drift(run, job["manifest_digest"], got, f"the data are not the job's: {_first_change(expected, manifest)}", now)


def _first_change(expected: DataManifest, got: DataManifest) -> str:
    """A sentence that names the first file, by name, in which two manifests differ."""
    left, right = {f.name: f for f in expected.files}, {f.name: f for f in got.files}
    for name in sorted(left.keys() | right.keys()):
        a, b = left.get(name), right.get(name)
        if a is None or b is None:
            return f"file {name!r} {'is new' if a is None else 'is gone'}"
        if a != b:
            return f"file {name!r}: expected {a.size} bytes, sha256:{a.sha256}; got {b.size} bytes, sha256:{b.sha256}"
    for field in ("source", "tokenizer", "tokens", "order"):
        if getattr(expected, field) != getattr(got, field):
            return f"{field}: expected {getattr(expected, field)}, got {getattr(got, field)}"
    return "the files are read in another order"


def stop_of(run: LockedRun) -> AppendResult:
    """What the scheduler is told after a write: the stop reason of a run that is to stop."""
    stopping = run["status"] == "stopping"
    return AppendResult(run["stop_reason"] if stopping else None, run["message"] if stopping else None)


def finish(db: Database, lease: Lease, outcome: Outcome, now: datetime) -> Run:
    """The attempt is over and its devices are free: the run ends, or is paused.

    If the run already has a stop reason (the user cancelled, it diverged), that one decides, so each contest has one winner.
    It succeeds only with every step stored, a checkpoint of the last one on record, and the digests that the worker states;
    otherwise it fails as `internal`, naming what is missing.
    """
    assert final_status(outcome.stop_reason) == outcome.status, f"{outcome.stop_reason} doesn't end as {outcome.status}"
    with leased(db, lease) as run:
        reason, message = outcome.stop_reason, outcome.message
        if reason == "finished":
            missing = _missing_proof(run, outcome)
            reason, message = ("internal", f"it can't count as succeeded: {missing}") if missing else (reason, message)
        if reason == "source_drift" and run["status"] != "stopping":
            _source_drift_at_worker(run, message or "the data changed", now)
        free = run["status"] != "stopping" or run["stop_reason"] == "user_paused"  # a conclusion comes before a pause
        if outcome.finding is not None and is_compared(run) and free:
            if run["kind"] == "bisect":
                conclude_bisect(run, outcome.finding, outcome.report, now)
            else:
                reason, message = conclude(run, outcome.finding, now)
        run.stop(reason, now, message)
        if run["stop_reason"] == "finished":
            run.set(weights=outcome.weights)
        run.end_attempt(_attempt_end(run["stop_reason"]), run["message"], now)
        run.settle(now)
    return run_of(run.row)


def _source_drift_at_worker(run: LockedRun, message: str, now: datetime) -> None:
    job = queries.job(run.tx, run["job_id"])
    assert job is not None
    source_drift(run, job["manifest_digest"], None, message, now)


def _missing_proof(run: LockedRun, outcome: Outcome) -> str | None:
    """What a run lacks that says it's finished, as a sentence; None when it lacks nothing."""
    steps = run["steps"]
    if run["kind"] == "bisect":
        return "it found nothing" if outcome.finding is None else None
    if run["step"] != steps:
        return f"the last step on record is {run['step']}, of {steps}"
    if run["kind"] == "audit":
        return None
    last = queries.steps_between(run.tx, run.id, steps, steps)[0]
    checkpoint = queries.checkpoint(run.tx, run.id, steps)
    if checkpoint is None:
        return f"there is no checkpoint of step {steps}"
    for name, stated, stored in (
        ("weights", outcome.weights, last["weights"]), ("weights of the checkpoint", checkpoint["weights"], last["weights"]),
        ("head", outcome.head, run["head"]),
    ):
        if stored is None or stated != stored:
            return f"{name} of step {steps}: on record {stored}, stated {stated}"
    return None


def _attempt_end(reason: StopReason) -> AttemptEnd:
    if reason == "out_of_memory":
        return "out_of_memory"
    return {"succeeded": "finished", "failed": "failed"}.get(final_status(reason), "stopped")  # type: ignore[return-value]


def release(db: Database, lease: Lease, why: AttemptEnd, message: str, now: datetime, retry_at: datetime | None = None) -> Run:
    """The attempt is over, the run is not: it goes back to the queue, or fails when its attempts are exhausted or the cause
    isn't worth another (see `LockedRun.lose_attempt`). A run that was to stop anyway ends as it was to.

    `retry_at` is when it may be claimed again; by default after 2, 4, 8 ... up to 300 seconds, at once if nothing failed.
    """
    with leased(db, lease) as run:
        run.end_attempt(why, message, now)
        run.lose_attempt(why, message, now, retry_at)
    return run_of(run.row)

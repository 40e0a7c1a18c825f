"""What users want of a run: durable intent, carried out at once where nothing runs, else by the scheduler."""

from __future__ import annotations

from datetime import datetime

from mok_service.db import lineage, queries
from mok_service.db.session import Database
from mok_service.errors import Conflict, NotFound
from mok_service.lifecycle import FINAL
from mok_service.runs.locked import LockedRun, locked
from mok_service.runs.rows import checkpoint_of, run_of
from mok_service.runs.types import Run, StoredCheckpoint


def cancel(db: Database, run_id: str, tenant: str = "local", now: datetime | None = None) -> Run:
    """Ends a run. One that nothing was made for is `cancelled` at once; another is `stopping` until its devices are free.

    Cancelling again changes nothing. Raises Conflict when the run ended, or is ending, for another reason.
    """
    at = now if now is not None else db.now()
    with locked(db, run_id, tenant) as run:
        if run["status"] == "cancelled" or run["stop_reason"] == "user_cancelled":
            return run_of(run.row)
        _refuse_if_over(run, "cancelled")
        run.want("cancel", at)
        if run["status"] == "claimed":  # nothing has been made yet: mark_starting will find its lease gone
            run.end_attempt("stopped", "cancelled before it started", at)
        if run["status"] in ("queued", "paused", "claimed"):
            run.transition("cancelled", at, "user_cancelled")
        else:
            run.stop("user_cancelled", at)
    return run_of(run.row)


def pause(db: Database, run_id: str, tenant: str = "local", now: datetime | None = None) -> Run:
    """Rests a run: no attempt is made until `resume`. One that runs stops with a checkpoint, and loses nothing.

    Pausing again changes nothing. Raises Conflict when the run has ended or is ending.
    """
    at = now if now is not None else db.now()
    with locked(db, run_id, tenant) as run:
        _refuse_if_over(run, "paused")
        run.want("pause", at)
        if run["status"] == "claimed":
            run.end_attempt("stopped", "paused before it started", at)
            run.transition("queued", at)
        if run["status"] == "queued":
            run.transition("paused", at, "user_paused")
        elif run["status"] != "paused":
            run.stop("user_paused", at)
    return run_of(run.row)


def resume(db: Database, run_id: str, tenant: str = "local", now: datetime | None = None) -> Run:
    """Queues a paused run again; one that is still stopping for a pause is queued as soon as it has stopped.

    Changes nothing for a run that wasn't paused. Raises Conflict when the run has ended or is ending.
    """
    at = now if now is not None else db.now()
    with locked(db, run_id, tenant) as run:
        _refuse_if_over(run, "resumed")
        run.want("run", at)
        if run["status"] == "paused":
            run.transition("queued", at)
    return run_of(run.row)


def _refuse_if_over(run: LockedRun, wanted: str) -> None:
    status, reason = run["status"], run["stop_reason"]
    if status in FINAL or (status == "stopping" and reason != "user_paused"):
        raise Conflict(f"run {run.id} can't be {wanted}: it is {status} ({reason})", run=run.id, status=status,
                       stop_reason=reason)


def checkpoint_deleted(db: Database, run_id: str, step: int, tenant: str = "local",
                       now: datetime | None = None) -> StoredCheckpoint:
    """Records that a checkpoint's bytes are to go; its digests stay. To be called before the bytes are removed.

    Raises NotFound when there is none, Conflict while something that hasn't ended could need it: the run itself, an audit or a
    bisect of it, a run that starts from it.
    """
    at = now if now is not None else db.now()
    with locked(db, run_id, tenant) as run:
        row = queries.checkpoint(run.tx, run_id, step)
        if row is None:
            raise NotFound(f"run {run_id} has no checkpoint of step {step}", run=run_id, step=step)
        if run["status"] not in FINAL:
            raise Conflict(f"run {run_id} is {run['status']} and may resume from its checkpoint of step {step}", run=run_id,
                           step=step)
        other = lineage.needs_checkpoint(run.tx, run_id, row["weights"])
        if other is not None:
            raise Conflict(f"run {other['id']} ({other['kind']}) may need the checkpoint of step {step} of run {run_id}",
                           run=run_id, step=step, needed_by=other["id"])
        if row["deleted_at"] is None:
            queries.update_checkpoint(run.tx, run_id, step, {"deleted_at": at})
            run.event("checkpoint", {"step": step, "attempt": row["attempt"], "size": row["size"], "head": str(row["head"]),
                                     "weights": str(row["weights"]), "deleted": True}, at)
        return checkpoint_of({**row, "deleted_at": row["deleted_at"] or at})

"""What time does to runs: leases that expire, deadlines that pass, a service that was started anew."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from mok_service.db import queries, queue
from mok_service.db.session import Database
from mok_service.lifecycle import ACTIVE
from mok_service.runs.locked import LockedRun, run_deadline_message


def reap(db: Database, now: datetime) -> list[str]:
    """Ends expired leases (the run is queued again, fails, or ends as it was to) and fails runs past a deadline.

    Returns the ids of the runs that changed. A run past its run deadline whose attempt still lives is told to stop, by `renew`.
    """
    with db.read() as tx:
        overdue = queue.overdue_runs(tx, now)
    return [run_id for run_id in overdue if _reap_one(db, run_id, now)]


def _reap_one(db: Database, run_id: str, now: datetime) -> bool:
    """Looks again under the lock: whoever held the lease may have renewed it in the meantime."""
    with db.write() as tx:
        row = queries.lock_run(tx, run_id)
        assert row is not None
        run = LockedRun(tx, row)
        changed = True
        if run["lease_token"] is not None and run["lease_expires_at"] <= now:
            message = f"{run['lease_worker']} hasn't renewed its lease since {run['lease_expires_at'].isoformat()}"
            run.end_attempt("lease_expired", message, now)
            run.lose_attempt("lease_expired", message, now, None)
        elif run["status"] == "queued" and _passed(run["run_deadline_at"], now):
            run.transition("failed", now, "run_deadline", run_deadline_message(run.row))
        elif run["status"] == "queued" and _passed(run["queue_deadline_at"], now):
            run.transition("failed", now, "queue_deadline", _queue_message(run))
        elif run["status"] in ACTIVE - {"stopping"} and _passed(run["run_deadline_at"], now):
            run.stop("run_deadline", now, run_deadline_message(run.row))
        else:
            changed = False
        run.save()
        return changed


def _passed(deadline: datetime | None, now: datetime) -> bool:
    return deadline is not None and deadline <= now


def _queue_message(run: LockedRun) -> str:
    """Why a run waited in vain, with what the cluster has, as far as a scheduler has told."""
    nodes = queries.all_nodes(run.tx)
    have = sum(node["capacity"].get(run["device"], 0) for node in nodes)
    there = f"the cluster has {have}" if nodes else "no scheduler has told what the cluster has"
    return (f"it waited for {run['devices']} {run['device']} device(s) for longer than execution.queue_deadline_seconds "
            f"({run['execution']['queue_deadline_seconds']} s); {there}")


def end_leases_of_earlier_boots(db: Database, boot_id: str, now: datetime, worker: str | None = None) -> list[str]:
    """Ends every lease that was taken under another boot id (of this worker, if one is given), without waiting for its expiry.

    For a service that knows it's the only one (it holds the lock of its data folder), or a scheduler whose name is its own.
    Returns the ids of the runs that changed.
    """
    with db.read() as tx:
        found = queries.leases_of_other_boots(tx, boot_id, worker)
    changed = []
    for lease in found:
        with db.write() as tx:
            row: Any = queries.lock_run(tx, lease["id"], token=lease["lease_token"])
            if row is None:
                continue
            run = LockedRun(tx, row)
            run.end_attempt("service_restarted", "the service was started anew", now)
            run.lose_attempt("service_restarted", "the service was started anew", now, None)
            run.save()
            changed.append(run.id)
    return changed


def leased_attempts(db: Database) -> set[tuple[str, int]]:
    """Run and attempt of every lease there is: what else holds devices holds them for nobody."""
    with db.read() as tx:
        return {(row["id"], row["attempt"]) for row in queue.leased_attempts(tx)}

"""A run under its row lock: the one way in which a run changes.

What changes is collected and written once, with its numbered events, in the transaction that holds the lock. So events
have no gaps, and a reader never sees a status without its event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Connection

from mok_service.db import queries, queue, tables
from mok_service.db.ids import is_id, new_id
from mok_service.db.session import Database
from mok_service.errors import Conflict, LeaseLost
from mok_service.lifecycle import ACTIVE, FINAL, AttemptEnd, RunStatus, StopReason, is_legal
from mok_service.provenance.bisection import Doing
from mok_service.runs.comparing import conclude_if_ended
from mok_service.runs.outbox import enqueue
from mok_service.runs.queue import Use
from mok_service.runs.rows import no_such_run
from mok_service.runs.types import EventType, Lease

RETRY_SECONDS_MAX: Final = 300.0

# How a run ends that stopped for this reason. Every other reason: failed.
_ENDS: Final[dict[str, RunStatus]] = {"finished": "succeeded", "user_cancelled": "cancelled", "user_paused": "paused"}


def final_status(reason: StopReason) -> RunStatus:
    """The status in which a run ends (or rests) that stopped for this reason."""
    return _ENDS.get(reason, "failed")


@contextmanager
def locked(db: Database, run_id: str, tenant: str | None = None) -> Iterator[LockedRun]:
    """A transaction on one run. Raises NotFound when there is no such run, or it is another tenant's."""
    with db.write() as tx:
        row = queries.lock_run(tx, run_id, tenant) if is_id(run_id, "run") else None
        if row is None:
            raise no_such_run(run_id)
        run = LockedRun(tx, row)
        yield run
        run.save()


@contextmanager
def leased(db: Database, lease: Lease) -> Iterator[LockedRun]:
    """A transaction on the run of a lease. Raises LeaseLost when the run is no longer this lease's."""
    with db.write() as tx:
        row = queries.lock_run(tx, lease.run_id, token=lease.token)
        if row is None:
            raise lease_lost(lease)
        run = LockedRun(tx, row)
        yield run
        run.save()


def lease_lost(lease: Lease) -> LeaseLost:
    """The error of a late write."""
    return LeaseLost(f"attempt {lease.attempt} of {lease.run_id} has lost its lease: whatever it does must stop",
                     run=lease.run_id, attempt=lease.attempt)


class LockedRun:
    """The row of a run, with what changed since it was locked. `save` writes the changes."""

    def __init__(self, tx: Connection, row: Mapping[str, Any]) -> None:
        self.tx: Final = tx
        self._row = dict(row)
        self._changed: dict[str, Any] = {}
        self._attempt_changed: dict[str, Any] = {}
        self._events: list[dict[str, Any]] = []

    def __getitem__(self, column: str) -> Any:
        return self._row[column]

    @property
    def id(self) -> str:
        run_id: str = self._row["id"]
        return run_id

    @property
    def row(self) -> Mapping[str, Any]:
        """The row as it will be."""
        return self._row

    def set(self, **values: Any) -> None:
        """Changes columns, but never the status: that is `transition`'s."""
        assert "status" not in values, "only transition() changes a status"
        self._row.update(values)
        self._changed.update(values)

    def set_attempt(self, **values: Any) -> None:
        """Changes columns of the current attempt."""
        self._attempt_changed.update(values)

    def event(self, kind: EventType, payload: dict[str, Any], now: datetime) -> None:
        """Adds an event under the run's next number."""
        number = self["event_count"] + 1
        self.set(event_count=number)
        self._events.append({"run_id": self.id, "number": number, "tenant": self["tenant"], "type": kind, "payload": payload,
                             "created_at": now})

    def transition(self, new: RunStatus, now: datetime, reason: StopReason | None = None, message: str | None = None) -> None:
        """The one place where a status changes: checks that the change is legal, and tells it as an event.

        The stop reason is written on entering `stopping` or, from elsewhere, a final state; later ones don't change it.
        Raises Conflict for an illegal change.
        """
        old: RunStatus = self["status"]
        if not is_legal(old, new):
            raise Conflict(f"run {self.id} is {old}, which can't become {new}", run=self.id, status=old, wanted=new)
        self._row["status"] = self._changed["status"] = new
        if (new == "stopping" or new in FINAL or new == "paused") and old != "stopping":
            assert reason is not None, f"a run that becomes {new} has a reason"
            self.set(stop_reason=reason, message=message)
        if new == "queued":
            deadline = timedelta(seconds=self["execution"]["queue_deadline_seconds"])
            self.set(stop_reason=None, message=None, queue_deadline_at=now + deadline)
        elif new in FINAL:
            self.set(ended_at=now, queue_deadline_at=None, run_deadline_at=None, retry_at=None)
            conclude_if_ended(self)  # so that the verdict comes before the last event of the run
        elif new == "paused":
            self.set(queue_deadline_at=None, run_deadline_at=None, retry_at=None)
        self._tell(old, now, message)

    def stop(self, reason: StopReason, now: datetime, message: str | None = None) -> None:
        """Has the attempt stopped. Of several reasons the first one stays, but for a pause, which any other replaces."""
        if self["status"] != "stopping":
            self.transition("stopping", now, reason, message)
        elif self["stop_reason"] == "user_paused" and reason != "user_paused":
            self.set(stop_reason=reason, message=message)
            self._tell("stopping", now, message)

    def want(self, state: str, now: datetime) -> None:
        """Records what the user wants."""
        if self["desired_state"] != state:
            self.set(desired_state=state)
            self._tell(self["status"], now, None)

    def _tell(self, old: RunStatus, now: datetime, message: str | None) -> None:
        self.set(updated_at=now)
        self.event("run.status", {
            "status": self["status"], "from": old, "attempt": self["attempt"], "desired_state": self["desired_state"],
            "stop_reason": self["stop_reason"], "message": message, "verdict": self["verdict"],
        }, now)

    # ---- The end of an attempt ---------------------------------------------------------------------------------------

    def end_attempt(self, why: AttemptEnd, message: str | None, now: datetime) -> None:
        """Ends the current attempt and its lease; late writes of it raise LeaseLost from now on."""
        self._charge(now)
        self.set_attempt(ended_at=now, end_reason=why, message=message)
        self.set(lease_token=None, lease_worker=None, lease_boot=None, lease_expires_at=None)

    def _charge(self, now: datetime) -> None:
        """Adds the attempt to what its tenant used lately."""
        attempt, share = queries.attempt(self.tx, self.id, self["attempt"]), queue.lock_share(self.tx, self["tenant"])
        assert attempt is not None
        use = Use(0.0, now) if share is None else Use(share["used"], share["used_at"])
        use = use.plus(self["devices"], attempt["claimed_at"], now)
        queue.put_share(self.tx, {"tenant": self["tenant"], "used": use.used, "used_at": use.at})

    def settle(self, now: datetime) -> None:
        """From `stopping`, once the devices are free, to where the stop reason leads."""
        assert self["status"] == "stopping" and self["lease_token"] is None
        end = final_status(self["stop_reason"])
        self.transition(end, now, message=self["message"])
        if end == "paused" and self["desired_state"] == "run":  # resumed while it was stopping, or nobody asked for a pause
            self.transition("queued", now)

    def lose_attempt(self, why: AttemptEnd, message: str, now: datetime, retry_at: datetime | None) -> None:
        """After an attempt that didn't bring the run to its end: to the queue again, or failed.

        A lost worker, an expired lease and a failure count against max_attempts; a restarted service counts only if the
        attempt stored nothing new, so that a run which brings the service down isn't retried for ever. Out of memory isn't
        retried: the same run needs the same memory again.
        """
        if self["status"] == "stopping":
            self.settle(now)
            return
        self.set(failures=self["failures"] + self._counts(why))
        if why == "out_of_memory":
            self._fail("out_of_memory", message, now)
        elif self["failures"] >= self["execution"]["max_attempts"]:
            self._fail("attempts_exhausted", f"{self['failures']} attempts failed; the last one: {message}", now)
        elif self["run_deadline_at"] is not None and self["run_deadline_at"] <= now:
            self._fail("run_deadline", run_deadline_message(self.row), now)
        else:
            backoff = min(2.0 ** self["failures"], RETRY_SECONDS_MAX) if self["failures"] else 0.0
            self.transition("queued", now, message=message)
            self.set(retry_at=retry_at or now + timedelta(seconds=backoff))

    def _counts(self, why: AttemptEnd) -> int:
        if why in ("stopped", "finished"):
            return 0
        if why != "service_restarted":
            return 1
        attempt = queries.attempt(self.tx, self.id, self["attempt"])
        assert attempt is not None
        before = -1 if attempt["from_step"] is None else attempt["from_step"]
        return 0 if (self["step"] if self["step"] is not None else -1) > before else 1

    def _fail(self, reason: StopReason, message: str, now: datetime) -> None:
        self.stop(reason, now, message)
        self.settle(now)

    # ---- Verdicts ----------------------------------------------------------------------------------------------------

    def add_verification(self, now: datetime, **values: Any) -> str:
        """Stores a verdict on this run and tells it as an event; the verification's id."""
        row = {**values, "id": new_id("ver"), "tenant": self["tenant"], "run_id": self.id, "created_at": now, "ended_at": now}
        queries.add(self.tx, tables.verifications, [row])
        self._tell_verdict(row, now)
        return str(row["id"])

    def progress(self, doing: Doing, now: datetime) -> None:
        """Writes how far the bisect is that this run carries out, and tells it as an event."""
        row = queries.verification_by(self.tx, self.id)
        assert row is not None, f"{self.id} carries out a verification"
        if row["progress"] != doing.as_dict():
            queries.update_verification(self.tx, row["id"], {"progress": doing.as_dict()})
            self.set(updated_at=now)
            self.event("progress", {**doing.as_dict(), "attempt": self["attempt"]}, now)

    def conclude(self, now: datetime, **values: Any) -> None:
        """Writes the verdict of the verification that this run carries out, and tells it as an event of this run."""
        row = queries.verification_by(self.tx, self.id)
        assert row is not None, f"{self.id} carries out a verification"
        if values.get("verdict") is not None:
            self.set(verdict=values["verdict"])
            self._tell_verdict(row | values, now)
        queries.update_verification(self.tx, row["id"], {**values, "ended_at": now})

    def _tell_verdict(self, row: Mapping[str, Any], now: datetime) -> None:
        names = ("id", "executed_by", "level", "verdict", "field", "step", "expected", "got", "message")
        self.event("verification", {"run": row["run_id"], **{name: row.get(name) for name in names}}, now)

    def save(self) -> None:
        """Writes what changed. An active run has a lease, and no other has."""
        assert (self["status"] in ACTIVE) == (self["lease_token"] is not None), f"{self['status']} and its lease"
        if self._changed:
            queries.update_run(self.tx, self.id, self._changed)
        if self._attempt_changed:
            queries.update_attempt(self.tx, self.id, self["attempt"], self._attempt_changed)
        queries.add(self.tx, tables.events, self._events)
        enqueue(self.tx, self.row, self._events)


def run_deadline_message(row: Mapping[str, Any]) -> str:
    """Why a run failed that went on for too long."""
    return f"it has been going on for longer than execution.run_deadline_seconds ({row['execution']['run_deadline_seconds']} s)"

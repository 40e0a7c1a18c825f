"""The queue as the database has it, and where a run stands in it: position, expected start, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Connection

from mok_service.db import queries
from mok_service.db import queue as sql
from mok_service.db.session import Database
from mok_service.placement import NodeSize, room_beside
from mok_service.runs.clusters import NODE_SECONDS_MAX
from mok_service.runs.queue import (
    Busy,
    Limits,
    Shares,
    Use,
    Waiting,
    could_delay,
    order,
    over_quota,
    remembered,
    reserve,
    room_for,
)
from mok_service.runs.rows import Row
from mok_service.runs.types import Run, time_text
from mok_service.spec import ExecutionSpec

EXPECTED_MAX: Final = 20  # places for which a start is estimated


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a queued run stands. `position` counts from 1; behind the first runs of its tenant it's an estimate."""

    position: int
    of: int
    estimated_start: datetime | None  # None: nothing is known of how long the runs before it take
    why_waiting: str

    def as_dict(self) -> dict[str, Any]:
        """The REST shape."""
        return {"position": self.position, "of": self.of, "estimated_start": time_text(self.estimated_start),
                "why_waiting": self.why_waiting}


@dataclass(frozen=True, slots=True)
class Queue:
    """What decides who goes next, from one snapshot."""

    queued: Sequence[Waiting]
    active: Sequence[Busy]
    shares: Shares


def read_queue(tx: Connection, now: datetime, *, with_retries: bool = False) -> Queue:
    """The front of the queue, and what holds devices. `with_retries`: also runs whose retry isn't due yet."""
    queued = [_waiting(row) for row in sql.waiting_runs(tx, None if with_retries else now)]
    if not queued:
        return Queue((), (), Shares())
    return Queue(queued, [_busy(row, now) for row in sql.active_runs(tx)], _shares(tx, {run.tenant for run in queued}))


def _waiting(row: Row) -> Waiting:
    execution = ExecutionSpec.model_validate(row["execution"])
    queued_at = row["queue_deadline_at"] - timedelta(seconds=execution.queue_deadline_seconds)
    return Waiting(row["id"], row["tenant"], execution, row["created_at"], queued_at, row["run_deadline_at"], row["retry_at"])


def _busy(row: Row, now: datetime) -> Busy:
    execution = ExecutionSpec.model_validate(row["execution"])
    return Busy(row["id"], row["tenant"], execution, row["claimed_at"], _expected_end(row, now), row["node"])


def _expected_end(row: Row, now: datetime) -> datetime | None:
    """By the pace of the attempt's steps so far, at the latest at the run's deadline."""
    done = (row["step"] or 0) - (row["from_step"] or 0)
    if row["running_at"] is None or done <= 0:
        return None
    left = (row["updated_at"] - row["running_at"]) / done * (row["steps"] - row["step"])
    expected: datetime = max(now, row["updated_at"] + left)
    return expected if row["run_deadline_at"] is None else min(expected, row["run_deadline_at"])


def _shares(tx: Connection, tenants: set[str]) -> Shares:
    limits = {row["tenant"]: limits_of(row) for row in sql.all_quotas(tx)}
    stored = {tenant: sql.checkpoint_bytes(tx, tenant) for tenant in sorted(tenants)
              if tenant in limits and limits[tenant].checkpoint_bytes_max is not None}
    use = {row["tenant"]: Use(row["used"], row["used_at"]) for row in sql.all_shares(tx)}
    return Shares(limits, use, {row["priority"]: row["at"] for row in sql.turns(tx)}, stored)


def limits_of(row: Row) -> Limits:
    """The limits of a row of quotas."""
    return Limits(row["weight"], row["devices_max"], row["runs_max"], row["queued_max"], row["checkpoint_bytes_max"],
                  row["jobs_a_day_max"])


# ---- What users are shown --------------------------------------------------------------------------------------------

def standings(db: Database, shown: Sequence[Run], now: datetime | None = None) -> dict[str, Standing]:
    """Where each queued run of a list stands, by id; nothing for runs that aren't queued."""
    queued = [run for run in shown if run.status == "queued"]
    if not queued:
        return {}
    at = now if now is not None else db.now()
    with db.read() as tx:
        seen, nodes = read_queue(tx, at, with_retries=True), _nodes(tx, at)
        ordered = order(seen.queued, seen.active, seen.shares, at)
        groups = sql.queued_by_group(tx)
        known = {run.id: (number, run) for number, run in enumerate(ordered[:_exact(ordered, groups)], 1)}
        behind = _behind(tx, [run for run in queued if run.id not in known], groups, seen.shares)
    of = sum(group["count"] for group in groups)
    view = _View(seen, ordered, nodes, at)
    starts = view.starts()
    found = {}
    for run in queued:
        position, waiting = known[run.id] if run.id in known else behind[run.id]
        found[run.id] = Standing(position, max(position, of), starts.get(run.id), view.why(waiting))
    return found


def _exact(ordered: Sequence[Waiting], groups: Sequence[Row]) -> int:
    """How many places are certain: those up to the last run that was read of a group that has more."""
    left = {(group["tenant"], group["device"], -group["queue_rank"]): group["count"] for group in groups}
    last = dict[tuple[str, str, int], int]()
    for number, run in enumerate(ordered, 1):
        group = (run.tenant, run.execution.device, run.execution.priority)
        left[group] -= 1
        last[group] = number
    return min((last[group] for group, count in left.items() if count), default=len(ordered))


def _behind(tx: Connection, runs: Sequence[Run], groups: Sequence[Row], shares: Shares) -> dict[str, tuple[int, Waiting]]:
    """About where runs stand that are behind the first ones of their groups: after higher priorities, after their own tenant's
    older runs, and after as many of each other tenant's as that one's weight gives it meanwhile."""
    found, last = {}, dict[tuple[str, str, int], tuple[tuple[datetime, str], int]]()
    for run in sorted(runs, key=lambda run: (run.created_at, run.id)):
        assert run.queue_deadline_at is not None, "a queued run has a deadline"
        waiting = Waiting(run.id, run.tenant, run.execution, run.created_at,
                          run.queue_deadline_at - timedelta(seconds=run.execution.queue_deadline_seconds),
                          run.run_deadline_at, run.retry_at)
        rank = -run.execution.priority
        group = (run.tenant, run.execution.device, rank)
        first, older = last.get(group, (None, 0))
        own = older + sql.queued_between(tx, group, first, waiting.age)
        last[group] = waiting.age, own
        before, weight = own, shares.limits_of(run.tenant).weight
        for other in groups:
            if other["queue_rank"] < rank:
                before += other["count"]
            elif other["queue_rank"] == rank and other["tenant"] != run.tenant:
                before += min(other["count"], int(own * shares.limits_of(other["tenant"]).weight / weight))
        found[run.id] = before + 1, waiting
    return found


def with_standing(db: Database, shown: Sequence[Run], now: datetime | None = None) -> list[dict[str, Any]]:
    """Runs in the REST shape, each with `queue`: where it stands while it is queued, else null."""
    found = standings(db, shown, now)
    return [run.as_dict() | {"queue": found[run.id].as_dict() if run.id in found else None} for run in shown]


def _nodes(tx: Connection, now: datetime) -> list[NodeSize]:
    """The cluster, as schedulers reported it lately."""
    return [NodeSize(node["name"], int(node["labels"].get("cpus", node["capacity"].get("cpu", 0))),
                     node["capacity"].get("cuda", 0))
            for node in queries.all_nodes(tx) if node["heartbeat_at"] > now - timedelta(seconds=NODE_SECONDS_MAX)]


class _View:
    """Sentences and estimates about one snapshot of the queue."""

    def __init__(self, queue: Queue, ordered: Sequence[Waiting], nodes: Sequence[NodeSize], now: datetime) -> None:
        self._queue, self._ordered, self._nodes, self._now = queue, ordered, nodes, now
        self._fits = remembered(lambda execution, active: room_beside(execution, active, nodes))
        waits = [run for run in ordered if over_quota(run, queue.active, queue.shares) is None and not self._later(run)]
        first = next((run for run in waits if not room_for(run, queue.active, self._fits)
                      and room_for(run, (), self._fits)), None)
        self._kept = None if first is None else reserve(first, queue.active, self._fits)

    def _later(self, run: Waiting) -> bool:
        return run.retry_at is not None and run.retry_at > self._now

    def starts(self) -> dict[str, datetime]:
        """When the first runs are expected to start, one after the other: each run is taken to last as long as the active ones
        do on average. Ends at the first of which nothing can be said."""
        lengths = [busy.expected_end - busy.since for busy in self._queue.active if busy.expected_end is not None]
        mean = sum(lengths, timedelta()) / len(lengths) if lengths else None
        active, at, found = tuple(self._queue.active), self._now, dict[str, datetime]()
        for run in self._ordered[:EXPECTED_MAX]:
            if over_quota(run, self._queue.active, self._queue.shares) or not room_for(run, (), self._fits):
                continue
            place = reserve(run, active, self._fits)
            if len(place.beside) < len(active):
                if place.at is None:
                    break
                at = max(at, place.at)
            found[run.id] = start = max(at, run.retry_at or at)
            active = (*place.beside, Busy(run.id, run.tenant, run.execution, start, None if mean is None else start + mean))
        return found

    def why(self, run: Waiting) -> str:
        """One sentence: what it waits for."""
        queue = self._queue
        if self._later(run):
            return f"it is tried again at {time_text(run.retry_at)}"
        if not self._nodes:
            return f"no scheduler has reported a machine in the last {NODE_SECONDS_MAX} s"
        quota = over_quota(run, queue.active, queue.shares)
        if quota is not None:
            return quota
        if not room_for(run, (), self._fits):
            return f"{_wanted(run.execution)} wanted, and the cluster has {self._count(run.execution, ())}"
        room = room_for(run, queue.active, self._fits)
        if room is None:
            return f"{self._missing(run.execution)}; {self._next_end()}"
        kept = self._kept
        if kept is not None and kept.run.id != run.id and could_delay(run, room, kept, self._fits, queue.shares, self._now):
            return f"{kept.run.id} goes first, and this run could delay it"
        return "it starts at the scheduler's next round"

    def _next_end(self) -> str:
        ends = [busy for busy in self._queue.active if busy.expected_end is not None]
        if not ends:
            return "how long the active runs take isn't known yet"
        first = min(ends, key=lambda busy: (busy.expected_end, busy.id))
        return f"next to end: {first.id}, expected at {time_text(first.expected_end)}"

    def _missing(self, wanted: ExecutionSpec) -> str:
        active = [busy.execution for busy in self._queue.active]
        free = self._count(wanted, active)
        if wanted.device == "cuda" and free >= wanted.count:
            beside = wanted.model_copy(update={"device": "cpu", "threads": wanted.threads or 1})
            return f"{_wanted(beside)} beside {_wanted(wanted)} wanted, {self._count(beside, active)} free"
        if wanted.count == 1 and 0 < wanted.threads <= free:
            return f"{_wanted(wanted)} of one machine wanted, the {free} that are free lie apart"
        return f"{_wanted(wanted)} wanted, {free} free"

    def _count(self, wanted: ExecutionSpec, active: Sequence[ExecutionSpec]) -> int:
        """How many devices of the wanted kind are free beside some runs."""
        if wanted.device == "cuda":
            return sum(node.gpus for node in self._nodes) - sum(each.count for each in active if each.device == "cuda")
        most = max(node.cpus for node in self._nodes)
        taken = sum(each.count * (each.threads or (1 if each.device == "cuda" else most)) for each in active)
        return max(0, sum(node.cpus for node in self._nodes) - taken)


def _wanted(execution: ExecutionSpec) -> str:
    count = execution.count
    if execution.device == "cuda":
        return f"{count} GPU{'' if count == 1 else 's'}"
    if execution.threads == 0:
        return "all CPUs of a machine" if count == 1 else f"all CPUs of {count} machines"
    cpus = count * execution.threads
    return f"{cpus} CPU{'' if cpus == 1 else 's'}"

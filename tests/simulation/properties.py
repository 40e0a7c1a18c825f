"""What must hold in every world, whatever happens. Looks at the rows themselves, past the code that wrote them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

from mok_service.db.session import Database
from mok_service.lifecycle import TRANSITIONS, RunStatus
from mok_service.placement import NodeSize, devices_of
from mok_service.runs.types import Lease
from mok_service.spec import ExecutionSpec
from tests.simulation.machines import Worker, chain

if TYPE_CHECKING:
    from tests.simulation.world import World

SEEN: Counter[tuple[str, str]] = Counter()   # transitions, over all worlds of this process
ENDS: Counter[str] = Counter()               # how runs ended


class Violated(BaseException):
    """A property doesn't hold. No handler of the scheduler's may take it for an attempt's trouble."""


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise Violated(what)


def fenced(world: World, use_case: Callable[..., Any]) -> Callable[..., Any]:
    """A use case under a lease: when it succeeds, the lease was the run's inside the very transaction that wrote."""

    @wraps(use_case)
    def checked(db: Database, lease: Lease, *arguments: Any) -> Any:
        result = use_case(db, lease, *arguments)
        what = f"{use_case.__name__} wrote for attempt {lease.attempt} of {lease.run_id} without its lease"
        demand(world.holder(db, lease), what)
        return result

    return checked


def roomy(world: World, claim: Callable[..., Lease | None]) -> Callable[..., Lease | None]:
    """A claim: afterwards what is active on its node fits there, and its tenant's in its quota."""

    @wraps(claim)
    def checked(db: Database, *arguments: Any, **options: Any) -> Lease | None:
        lease = claim(db, *arguments, **options)
        if lease is not None:
            rows = world.raw.execute("SELECT r.id, r.tenant, r.execution, a.node FROM runs r JOIN attempts a "
                                     "ON a.run_id = r.id AND a.attempt = r.attempt WHERE r.lease_token IS NOT NULL "
                                     "ORDER BY a.claimed_at, a.id")
            active = [(run_id, tenant, ExecutionSpec.model_validate(json.loads(text)), at) for run_id, tenant, text, at in rows]
            world.say("claimed", lease.run_id, "attempt", lease.attempt, "for", lease.node)
            node = next(node for node in world.seen_by(db) if node.name == lease.node)
            _devices_enough([execution for _, _, execution, at in active if at == node.name], node)
            _quota_kept(world, lease, [(tenant, execution) for _, tenant, execution, _ in active])
        return lease

    return checked


def _devices_enough(active: Sequence[ExecutionSpec], node: NodeSize) -> None:
    """Counted without placing anything: each run holds a GPU and CPUs, or CPUs; without threads all of them."""
    gpus = sum(execution.device == "cuda" for execution in active)
    cpus = sum(min(node.cpus, execution.threads or (1 if execution.device == "cuda" else node.cpus)) for execution in active)
    demand(gpus <= node.gpus and cpus <= node.cpus, f"more is active than fits: {cpus} CPUs and {gpus} GPUs of {node}")


def check_placed(world: World, worker: Worker) -> None:
    """No node's workers hold more than it has. And the one just placed has begun, unless its node is no longer what the
    schedulers saw, or an attempt that was given up, and has no lease, still holds devices there."""
    machines, name = world.machines, worker.payload.name
    for node in machines.nodes:
        left = machines.left(node)
        demand(left.cpus >= 0 and left.gpus >= 0, f"workers hold more than there is of {node}")
    (on_record,) = world.raw.execute("SELECT node FROM attempts WHERE run_id || '-' || attempt = ?", (name,)).fetchone()
    demand(worker.payload.node == on_record, f"{name} is placed on {worker.payload.node}, and on record is {on_record}")
    rows = world.raw.execute("SELECT r.id || '-' || r.attempt, r.execution FROM runs r JOIN attempts a ON a.run_id = r.id AND "
                             "a.attempt = r.attempt WHERE r.lease_token IS NOT NULL AND a.node = ?", (on_record,))
    leased = {other: ExecutionSpec.model_validate(json.loads(text)) for other, text in rows}
    holding = {other for other, held in machines.workers.items()
               if held.node == worker.payload.node and held.holds(machines.now)}
    for node in machines.nodes:
        if node.name == worker.payload.node and name in leased and holding <= leased.keys():
            wanted = [devices_of(execution, node) for execution in leased.values()]
            fit = sum(each.cpus for each in wanted) <= node.cpus and sum(each.gpus for each in wanted) <= node.gpus
            if fit and worker.payload.devices == devices_of(leased[name], node):
                demand(worker.node == node.name, f"{name} doesn't begin on {node}, where it has room")


def _quota_kept(world: World, lease: Lease, active: list[tuple[str, ExecutionSpec]]) -> None:
    limits = world.quotas.get(lease.tenant, {})
    own = [execution for tenant, execution in active if tenant == lease.tenant]
    for name, used in (("runs_max", len(own)), ("devices_max", sum(execution.count for execution in own))):
        limit = limits.get(name)
        demand(limit is None or used <= limit, f"tenant {lease.tenant} has {used}, and {name} is {limit}")


# ---- After each round, and at the end --------------------------------------------------------------------------------

def check_now(world: World) -> None:
    rows = world.raw.execute("""
        SELECT r.id, r.event_count, count(e.number), max(e.number) FROM runs r LEFT JOIN events e ON e.run_id = r.id GROUP BY r.id
        HAVING count(e.number) != r.event_count OR max(e.number) != r.event_count""").fetchall()
    demand(not rows, f"event numbers have gaps: {rows}")
    rows = world.raw.execute("""
        SELECT id, status, lease_token IS NOT NULL FROM runs
        WHERE (lease_token IS NOT NULL) != (status IN ('claimed', 'starting', 'running', 'stopping'))""").fetchall()
    demand(not rows, f"active is who has a lease: {rows}")
    known = {run_id for (run_id,) in world.raw.execute("SELECT id FROM runs")}
    demand(known == set(world.submitted), f"runs were lost or invented: {known ^ set(world.submitted)}")


def check_end(world: World, still_open: list[str]) -> None:
    demand(not still_open, f"these runs never ended: {still_open}")
    demand(not world.raw.execute("SELECT 1 FROM attempts WHERE ended_at IS NULL").fetchall(), "an attempt never ended")
    for run_id in world.submitted:
        _check_run(world, run_id)


def _check_run(world: World, run_id: str) -> None:
    row = world.raw.execute("SELECT status, stop_reason, step, head, weights, execution, failures, verdict, reproduces, message "
                            "FROM runs WHERE id = ?", (run_id,)).fetchone()
    status, reason, step, head, weights, execution, failures, verdict, reproduces, message = row
    steps, seed = world.submitted[run_id]
    records = chain(steps, seed)
    ENDS[reason] += 1
    _check_story(world, run_id, status)
    written = "SELECT step, head, attempt FROM step_records WHERE run_id = ? ORDER BY step"
    rows = world.raw.execute(written, (run_id,)).fetchall()
    stored = [(number, str(record.head())) for number, record in enumerate(records)][:len(rows)]
    demand([(number, digest) for number, digest, _ in rows] == stored, f"{run_id}: other records than an undisturbed run's")
    by = [attempt for _, _, attempt in rows]
    demand(by == sorted(by), f"{run_id}: an earlier attempt wrote after a later one: {by}")
    cancelled = "cancel" in world.wishes.get(run_id, ())
    granted = "granted" if cancelled else "not granted"
    demand((status == "cancelled") == cancelled, f"{run_id}: cancel was {granted}, it is {status}")
    match status, reason:
        case "succeeded", "finished":
            final = records[-1].state
            assert final is not None
            reached = step, head, weights
            demand(reached == (steps, str(records[-1].head()), str(final.weights)), f"{run_id}: not its final state")
            original = world.raw.execute("SELECT status FROM runs WHERE id = ?", (reproduces,)).fetchone()
            demand(original is None or original[0] != "succeeded" or verdict == "REPRODUCED", f"{run_id}: verdict {verdict}")
        case "failed", "attempts_exhausted":
            counted = "SELECT count(*) FROM attempts WHERE run_id = ? AND end_reason NOT IN ('stopped', 'finished')"
            (lost,) = world.raw.execute(counted, (run_id,)).fetchone()
            demand(min(failures, lost) >= json.loads(execution)["max_attempts"], f"{run_id}: it had attempts left")
        case "failed", "non_finite" | "bad_data" | "out_of_memory":
            doom = {"non_finite": "nan", "bad_data": "data", "out_of_memory": "memory"}[reason]
            demand(doom in world.machines.dooms.get(run_id, ()), f"{run_id}: no worker of it met {doom}")
        case "failed", "queue_deadline" | "run_deadline":
            pass
        case "cancelled", "user_cancelled":
            pass
        case _:
            raise Violated(f"{run_id} ended as {status}, {reason}: {message}")


def _check_story(world: World, run_id: str, status: str) -> None:
    """The statuses that the events tell are one walk through the table of transitions."""
    rows = world.raw.execute("SELECT payload FROM events WHERE run_id = ? AND type = 'run.status' ORDER BY number", (run_id,))
    at: RunStatus | None = None
    for payload in (json.loads(text) for (text,) in rows):
        old, new = payload["from"], payload["status"]
        demand(old == at, f"{run_id}: it was {at}, and an event says that it was {old}")
        if old is not None and old != new:
            demand(new in TRANSITIONS[old], f"{run_id}: {old} became {new}")
            SEEN[old, new] += 1
        at = new
    demand(at == status, f"{run_id}: it is {status}, and its events say {at}")

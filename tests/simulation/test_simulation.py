"""Thousands of worlds in which everything goes wrong; and proof that a world notices when the service does."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from itertools import chain, count, islice
from typing import Any

import pytest

from mok_service import runs
from mok_service.db import queries
from mok_service.lifecycle import TRANSITIONS
from mok_service.placement import Held, room_beside
from mok_service.provenance.digest import sha256
from mok_service.runs import leases, queue
from mok_service.runs.locked import LockedRun
from mok_service.runs.types import Lease
from mok_workers import scheduler
from mok_workers.messages import Payload
from tests.simulation import play as play_module
from tests.simulation import properties
from tests.simulation.__main__ import chunk
from tests.simulation.machines import Machines
from tests.simulation.play import play

WORLDS = 10_000
PARTS = 5              # tests that share them, since a test has a time limit
CHUNK = 50
MUTANT_WORLDS_MAX = 150
RARE = {"no_reaper": 560}  # where to begin: a world in which nothing but the reaper helps is rare (of the first 600, 591 and 596)


@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_happens_every_run_ends_right(part: int) -> None:
    first = part * WORLDS // PARTS
    chunks = [range(start, start + CHUNK) for start in range(first, first + WORLDS // PARTS, CHUNK)]
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        played = list(pool.map(chunk, chunks))
    wrong = list(chain.from_iterable(found for found, _, _ in played))
    assert not wrong, f"python -m tests.simulation --seed {wrong[0][0]} shows the first of these: {wrong}"
    seen = {transition for _, _, of_chunk in played for transition in of_chunk}
    legal = {(old, new) for old, news in TRANSITIONS.items() for new in news}
    assert seen == legal, "every transition of the table happens, and no other"
    reasons = {reason for _, ends, _ in played for reason in ends}
    assert reasons >= {"finished", "user_cancelled", "attempts_exhausted", "out_of_memory", "non_finite", "bad_data",
                       "queue_deadline", "run_deadline"}


def test_a_seed_is_a_world_to_the_last_id() -> None:
    first, second = list[str](), list[str]()
    one, two = play(3, first), play(3, second)
    assert first == second and len(first) > 10
    assert one.submitted == two.submitted and one.now == two.now


# ---- The simulation notices ------------------------------------------------------------------------------------------

def no_token(patch: pytest.MonkeyPatch) -> None:
    lock = queries.lock_run

    def lock_for_anybody(tx: Any, run_id: str, tenant: str | None = None, token: str | None = None) -> Any:
        return lock(tx, run_id, tenant)

    def renew_for_anybody(tx: Any, run_id: str, token: str, expires_at: Any) -> Any:
        return lock(tx, run_id)

    patch.setattr(queries, "lock_run", lock_for_anybody)
    patch.setattr(queries, "renew_lease", renew_for_anybody)


def one_token(patch: pytest.MonkeyPatch) -> None:
    """Two attempts of a run have leases that nobody can tell apart."""
    def lease(run_id: str, attempt: int, token: str, *rest: Any) -> Lease:
        return Lease(run_id, attempt, run_id, *rest)

    patch.setattr(leases, "Lease", lease)


def no_requeue(patch: pytest.MonkeyPatch) -> None:
    lose = LockedRun.lose_attempt

    def lose_for_ever(self: Any, why: Any, message: str, now: Any, retry_at: Any) -> None:
        lose(self, why, message, now, now + timedelta(days=3650))

    patch.setattr(LockedRun, "lose_attempt", lose_for_ever)


def no_first_reason(patch: pytest.MonkeyPatch) -> None:
    """Of a cancel and an end the later one wins."""
    stop = LockedRun.stop

    def stop_again(self: Any, reason: Any, now: Any, message: str | None = None) -> None:
        if self["status"] == "stopping":
            self.set(stop_reason=reason)
        stop(self, reason, now, message)

    patch.setattr(LockedRun, "stop", stop_again)


def no_patience(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LockedRun, "_counts", lambda self, why: 9)


def no_memory(patch: pytest.MonkeyPatch) -> None:
    """A run that goes back to the queue is gone."""
    release = runs.release

    def forgotten(db: Any, lease: Any, *arguments: Any) -> Any:
        run = release(db, lease, *arguments)
        with db.engine.connect() as connection:
            connection.connection.dbapi_connection.executescript(
                f"PRAGMA foreign_keys = OFF; DELETE FROM runs WHERE id = '{run.id}'; PRAGMA foreign_keys = ON;")
        return run

    patch.setitem(play_module._REAL, "release", forgotten)


def no_faithful_record(patch: pytest.MonkeyPatch) -> None:
    """What is stored of step 1 isn't what the worker told."""
    add = queries.add

    def add_wrongly(tx: Any, table: Any, rows: Any) -> None:
        wrong = {"head": sha256(b"another")} if table.name == "step_records" else {}
        add(tx, table, [{**row, **wrong} if row.get("step") == 1 else row for row in rows])

    patch.setattr(queries, "add", add_wrongly)


def no_reaper(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runs, "reap", lambda db, now: [])


def no_capacity(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(queue, "room_for", lambda run, active, fits: fits(run.execution, []))


def no_node(patch: pytest.MonkeyPatch) -> None:
    """Where the active runs are doesn't matter to a claim."""
    def room_anywhere(candidate: Any, active: Any, whole: Any) -> Any:
        return room_beside(candidate, [Held(held.execution) for held in active], whole)

    patch.setattr(scheduler, "room_beside", room_anywhere)


def no_pin(patch: pytest.MonkeyPatch) -> None:
    """An attempt goes to the first node, whatever was claimed for it."""
    patch.setattr(scheduler, "Payload", lambda **fields: Payload(**fields | {"node": "n1"}))


def no_beginning(patch: pytest.MonkeyPatch) -> None:
    """The cluster leaves attempts waiting that have room where they were placed."""
    patch.setattr(Machines, "_seat", lambda self, worker: None)


def no_quota(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(queue, "over_quota", lambda run, active, shares: None)


def no_count(patch: pytest.MonkeyPatch) -> None:
    event = LockedRun.event

    def skip_a_number(self: Any, kind: Any, payload: Any, now: Any) -> None:
        event(self, kind, payload, now)
        if kind == "checkpoint":
            self.set(event_count=self["event_count"] + 1)

    patch.setattr(LockedRun, "event", skip_a_number)


def no_cancel(patch: pytest.MonkeyPatch) -> None:
    stop = LockedRun.stop

    def deaf(self: Any, reason: Any, now: Any, message: str | None = None) -> None:
        if reason != "user_cancelled":
            stop(self, reason, now, message)

    patch.setattr(LockedRun, "stop", deaf)


@pytest.mark.parametrize(("mutate", "noticed"), [
    (no_token, "without its lease"),
    (one_token, "without its lease"),
    (no_requeue, "never ended"),
    (no_patience, "it had attempts left"),
    (no_memory, "runs were lost or invented"),
    (no_faithful_record, "other records than an undisturbed run's"),
    (no_first_reason, "cancel was granted"),
    (no_reaper, "never ended"),
    (no_capacity, "more is active than fits"),
    (no_node, "more is active than fits"),
    (no_pin, "and on record is"),
    (no_beginning, "doesn't begin on"),
    (no_quota, "_max is"),
    (no_count, "event numbers have gaps"),
    (no_cancel, "cancel was granted"),
])
def test_a_service_that_does_wrong_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], noticed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    for seed in islice(count(RARE.get(mutate.__name__, 0)), MUTANT_WORLDS_MAX):
        try:
            play(seed)
        except properties.Violated as violated:
            if noticed in str(violated):
                return
        except Exception:  # what it does wrong may break it otherwise first
            continue
    pytest.fail(f"{MUTANT_WORLDS_MAX} worlds, and nobody noticed")

"""Many users, two schedulers and time do as chance wants; whatever happens, the rules of the life cycle hold.

A walk is decided by its seed alone, so a failing one replays.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from mok_service import jobs, runs
from mok_service.db.session import Database
from mok_service.errors import Conflict, LeaseLost
from mok_service.lifecycle import ACTIVE, FINAL, is_legal
from mok_service.provenance.chain import StepRecord
from mok_service.runs import Lease, LogLine, Outcome
from tests.databases import Clock
from tests.service.play import ENVIRONMENT, MANIFEST, PLACEMENT, checkpoint, digest, records, submit

CAPACITY = {"cpu": 2}
STEPS = 60
SEEDS = range(12)


class Walk:
    """The world: what each scheduler believes to hold, some of it long lost."""

    def __init__(self, db: Database, clock: Clock, seed: int) -> None:
        self.db, self.clock, self.random = db, clock, random.Random(seed)
        self.leases: list[Lease] = []
        self.ended: dict[str, dict[str, object]] = {}
        self.actions: list[Callable[[], object]] = [
            self.submit, self.reproduce, self.claim, self.claim, self.work, self.work, self.work, self.work, self.finish,
            self.finish, self.release, self.wish, self.wish, self.wait, self.reboot,
        ]

    def step(self) -> None:
        with suppress(Conflict, LeaseLost):  # refused: nothing may have changed by it, which `check` sees
            self.random.choice(self.actions)()
        self.clock.tick(self.random.choice((0.0, 0.5, 3.0)))
        self.check()

    def submit(self) -> None:
        submit(self.db, name=f"{self.random.random()}", seed=self.random.randrange(3), max_attempts=2, queue_deadline_seconds=200,
               run_deadline_seconds=150, now=self.clock.now)

    def reproduce(self) -> None:
        known = jobs.list_jobs(self.db).items
        if known:
            jobs.create_run(self.db, self.random.choice(known).id)

    def claim(self) -> None:
        worker = self.random.choice(("one", "two"))
        lease = runs.claim(self.db, self.clock.now, worker, CAPACITY, boot_id=worker)
        if lease is not None:
            self.leases.append(lease)

    def work(self) -> None:
        lease = self.some_lease()
        if lease is None:
            return
        run = runs.get_run(self.db, lease.run_id)
        if run.status == "claimed":
            runs.mark_starting(self.db, lease, self.clock.now)
        elif run.status == "starting":
            runs.mark_running(self.db, lease, self.clock.now, ENVIRONMENT, PLACEMENT, MANIFEST)
        else:
            runs.renew(self.db, lease, self.clock.now)
            made = self.made(run.job_id, wrong=self.random.random() < 0.05)
            first = self.random.randint(0, (run.step or 0) + 1 if run.step is not None else 0)
            part = made[first : first + self.random.randint(1, 3)]
            kept = [checkpoint(record) for record in part if record.state is not None]
            line = LogLine(self.random.randrange(9), self.clock.now, "info", "working")
            runs.append(self.db, lease, part, [line], kept, self.clock.now)

    def finish(self) -> None:
        lease = self.some_lease()
        if lease is None:
            return
        made = self.made(runs.get_run(self.db, lease.run_id).job_id)
        assert made[-1].state is not None
        runs.finish(self.db, lease, self.random.choice((
            Outcome("succeeded", "finished", None, made[-1].state.weights, made[-1].head()),
            Outcome("paused", "user_paused"), Outcome("cancelled", "user_cancelled"),
            Outcome("succeeded", "finished", None, made[-1].state.weights, made[-1].head()),
        )), self.clock.now)

    def release(self) -> None:
        lease = self.some_lease()
        if lease is not None:
            why = self.random.choice(("worker_lost", "stopped", "out_of_memory", "failed"))
            runs.release(self.db, lease, why, "chance", self.clock.now)  # type: ignore[arg-type]

    def wish(self) -> None:
        known = runs.list_runs(self.db).items
        if known:
            wish = self.random.choice((runs.cancel, runs.pause, runs.resume, runs.resume))
            wish(self.db, self.random.choice(known).id)

    def wait(self) -> None:
        self.clock.tick(self.random.choice((1.0, 40.0, 100.0)))
        runs.reap(self.db, self.clock.now)

    def reboot(self) -> None:
        worker = self.random.choice(("one", "two"))
        runs.end_leases_of_earlier_boots(self.db, worker if self.random.random() < 0.7 else "new", self.clock.now, worker)

    def some_lease(self) -> Lease | None:
        return self.random.choice(self.leases[-6:]) if self.leases else None

    def made(self, job_id: str, wrong: bool = False) -> list[StepRecord]:
        return records(jobs.get_job(self.db, job_id), change={3: {"batch": digest("wrong")}} if wrong else None)

    # ---- The rules ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        everything = runs.list_runs(self.db, limit=1000).items
        assert sum(run.status in ACTIVE for run in everything) <= CAPACITY["cpu"]
        for run in everything:
            assert (run.status in ACTIVE) == (run.worker is not None)
            assert (run.status in FINAL) == (run.ended_at is not None)
            assert (run.status in ("stopping", "paused") or run.status in FINAL) == (run.stop_reason is not None)
            assert run.status != "succeeded" or (run.step == run.steps and run.weights is not None)
            assert (run.verdict is not None) <= (run.kind == "reproduction")
            assert not (run.status in FINAL and run.kind == "reproduction") or run.verdict is not None
            if run.status in FINAL:
                assert self.ended.setdefault(run.id, run.as_dict()) == run.as_dict(), "what has ended doesn't change"

    def check_history(self) -> None:
        for run in runs.list_runs(self.db, limit=1000).items:
            told = runs.events(self.db, run.id)
            assert [event.number for event in told] == list(range(1, len(told) + 1))
            status = None
            for event in (event.payload for event in told if event.type == "run.status"):
                assert event["from"] == status
                assert status is None or event["status"] == status or is_legal(status, event["status"])
                status = event["status"]
            assert status == run.status
            stored = [step.record.step for step in runs.steps(self.db, run.id)]
            assert stored == list(range(len(stored))) and run.step == (stored[-1] if stored else None)
            assert [attempt.attempt for attempt in runs.attempts(self.db, run.id)] == list(range(1, run.attempt + 1))
            assert run.verdict is None or len([v for v in runs.verifications(self.db, run.id) if v.executed_by == run.id]) == 1

    def end(self) -> None:
        """With nobody left, time ends everything but what the user paused."""
        for _ in range(6):
            runs.reap(self.db, self.clock.tick(1000))
        assert {run.status for run in runs.list_runs(self.db, limit=1000).items} <= FINAL | {"paused"}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_walk_keeps_the_rules(db: Database, clock: Clock, seed: int) -> None:
    walk = Walk(db, clock, seed)
    for _ in range(STEPS):
        walk.step()
    walk.check_history()
    walk.end()
    walk.check()
    walk.check_history()

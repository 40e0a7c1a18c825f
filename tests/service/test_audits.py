"""What an audit appends is what its plan asks for, and equals the audited run's records; on both kinds of database."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mok_service import jobs, runs, verifying
from mok_service.db.session import Database
from mok_service.errors import Conflict, NotFound
from mok_service.provenance.audit import Plan
from mok_service.provenance.verify import Finding
from mok_service.runs import Lease, Outcome, Run, Verification
from tests.databases import Clock
from tests.service.play import checkpoint, digest, records, start, state, submit

SUCCEEDED = Outcome("succeeded", "finished")


@pytest.fixture
def audited(db: Database, clock: Clock) -> tuple[jobs.Job, Run]:
    """A run of six steps with a checkpoint after each second."""
    job = submit(db, steps=6).job
    lease, made = start(db, clock), records(job)
    runs.append(db, lease, made, checkpoints=[checkpoint(made[step]) for step in (2, 4, 6)], now=clock.now)
    assert made[-1].state is not None
    return job, runs.finish(db, lease, Outcome("succeeded", "finished", None, made[-1].state.weights, made[-1].head()), clock.now)


def begin(db: Database, clock: Clock, run: Run, **given: Any) -> tuple[Verification, Plan, Lease]:
    asked = verifying.verify(db, run.id, "audit", now=clock.tick(), **given)
    assert asked.plan is not None
    lease = start(db, clock)
    assert lease.run_id == asked.executed_by
    return asked, Plan.from_document(asked.plan), lease


def of(plan: Plan, job: jobs.Job, change: dict[int, dict[str, Any]] | None = None) -> list[Any]:
    made = records(job)
    steps = [step for s in plan.segments for step in range(s.first_record, s.end + 1)]
    return [replace(made[step], **(change or {}).get(step, {})) for step in steps]


@pytest.mark.parametrize("seed", range(4))
def test_records_of_the_plan_and_no_others(db: Database, clock: Clock, audited: tuple[jobs.Job, Run], seed: int) -> None:
    job, run = audited
    asked, plan, lease = begin(db, clock, run, segments=2, seed=seed)
    made = of(plan, job)
    other = next(record for record in records(job) if record.step not in {r.step for r in made})
    with pytest.raises(Conflict, match="the next one is step"):
        runs.append(db, lease, [other], now=clock.now)
    runs.append(db, lease, made[:2], now=clock.now)
    assert runs.get_verification(db, asked.id).progress == runs.types.Progress(plan.done(made[1].step), 4)
    runs.reap(db, clock.tick(60))
    assert runs.get_verification(db, asked.id).status == "queued"
    clock.tick(60)
    lease = start(db, clock)
    segments = plan.rest(made[1].step)
    assert segments[0].start <= made[1].step, "it goes on with a whole segment"
    runs.append(db, lease, [record for record in made if record.step >= segments[0].first_record], now=clock.now)
    ended = runs.finish(db, lease, SUCCEEDED, clock.now)
    found = runs.get_verification(db, asked.id)
    assert (ended.status, ended.verdict, found.verdict, found.status) == ("succeeded", "AUDITED", "AUDITED", "done")
    assert [event.payload["verdict"] for event in runs.events(db, ended.id) if event.type == "verification"] == ["AUDITED"]
    with pytest.raises(NotFound, match="its verdict is attested"):
        runs.get_attestation(db, ended.id)


def test_it_is_not_done_before_its_last_step(db: Database, clock: Clock, audited: tuple[jobs.Job, Run]) -> None:
    job, run = audited
    asked, plan, lease = begin(db, clock, run, segments=3)
    runs.append(db, lease, of(plan, job)[:-1], now=clock.now)
    ended = runs.finish(db, lease, SUCCEEDED, clock.now)
    found = runs.get_verification(db, asked.id)
    assert (ended.status, ended.stop_reason, found.verdict, found.status) == ("failed", "internal", "INCONCLUSIVE", "failed")


@pytest.mark.parametrize(("step", "change", "field"), [
    (0, {"state": state(0, "x")}, "weights"), (1, {"loss_bits": "00000000"}, "loss"), (3, {"tokens": 61}, "tokens"),
    (4, {"state": None}, "weights"), (5, {"batch": digest("other")}, "batch"), (6, {"previous": digest("other")}, "previous"),
])
def test_the_first_difference_ends_it(
    db: Database, clock: Clock, audited: tuple[jobs.Job, Run], step: int, change: dict[str, Any], field: str
) -> None:
    job, run = audited
    asked, plan, lease = begin(db, clock, run, segments=3)
    result = runs.append(db, lease, of(plan, job, {step: change}), now=clock.now)
    found = runs.get_verification(db, asked.id)
    assert result.stop == "diverged" and (found.verdict, found.step, found.field) == ("DIVERGED", step, field)
    assert [stored.record.step for stored in runs.steps(db, lease.run_id)] == list(range(step + 1))
    assert runs.finish(db, lease, Outcome("failed", "diverged"), clock.now).verdict == "DIVERGED"


def test_what_the_worker_found_is_the_verdict(db: Database, clock: Clock, audited: tuple[jobs.Job, Run]) -> None:
    job, run = audited
    for verdict, reason in (("DIVERGED", "diverged"), ("TAMPERED", "tampered")):
        asked, plan, lease = begin(db, clock, run, segments=3)
        runs.append(db, lease, of(plan, job)[:3], now=clock.now)
        finding = Finding(verdict, "the weights are others", "weights", 2, "a", "b")  # type: ignore[arg-type]
        ended = runs.finish(db, lease, Outcome("failed", reason, "m", finding=finding), clock.now)  # type: ignore[arg-type]
        found = runs.get_verification(db, asked.id)
        assert (ended.stop_reason, found.verdict, found.step, found.expected, found.got) == (reason, verdict, 2, "a", "b")


def test_a_step_that_cannot_be_computed_and_is_on_record_is_a_divergence(
    db: Database, clock: Clock, audited: tuple[jobs.Job, Run]
) -> None:
    job, run = audited
    for level in ("audit", "rerun"):
        asked = verifying.verify(db, run.id, level, now=clock.tick(), **({"segments": 3} if level == "audit" else {}))  # type: ignore
        lease = start(db, clock)
        runs.append(db, lease, records(job)[:4], now=clock.now)
        runs.finish(db, lease, Outcome("failed", "non_finite", "step 4: the loss is not finite"), clock.now)
        found = runs.get_verification(db, asked.id)
        assert (found.verdict, found.status, found.field) == ("DIVERGED", "done", "loss"), level

"""Reproductions: compared with their originals record by record, in the transaction that stores the record."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from mok_service import jobs, runs
from mok_service.db.session import Database
from mok_service.provenance.chain import genesis
from mok_service.provenance.manifest import DataManifest
from mok_service.runs import Lease, Outcome, Run, Verification
from tests.databases import Clock
from tests.service.play import (
    ENVIRONMENT,
    MANIFEST,
    PLACEMENT,
    checkpoint,
    digest,
    records,
    start,
    state,
    submit,
    succeed,
    trained,
)
from tests.service.test_appending import CHANGES


def other_code(**change: Any) -> dict[str, Any]:
    environment = copy.deepcopy(ENVIRONMENT)
    environment["code"].update(change)
    return environment


def reproduction(db: Database, clock: Clock, job: jobs.Job, **starting: Any) -> Lease:
    run = jobs.create_run(db, job.id, now=clock.tick())
    assert run.kind == "reproduction" and run.verdict is None
    lease = start(db, clock, **starting)
    assert lease.run_id == run.id
    return lease


def verdict(db: Database, run_id: str) -> Verification:
    """The only one, after checking that everybody who looks sees the same."""
    run = runs.get_run(db, run_id)
    found = next(v for v in runs.verifications(db, run_id) if v.executed_by == run_id)
    assert run.reproduces is not None and runs.verifications(db, run.reproduces)[-1] == found
    assert runs.get_verification(db, found.id) == found
    assert (found.run_id, found.executed_by, found.level, found.verdict) == (run.reproduces, run_id, "rerun", run.verdict)
    told = [event.payload for event in runs.events(db, run_id) if event.type == "verification"]
    expected = [] if found.verdict is None else [(found.id, found.verdict, found.message)]
    assert [(t["id"], t["verdict"], t["message"]) for t in told] == expected
    assert runs.provenance(db, run_id)["verifications"] == [found.as_dict()]
    return found


def test_equal_bits_are_a_reproduction(db: Database, clock: Clock) -> None:
    job, original = trained(db, clock)
    run = succeed(db, reproduction(db, clock, job), clock, records(job))
    assert (run.status, run.verdict, run.head, run.weights) == ("succeeded", "REPRODUCED", original.head, original.weights)
    found = verdict(db, run.id)
    assert (found.step, found.message) == (4, "equal through step 4, the last one.")
    words = [(event.type, event.payload["verdict"]) for event in runs.events(db, run.id) if "verdict" in event.payload]
    assert words[-2:] == [("verification", "REPRODUCED"), ("run.status", "REPRODUCED")], "a watcher sees it before the end"


def test_a_reproduction_may_be_interrupted(db: Database, clock: Clock) -> None:
    job, _ = trained(db, clock)
    lease = reproduction(db, clock, job)
    runs.append(db, lease, records(job)[:4], checkpoints=[checkpoint(records(job)[2])], now=clock.now)
    runs.reap(db, clock.tick(60))
    clock.tick(60)
    run = succeed(db, start(db, clock), clock, records(job, first=3))
    assert (run.verdict, run.attempt) == ("REPRODUCED", 2)


@pytest.mark.parametrize(("field", "step", "change", "expected", "got"), CHANGES)
def test_one_different_field_is_a_divergence(db: Database, clock: Clock, field: str, step: int, change: dict[str, Any],
                                             expected: str, got: str) -> None:
    job, _ = trained(db, clock)
    lease = reproduction(db, clock, job)
    made = records(job, change={step: change})
    result = runs.append(db, lease, made, checkpoints=[checkpoint(made[4])], now=clock.now)
    assert (result.stop, result.message) == ("diverged", f"step {step}: {field} expected {expected}, got {got}")
    found = verdict(db, lease.run_id)
    assert (found.verdict, found.field, found.step, found.expected) == ("DIVERGED", field, step, expected)
    assert found.got == (None if got == "None" else got)
    assert [s.record.step for s in runs.steps(db, lease.run_id)] == list(range(step + 1)), "the record that differs is evidence"
    assert runs.checkpoints(db, lease.run_id) == []
    run = runs.finish(db, lease, Outcome("failed", "diverged"), clock.now)
    assert (run.status, run.stop_reason, run.verdict) == ("failed", "diverged", "DIVERGED")
    assert verdict(db, run.id) == found


def test_the_first_record_counts_too(db: Database, clock: Clock) -> None:
    """Another initial state shows as weights at step 0: its genesis is right for what it says."""
    job, _ = trained(db, clock)
    lease = reproduction(db, clock, job)
    made = records(job)
    other = replace(made[0], state=state(0, "x"),
                    previous=genesis(job.training_digest, MANIFEST.digest(), "mok-1", state(0, "x").weights))
    assert runs.append(db, lease, [other], now=clock.now).stop == "diverged"
    assert (verdict(db, lease.run_id).field, verdict(db, lease.run_id).step) == ("weights", 0)


@pytest.mark.parametrize(("change", "words"), [
    ({"native": {"libmok.so": "sha256:" + "0" * 64}}, "native libraries libmok.so sha256:c"),
    ({"version": "0.2.0"}, "version 0.1.0 -> 0.2.0"),
    ({"git": {"commit": "d" * 40, "dirty": True, "patch": "sha256:" + "e" * 64}}, "with changes (sha256:e"),
    ({"git": None}, "-> outside a checkout"),
])
def test_other_code_with_other_bits_is_source_drift(db: Database, clock: Clock, change: dict[str, Any], words: str) -> None:
    """Case 11: code that differs can't tell anything about reproducibility, unless the bits are equal after all."""
    job, _ = trained(db, clock)
    lease = reproduction(db, clock, job, environment=other_code(**change))
    result = runs.append(db, lease, records(job, change={3: {"tokens": 61}}), now=clock.now)
    found = verdict(db, lease.run_id)
    assert result.stop == "source_drift" and result.message == found.message
    assert (found.verdict, found.field, found.step, found.expected, found.got) == ("INCONCLUSIVE", "tokens", 3, "60", "61")
    assert "The code differs too" in found.message and words in found.message
    assert runs.finish(db, lease, Outcome("failed", "source_drift"), clock.now).status == "failed"

    run = succeed(db, reproduction(db, clock, job, environment=other_code(**change)), clock, records(job))
    found = verdict(db, run.id)
    assert found.verdict == "REPRODUCED" and words in found.message and "and yet the bits are equal" in found.message


def test_other_data_are_source_drift(db: Database, clock: Clock) -> None:
    job, _ = trained(db, clock)
    run = jobs.create_run(db, job.id)
    lease = runs.claim(db, clock.now, "w", {"cpu": 1})
    assert lease is not None
    runs.mark_starting(db, lease, clock.now)
    other = DataManifest("python-stdlib", MANIFEST.files[:1], "bytes", 6522)
    assert runs.mark_running(db, lease, clock.now, ENVIRONMENT, PLACEMENT, other).stop == "source_drift"
    found = verdict(db, run.id)
    assert (found.verdict, found.field, found.step) == ("INCONCLUSIVE", "manifest", None)
    assert (found.expected, found.got) == (str(MANIFEST.digest()), str(other.digest()))
    assert found.message == "the data are not the job's: file 'ast.py' is gone"
    assert runs.finish(db, lease, Outcome("failed", "source_drift"), clock.now).stop_reason == "source_drift"
    assert verdict(db, run.id) == found


def test_data_that_change_under_a_worker_are_source_drift(db: Database, clock: Clock) -> None:
    job, _ = trained(db, clock)
    lease = reproduction(db, clock, job)
    runs.append(db, lease, records(job)[:3], now=clock.now)
    run = runs.finish(db, lease, Outcome("failed", "source_drift", "file 'abc.py' changed"), clock.now)
    assert (run.stop_reason, verdict(db, run.id).verdict, verdict(db, run.id).message) == (
        "source_drift", "INCONCLUSIVE", "file 'abc.py' changed")


def ended_early(db: Database, clock: Clock, stop: str, last: int) -> tuple[jobs.Job, Run]:
    job = submit(db).job
    lease = start(db, clock)
    runs.append(db, lease, records(job)[: last + 1], now=clock.now)
    status = "cancelled" if stop == "user_cancelled" else "failed"
    return job, runs.finish(db, lease, Outcome(status, stop), clock.now)  # type: ignore[arg-type]


@pytest.mark.parametrize(("stop", "why"), [("non_finite", "failed (non_finite)"), ("user_cancelled", "cancelled")])
def test_an_original_that_ended_early_is_compared_up_to_its_end(db: Database, clock: Clock, stop: str, why: str) -> None:
    job, _ = ended_early(db, clock, stop, 2)
    run = succeed(db, reproduction(db, clock, job), clock, records(job))
    found = verdict(db, run.id)
    assert (run.status, found.verdict, found.step) == ("succeeded", "INCONCLUSIVE", 2)
    assert found.message == f"equal through step 2: the original {why} after step 2, this run succeeded after step 4."
    job, _ = ended_early(db, clock, stop, 2)
    lease = reproduction(db, clock, job)
    assert runs.append(db, lease, records(job, change={2: {"tokens": 1}}), now=clock.now).stop == "diverged"


def test_a_reproduction_that_ends_early_says_how_far_it_was_equal(db: Database, clock: Clock) -> None:
    job, _ = trained(db, clock)
    lease = reproduction(db, clock, job)
    runs.append(db, lease, records(job)[:4], now=clock.now)
    runs.cancel(db, lease.run_id)
    run = runs.finish(db, lease, Outcome("cancelled", "user_cancelled"), clock.now)
    assert verdict(db, run.id).message == (
        "equal through step 3: the original succeeded after step 4, this run cancelled after step 3.")
    queued = jobs.create_run(db, job.id)
    runs.cancel(db, queued.id)
    found = verdict(db, queued.id)
    assert (found.verdict, found.status, found.ended_at) == (None, "cancelled", clock.now), "nothing was concluded"
    assert found.message == "no step could be compared: the original succeeded after step 4, this run cancelled after no step."


def test_attempts_that_contradict_each_other_are_compared_too(db: Database, clock: Clock) -> None:
    job, _ = trained(db, clock)
    lease = reproduction(db, clock, job)
    runs.append(db, lease, records(job)[:4], checkpoints=[checkpoint(records(job)[0])], now=clock.now)
    runs.release(db, lease, "worker_lost", "gone", clock.now)
    clock.tick(2)
    lease = start(db, clock)
    result = runs.append(db, lease, records(job, first=1, change={2: {"batch": digest("other")}}), now=clock.now)
    assert result.stop == "nondeterministic"
    assert (verdict(db, lease.run_id).verdict, verdict(db, lease.run_id).field) == ("DIVERGED", "batch")
    run = runs.finish(db, lease, Outcome("failed", "nondeterministic"), clock.now)
    assert (run.stop_reason, run.verdict) == ("nondeterministic", "DIVERGED")


def test_a_reproduction_can_be_reproduced(db: Database, clock: Clock) -> None:
    job, original = trained(db, clock)
    second = succeed(db, reproduction(db, clock, job), clock, records(job))
    third = jobs.create_run(db, job.id, reproduces=second.id, now=clock.tick())
    run = succeed(db, start(db, clock), clock, records(job))
    assert (run.id, run.reproduces, run.verdict) == (third.id, second.id, "REPRODUCED")
    assert [(v.executed_by, v.run_id) for v in runs.verifications(db, second.id)] == [
        (second.id, original.id), (third.id, second.id)]

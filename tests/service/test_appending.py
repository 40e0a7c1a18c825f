"""What attempts report: the chain is linked, repeats change nothing, differences end the run."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from mok_service import jobs, runs
from mok_service.db.session import Database
from mok_service.errors import Conflict
from mok_service.provenance.chain import StateDigests, float_bits
from mok_service.provenance.checkpoint import CheckpointFile
from mok_service.provenance.manifest import ManifestFile
from mok_service.runs import AppendResult, LogLine, Outcome
from tests.databases import Clock
from tests.service.play import (
    ENVIRONMENT,
    MANIFEST,
    PLACEMENT,
    checkpoint,
    digest,
    event_words,
    records,
    start,
    state,
    submit,
    succeed,
)

GO_ON = AppendResult(None, None)


def test_records_come_back_as_they_were(db: Database, clock: Clock) -> None:
    job = submit(db).job
    lease, made = start(db, clock), records(job)
    assert runs.append(db, lease, made[:3], now=clock.now) == GO_ON
    assert runs.append(db, lease, made[3:], now=clock.tick()) == GO_ON
    stored = runs.steps(db, lease.run_id)
    assert [step.record.body() for step in stored] == [record.body() for record in made]
    for step, record in zip(stored, made, strict=True):
        assert (step.record.seconds, step.record.learning_rate) == (record.seconds, record.learning_rate)
        assert str(step.record.metrics) == str(record.metrics), "nan is kept"
    assert [step.attempt for step in stored] == [1] * 5 and stored[0].at == clock.now - timedelta(seconds=1)
    assert stored[1].as_dict()["metrics"] == {"aux": None, "tokens_per_second": 240.0}, "JSON has no NaN"
    assert [step.record.step for step in runs.steps(db, lease.run_id, after=1, limit=2)] == [2, 3]
    run = runs.get_run(db, lease.run_id)
    assert (run.step, run.head) == (4, made[-1].head())


def test_a_non_finite_loss_is_stored_by_its_bits(db: Database, clock: Clock) -> None:
    job = submit(db).job
    infinite = float_bits(float("inf"))
    lease, made = start(db, clock), records(job, change={1: {"loss_bits": "7fc00000", "grad_norm_bits": infinite}})
    runs.append(db, lease, made, now=clock.now)
    shown = runs.steps(db, lease.run_id)[1].as_dict()
    assert (shown["loss"], shown["loss_bits"]) == (None, "7fc00000")
    assert (shown["grad_norm"], shown["grad_norm_bits"]) == (None, "7f800000")


def test_the_same_again_changes_nothing(db: Database, clock: Clock) -> None:
    job = submit(db).job
    lease, made = start(db, clock), records(job)
    lines = [LogLine(number, clock.now, "info", f"line {number}", number) for number in range(3)]
    first = (lease, made[:3], lines[:2], [checkpoint(made[2])])
    runs.append(db, *first, now=clock.now)


    def everything() -> list[str]:  # as text: there are NaNs in it
        return [repr(look(db, lease.run_id)) for look in (runs.steps, runs.events, runs.logs, runs.checkpoints)]

    before = everything()
    assert runs.append(db, *first, now=clock.tick()) == GO_ON
    assert everything() == before
    runs.append(db, lease, made[1:5], lines, now=clock.now)
    assert [step.record.step for step in runs.steps(db, lease.run_id)] == [0, 1, 2, 3, 4]
    assert [(log.number, log.line) for log in runs.logs(db, lease.run_id)] == list(enumerate(lines, start=1))


def test_a_resumed_attempt_confirms_what_the_first_one_stored(db: Database, clock: Clock) -> None:
    job = submit(db).job
    made = records(job)
    lease = start(db, clock)
    runs.append(db, lease, made[:4], checkpoints=[checkpoint(made[2])], now=clock.now)
    runs.release(db, lease, "worker_lost", "gone", clock.now)
    clock.tick(2)
    lease = start(db, clock)
    assert runs.append(db, lease, made[3:4], now=clock.now) == GO_ON
    assert succeed(db, lease, clock, made[4:]).status == "succeeded"
    assert [step.attempt for step in runs.steps(db, lease.run_id)] == [1, 1, 1, 1, 2], "nothing is overwritten"
    assert [(a.from_step, a.last_step) for a in runs.attempts(db, lease.run_id)] == [(None, 3), (3, 4)]


CHANGES: list[tuple[str, int, dict[str, Any], str, str]] = [
    ("batch", 3, {"batch": digest("other")}, str(digest("batch", 3)), str(digest("other"))),
    ("tokens", 3, {"tokens": 61}, "60", "61"),
    ("loss", 3, {"loss_bits": float_bits(1.5)}, float_bits(5 / 3), float_bits(1.5)),
    ("expert_load", 3, {"expert_load": digest("other")}, str(digest("load", 3)), str(digest("other"))),
    ("grad_norm", 3, {"grad_norm_bits": float_bits(-0.0)}, float_bits(1.0), "80000000"),
    ("weights", 2, {"state": state(2, "x")}, str(state(2).weights), str(state(2, "x").weights)),
    ("optimizer", 2, {"state": StateDigests(state(2).weights, digest("o"), state(2).cursor)},
     str(state(2).optimizer), str(digest("o"))),
    ("cursor", 2, {"state": StateDigests(state(2).weights, state(2).optimizer, digest("c"))},
     str(state(2).cursor), str(digest("c"))),
    ("weights", 2, {"state": None}, str(state(2).weights), "None"),
]


@pytest.mark.parametrize(("field", "step", "change", "expected", "got"), CHANGES)
def test_another_body_of_a_stored_step_ends_the_run(db: Database, clock: Clock, field: str, step: int, change: dict[str, Any],
                                                     expected: str, got: str) -> None:
    job = submit(db).job
    made = records(job)
    lease = start(db, clock)
    runs.append(db, lease, made[:4], checkpoints=[checkpoint(made[0])], now=clock.now)
    runs.release(db, lease, "worker_lost", "gone", clock.now)
    clock.tick(2)
    lease = start(db, clock)
    result = runs.append(db, lease, records(job, first=1, change={step: change}), now=clock.now)
    assert result.stop == "nondeterministic"
    assert result.message == f"nondeterministic at step {step}: {field} expected {expected} (attempt 1), got {got} (attempt 2)"
    assert runs.renew(db, lease, clock.now) == "cancel"
    assert runs.append(db, lease, records(job, first=step), now=clock.now).stop == "nondeterministic", "what follows is dropped"
    assert [s.record.body() for s in runs.steps(db, lease.run_id)] == [record.body() for record in made[:4]]
    run = runs.finish(db, lease, Outcome("succeeded", "finished", None, state(4).weights, made[4].head()), clock.now)
    assert (run.status, run.stop_reason, run.message) == ("failed", "nondeterministic", result.message)
    assert runs.attempts(db, run.id)[-1].end == "failed"


def test_a_broken_link_ends_the_run(db: Database, clock: Clock) -> None:
    job = submit(db).job
    made = records(job)
    lease = start(db, clock)
    runs.append(db, lease, made[:2], now=clock.now)
    result = runs.append(db, lease, [replace(made[2], previous=digest("else"))], now=clock.now)
    assert result.message == (f"nondeterministic at step 2: previous expected {made[1].head()} (the record before it), "
                              f"got {digest('else')} (attempt 1)")
    job = submit(db, seed=8).job
    lease = start(db, clock)
    assert runs.append(db, lease, records(job, manifest=replace(MANIFEST, tokens=1)), now=clock.now).stop == "nondeterministic"
    assert runs.steps(db, lease.run_id) == [], "record 0 must link to the genesis of this very job"


def test_gaps_and_early_records_are_refused(db: Database, clock: Clock) -> None:
    job = submit(db).job
    made = records(job)
    lease = runs.claim(db, clock.now, "w", {"cpu": 1})
    assert lease is not None
    runs.mark_starting(db, lease, clock.now)
    with pytest.raises(Conflict, match="must be marked running"):
        runs.append(db, lease, made, now=clock.now)
    runs.mark_running(db, lease, clock.now, ENVIRONMENT, PLACEMENT, MANIFEST)
    with pytest.raises(Conflict, match="step 1 was sent, and the next one is step 0"):
        runs.append(db, lease, made[1:], now=clock.now)
    runs.append(db, lease, made[:2], now=clock.now)
    with pytest.raises(Conflict, match="step 3 was sent, and the next one is step 2"):
        runs.append(db, lease, made[3:], [LogLine(0, clock.now, "info", "lost with it")], now=clock.now)
    assert runs.logs(db, lease.run_id) == [], "one transaction: all or nothing"
    with pytest.raises(Conflict, match="a checkpoint of step 2 was sent, and there is no record of that step"):
        runs.append(db, lease, [], checkpoints=[checkpoint(made[2])], now=clock.now)
    with pytest.raises(Conflict, match="step record 0 has no initial state"):
        submit(db)
        runs.append(db, start(db, clock), [replace(made[0], state=None)], now=clock.now)


def test_checkpoints_must_be_the_state_of_the_chain(db: Database, clock: Clock) -> None:
    job = submit(db).job
    made = records(job)
    lease = start(db, clock)
    good = checkpoint(made[2])
    runs.append(db, lease, made[:4], checkpoints=[good, checkpoint(made[3])], now=clock.now)
    assert [c.info for c in runs.checkpoints(db, lease.run_id)] == [good, checkpoint(made[3])]
    again = replace(good, files=(CheckpointFile("weights.safetensors", 9001, "e" * 64),))
    assert runs.append(db, lease, [], checkpoints=[again], now=clock.tick()) == GO_ON
    assert runs.checkpoints(db, lease.run_id)[0].info == again, "the files that are there now, of the same state"
    other = replace(checkpoint(made[3]), state=state(3, "x"))
    result = runs.append(db, lease, [], checkpoints=[other], now=clock.now)
    assert result.message == (f"nondeterministic at step 3: weights of the checkpoint expected {state(3).weights} (attempt 1), "
                              f"got {state(3, 'x').weights} (attempt 1)")
    for wrong, what in ((replace(good, state=state(2, "x")), "weights"), (replace(good, head=digest("h")), "head")):
        job = submit(db).job
        lease = start(db, clock)
        result = runs.append(db, lease, records(job)[:3], checkpoints=[wrong], now=clock.now)
        assert result.message is not None and f"{what} of the checkpoint expected" in result.message
        assert runs.checkpoints(db, lease.run_id) == []


def test_log_lines_of_any_text_are_kept(db: Database, clock: Clock) -> None:
    submit(db)
    lease = start(db, clock)
    texts = ["plain", "", "报告-🚀", "a\nb\t\x1b[31m", "nul \0 and \udcff", "x" * 100_000]
    runs.append(db, lease, [], [LogLine(number, clock.now, "warning", text) for number, text in enumerate(texts)], now=clock.now)
    assert [log.line.message for log in runs.logs(db, lease.run_id)] == [*texts[:4], "nul \ufffd and ?", texts[5]]
    told = [event.payload["message"] for event in runs.events(db, lease.run_id) if event.type == "log"]
    assert told[:4] == texts[:4]


def test_events_have_no_gaps_and_can_be_followed(db: Database, clock: Clock) -> None:
    job = submit(db).job
    lease, made = start(db, clock), records(job)
    succeed(db, lease, clock, made)
    assert event_words(db, lease.run_id) == ["queued", "claimed", "starting", "running", "stopping", "succeeded"]
    everything = runs.events(db, lease.run_id)
    followed, last = [], 0
    while batch := runs.events(db, lease.run_id, after=last, limit=2):
        followed += batch
        last = batch[-1].number
    assert followed == everything
    assert [event.payload["step"] for event in everything if event.type == "step"] == [0, 1, 2, 3, 4]
    assert runs.events(db, lease.run_id, after=2**70) == [] and runs.steps(db, lease.run_id, after=-(2**70)) != []


# ---- Data ------------------------------------------------------------------------------------------------------------

def test_the_manifest_is_written_once(db: Database, clock: Clock) -> None:
    job = submit(db).job
    assert job.manifest is None
    lease = start(db, clock)
    assert jobs.get_job(db, job.id).manifest == MANIFEST
    runs.release(db, lease, "stopped", "drained", clock.now)
    start(db, clock)
    assert jobs.get_job(db, job.id).manifest == MANIFEST
    attempt = runs.attempts(db, lease.run_id)[-1]
    assert (attempt.environment, attempt.placement, attempt.running_at) == (ENVIRONMENT, PLACEMENT, clock.now)


@pytest.mark.parametrize(("manifest", "message"), [
    (replace(MANIFEST, files=(MANIFEST.files[0], ManifestFile("ast.py", 64260, "c" * 64))),
     f"file 'ast.py': expected 64260 bytes, sha256:{'b' * 64}; got 64260 bytes, sha256:{'c' * 64}"),
    (replace(MANIFEST, files=MANIFEST.files[:1]), "file 'ast.py' is gone"),
    (replace(MANIFEST, files=(*MANIFEST.files, ManifestFile("new.py", 1, "0" * 64))), "file 'new.py' is new"),
    (replace(MANIFEST, files=MANIFEST.files[::-1]), "the files are read in another order"),
    (replace(MANIFEST, tokens=5), "tokens: expected 70783, got 5"),
])
def test_other_data_end_the_run(db: Database, clock: Clock, manifest: Any, message: str) -> None:
    job = submit(db).job
    runs.release(db, start(db, clock), "stopped", "drained", clock.now)
    lease = runs.claim(db, clock.now, "w", {"cpu": 1})
    assert lease is not None
    runs.mark_starting(db, lease, clock.now)
    result = runs.mark_running(db, lease, clock.now, ENVIRONMENT, PLACEMENT, manifest)
    assert result == AppendResult("source_drift", f"the data are not the job's: {message}")
    assert runs.append(db, lease, records(job), now=clock.now).stop == "source_drift"
    assert runs.steps(db, lease.run_id) == []
    run = runs.finish(db, lease, Outcome("failed", "source_drift", "as told"), clock.now)
    assert (run.status, run.stop_reason, run.message) == ("failed", "source_drift", result.message)
    assert jobs.get_job(db, job.id).manifest == MANIFEST

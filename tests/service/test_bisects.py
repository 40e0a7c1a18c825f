"""A bisect's progress, conclusion and contests, on both kinds of database."""

from __future__ import annotations

from typing import Any

import pytest

from mok_service import jobs, runs, verifying
from mok_service.db.session import Database
from mok_service.provenance.bisection import Doing
from mok_service.provenance.verify import Finding
from mok_service.runs import Lease, Outcome, Verification
from mok_service.runs.types import Progress
from tests.databases import Clock
from tests.service.play import checkpoint, records, start, submit

REPORT = {"type": "mok.bisect/v1", "values": [1.5, "nan"]}
FINDING = Finding("DIVERGED", "m", "mok_combine", 2, "00000000", "80000000")
DONE = Outcome("succeeded", "finished", finding=FINDING, report=REPORT)


@pytest.fixture
def pair(db: Database, clock: Clock) -> list[str]:
    """Two equal runs of one job."""
    job, made = submit(db, steps=4).job, list[str]()
    for _ in range(2):
        lease, chain = start(db, clock), records(job)
        runs.append(db, lease, chain, checkpoints=[checkpoint(chain[4])], now=clock.now)
        assert chain[-1].state is not None
        outcome = Outcome("succeeded", "finished", None, chain[-1].state.weights, chain[-1].head())
        made.append(runs.finish(db, lease, outcome, clock.now).id)
        if len(made) == 1:
            jobs.create_run(db, job.id, now=clock.tick())
    return made


def begin(db: Database, clock: Clock, pair: list[str], **given: Any) -> tuple[Verification, Lease]:
    asked = verifying.bisect(db, *pair, now=clock.tick(), **given)
    return asked, start(db, clock)


def test_progress_and_conclusion(db: Database, clock: Clock, pair: list[str]) -> None:
    asked, lease = begin(db, clock, pair)
    assert asked.progress == Progress(0, 4)
    for _ in range(2):  # a lost answer: sent again, told once
        runs.append(db, lease, [], now=clock.now, doing=Doing("replay", 2, 3))
    found = runs.get_verification(db, asked.id)
    assert (found.progress, found.status) == (Progress(1, 3), "running")
    assert [event.type for event in runs.events(db, lease.run_id)].count("progress") == 1
    ended = runs.finish(db, lease, DONE, clock.now)
    found = runs.get_verification(db, asked.id)
    assert (ended.status, ended.verdict, found.verdict, found.report) == ("succeeded", "DIVERGED", "DIVERGED", REPORT)
    assert (found.progress, found.field, found.expected) == (Progress(3, 3), "mok_combine", "00000000")
    assert [v.id for v in runs.verifications(db, pair[0])][-1] == found.id
    assert [v.id for v in runs.verifications(db, pair[1])][-1] == found.id
    assert (asked.id, "local") in runs.unattested(db) and lease.run_id not in dict(runs.unattested(db))


def test_a_conclusion_comes_before_a_pause_and_after_a_cancel(db: Database, clock: Clock, pair: list[str]) -> None:
    asked, lease = begin(db, clock, pair)
    runs.pause(db, lease.run_id, now=clock.now)
    assert runs.finish(db, lease, DONE, clock.now).status == "succeeded"
    assert runs.get_verification(db, asked.id).verdict == "DIVERGED"
    asked, lease = begin(db, clock, pair)
    verifying.cancel_verification(db, asked.id, now=clock.now)
    assert runs.finish(db, lease, DONE, clock.now).status == "cancelled"
    found = runs.get_verification(db, asked.id)
    assert (found.verdict, found.status, found.report) == (None, "cancelled", None)


def test_one_that_concludes_nothing_has_not_succeeded(db: Database, clock: Clock, pair: list[str]) -> None:
    asked, lease = begin(db, clock, pair)
    assert runs.finish(db, lease, Outcome("succeeded", "finished"), clock.now).stop_reason == "internal"
    found = runs.get_verification(db, asked.id)
    assert (found.status, found.verdict) == ("failed", "INCONCLUSIVE")


def test_what_is_compared_is_of_the_record(db: Database, pair: list[str]) -> None:
    def within(part: Any, whole: Any) -> bool:
        if isinstance(part, dict):
            return all(key in whole and within(value, whole[key]) for key, value in part.items())
        if isinstance(part, list):
            return len(part) == len(whole) and all(map(within, part, whole))
        return bool(part == whole)

    for run_id in (*pair, jobs.create_run(db, runs.get_run(db, pair[0]).job_id).id):
        part = runs.record_to_bisect(db, run_id)
        assert part.keys() == {"identity", "spec", "arithmetic", "data", "chain", "checkpoints"}
        assert within(part, runs.provenance(db, run_id))
    assert part["data"] is None, "this run hasn't read them"

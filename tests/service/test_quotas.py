"""Quotas, shares and places in the queue, on both databases: refused at submit, waiting at claims, told to users."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import event

from mok_service import jobs, runs
from mok_service.db import queries, tables
from mok_service.db.ids import new_id
from mok_service.db.session import Database
from mok_service.errors import InvalidSpec, MokError, QuotaExceeded, QuotaForbids
from mok_service.idempotency import Idempotency
from mok_service.runs import Node, Outcome
from tests.databases import Clock
from tests.service.play import NO_ROOM_LIMIT, checkpoint, digest, records, spec, start

DAY = timedelta(days=1)


def submit(db: Database, tenant: str = "ada", now: datetime | None = None, **values: Any) -> jobs.Submitted:
    return jobs.submit(db, spec(**values), tenant=tenant, now=now)


def claim(db: Database, clock: Clock, capacity: Any = NO_ROOM_LIMIT) -> str | None:
    lease = runs.claim(db, clock.now, "w", capacity)
    return None if lease is None else lease.run_id


def refused(error: type[MokError], db: Database, **values: Any) -> dict[str, Any]:
    before = len(jobs.list_jobs(db, "ada").items)
    with pytest.raises(error) as caught:
        submit(db, **values)
    assert len(jobs.list_jobs(db, "ada").items) == before
    return caught.value.detail


# ---- At submit -------------------------------------------------------------------------------------------------------

def test_without_a_quota_nothing_is_refused(db: Database) -> None:
    quota = runs.get_quota(db, "ada")
    assert quota.as_dict()["limits"] == {"weight": 1.0, "devices_max": None, "runs_max": None, "queued_max": None,
                                         "checkpoint_bytes_max": None, "jobs_a_day_max": None}
    submit(db)
    assert runs.get_quota(db, "ada").used["queued_max"] == 1


def test_runs_that_wait_are_counted_also_the_paused(db: Database, clock: Clock) -> None:
    runs.set_quota(db, "ada", {"queued_max": 2})
    first = submit(db).run
    runs.pause(db, first.id, "ada")
    submit(db)
    assert refused(QuotaExceeded, db) == {"limit": "queued_max", "value": 2, "used": 2}
    with pytest.raises(QuotaExceeded):
        jobs.create_run(db, first.job_id, tenant="ada")
    submit(db, "ben")
    assert claim(db, clock) is not None
    submit(db)
    runs.resume(db, first.id, "ada")  # it counted all the while


def test_jobs_a_day(db: Database, clock: Clock) -> None:
    runs.set_quota(db, "ada", {"jobs_a_day_max": 2})
    submit(db)
    clock.tick(3600)
    submit(db)
    assert refused(QuotaExceeded, db)["used"] == 2
    clock.now += DAY - timedelta(seconds=3601)
    with pytest.raises(QuotaExceeded, match=r"2 of 2 jobs in the last 24 hours; the next one may come in 1 s"):
        submit(db)
    clock.tick(1)
    submit(db)


def test_what_the_quota_never_allows_is_forbidden(db: Database) -> None:
    runs.set_quota(db, "ada", {"devices_max": 1})
    assert refused(QuotaForbids, db, count=2) == {"limit": "devices_max", "value": 1, "wanted": 2}
    runs.set_quota(db, "ada", {"runs_max": 0})
    assert refused(QuotaForbids, db)["limit"] == "runs_max"
    assert (QuotaForbids.http_status, QuotaExceeded.http_status) == (403, 429)


def test_stored_checkpoints_count_until_they_are_deleted(db: Database, clock: Clock) -> None:
    made = submit(db)
    lease = start(db, clock)
    written = records(made.job)
    runs.append(db, lease, written, checkpoints=[checkpoint(written[-1])], now=clock.now)
    state = written[-1].state
    assert state is not None
    runs.finish(db, lease, Outcome("succeeded", "finished", None, state.weights, written[-1].head()), clock.now)
    waits = submit(db).run
    runs.set_quota(db, "ada", {"checkpoint_bytes_max": 9300})
    assert refused(QuotaForbids, db) == {"limit": "checkpoint_bytes_max", "value": 9300, "used": 9300}
    assert claim(db, clock) is None
    runs.report_nodes(db, "w", [Node("n", {"cpu": 1}, {"cpus": "2"}, "w")], clock.now)
    assert runs.standings(db, [waits])[waits.id].why_waiting == "tenant ada stores 9,300 of 9,300 bytes of checkpoints"
    runs.checkpoint_deleted(db, made.run.id, written[-1].step, "ada")
    assert claim(db, clock) == waits.id and submit(db).created


def test_two_at_once_dont_both_get_the_last_place(db: Database) -> None:
    runs.set_quota(db, "ada", {"queued_max": 3})

    def attempt(number: int) -> bool:
        try:
            return submit(db, name=f"job {number}").created
        except QuotaExceeded:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(8))) == 3


def test_a_retry_of_the_request_that_took_the_last_place_is_answered(db: Database) -> None:
    runs.set_quota(db, "ada", {"queued_max": 1})
    key = Idempotency("POST /v1/jobs", "k", digest("body"))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: jobs.submit(db, spec(), tenant="ada", idempotency=key), range(8)))
    assert len({answer.run.id for answer in answers}) == 1 and sum(answer.created for answer in answers) == 1


@pytest.mark.parametrize("changes", [{"weight": 0.0}, {"weight": float("nan")}, {"runs_max": -1}, {"queued_max": 2**31},
                                     {"checkpoint_bytes_max": 2**63}])
def test_limits_that_mean_nothing_are_refused(db: Database, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec, match=f"{next(iter(changes))} = .*allowed: "):
        runs.set_quota(db, "ada", changes)
    assert runs.get_quota(db, "ada").limits.weight == 1.0


def test_limits_change_one_by_one(db: Database) -> None:
    runs.set_quota(db, "ada", {"runs_max": 4, "weight": 2.0})
    runs.set_quota(db, "ada", {"checkpoint_bytes_max": 2**63 - 1})
    limits = runs.set_quota(db, "ada", {"runs_max": None}).limits
    assert (limits.runs_max, limits.weight, limits.checkpoint_bytes_max) == (None, 2.0, 2**63 - 1)


# ---- At claims -------------------------------------------------------------------------------------------------------

def test_a_quota_of_runs_keeps_the_next_one_waiting_and_nobody_else(db: Database, clock: Clock) -> None:
    runs.set_quota(db, "ada", {"runs_max": 1})
    first, second = submit(db).run, submit(db).run
    other = submit(db, "ben").run
    assert {claim(db, clock), claim(db, clock)} == {first.id, other.id} and claim(db, clock) is None
    runs.report_nodes(db, "w", [Node("n", {"cpu": 1}, {"cpus": "8"}, "w")], clock.now)
    assert runs.standings(db, [second])[second.id].why_waiting == "tenant ada has 1 of 1 runs"
    runs.cancel(db, first.id, "ada")
    assert claim(db, clock) == second.id


def test_tenants_take_turns_by_what_they_used(db: Database, clock: Clock) -> None:
    """One device: the tenant that used it for an hour waits for the one that didn't, whatever came first."""
    mine = [submit(db).run.id for _ in range(3)]
    lease = runs.claim(db, clock.now, "w", {"cpu": 1})
    assert lease is not None and lease.run_id == mine[0]
    theirs = submit(db, "ben").run.id
    clock.tick(3600)
    runs.release(db, lease, "stopped", "only a test", clock.now)
    order = [claim(db, clock, {"cpu": n}) for n in range(1, 5)]
    assert order[0] == theirs and set(order[1:]) == set(mine)


# ---- Places ----------------------------------------------------------------------------------------------------------

def standing(db: Database, run_id: str, tenant: str = "ada") -> runs.Standing:
    return runs.standings(db, [runs.get_run(db, run_id, tenant)])[run_id]


def test_a_queued_run_knows_its_place_and_what_it_waits_for(db: Database, clock: Clock) -> None:
    first = submit(db, steps=10, threads=2)
    assert standing(db, first.run.id).why_waiting == "no scheduler has reported a machine in the last 120 s"
    runs.report_nodes(db, "w", [Node("n", {"cpu": 1, "cuda": 1}, {"cpus": "2"}, "w")], clock.now)
    assert standing(db, first.run.id).why_waiting == "it starts at the scheduler's next round"
    lease = start(db, clock)
    second, third = submit(db, threads=2).run.id, submit(db, threads=1, now=clock.now + timedelta(seconds=1)).run.id
    assert standing(db, second).why_waiting == "2 CPUs wanted, 0 free; how long the active runs take isn't known yet"
    assert standing(db, second).estimated_start is None
    clock.tick(10)
    runs.append(db, lease, records(first.job)[:6], now=clock.now)
    found = standing(db, second)
    assert (found.position, found.of) == (1, 2) and found.estimated_start == clock.now + timedelta(seconds=10)
    assert found.why_waiting.startswith(f"2 CPUs wanted, 0 free; next to end: {first.run.id}, expected at 2026-01-01T00:00:20")
    last = standing(db, third)
    assert last.position == 2 and last.estimated_start == clock.now + timedelta(seconds=30), "a run like the first comes before"
    gpu = submit(db, device="cuda").run.id
    assert standing(db, gpu).why_waiting.startswith("1 CPU beside 1 GPU wanted, 0 free; next to end: ")
    runs.report_nodes(db, "w", [Node("n", {"cpu": 1, "cuda": 0}, {"cpus": "2"}, "w")], clock.now)
    assert standing(db, gpu).why_waiting == "1 GPU wanted, and the cluster has 0"
    assert runs.with_standing(db, [runs.get_run(db, first.run.id, "ada")])[0]["queue"] is None


def test_a_run_kept_back_and_a_run_in_its_pause_are_told_so(db: Database, clock: Clock) -> None:
    runs.report_nodes(db, "w", [Node("n", {"cpu": 1}, {"cpus": "2"}, "w")], clock.now)
    submit(db, threads=1)
    start(db, clock)
    big, small = submit(db, threads=0).run.id, submit(db, threads=1, now=clock.now + timedelta(seconds=1)).run.id
    assert standing(db, small).why_waiting == f"{big} goes first, and this run could delay it"
    runs.cancel(db, big, "ada")
    lease = start(db, clock)
    assert lease.run_id == small
    runs.release(db, lease, "worker_lost", "its node is gone", clock.now, clock.now + timedelta(seconds=9))
    assert standing(db, small).why_waiting == "it is tried again at 2026-01-01T00:00:09.000000Z"


def many(db: Database, clock: Clock, count: int) -> None:
    """Queued runs of three tenants in two priorities."""
    made = submit(db)
    with db.read() as tx:
        row = queries.run(tx, made.run.id)
    assert row is not None
    rows = []
    for number in range(count):
        at = clock.now + timedelta(seconds=number)
        rows.append({**row, "id": new_id("run"), "tenant": "abc"[number % 3], "queue_rank": -(number % 2), "created_at": at,
                     "execution": {**row["execution"], "priority": number % 2}})
    with db.write() as tx:
        queries.add(tx, tables.runs, rows)


def test_a_claim_reads_as_much_of_a_long_queue_as_of_a_short_one(db: Database, clock: Clock) -> None:
    read = list[int]()

    @event.listens_for(db.engine, "before_cursor_execute")
    def count(*_: Any) -> None:
        read.append(1)

    needed = []
    for more in (500, 3000):
        many(db, clock, more)
        read.clear()
        assert claim(db, clock) is not None
        needed.append(len(read))
    assert needed[0] == needed[1]
    with db.read() as tx:
        from mok_service.db import queue

        assert len(queue.waiting_runs(tx, clock.now)) <= 7 * queue.OF_A_GROUP_MAX
    if db.dialect == "sqlite":
        with db.read() as tx:
            plan = tx.exec_driver_sql("EXPLAIN QUERY PLAN SELECT id FROM runs WHERE status = 'queued' AND (tenant, device, "
                                      "queue_rank, created_at) > ('a', 'cpu', 0, '9') ORDER BY tenant, device, queue_rank, "
                                      "created_at, id LIMIT 64").all()
        assert "SEARCH runs USING COVERING INDEX ix_runs_queue" in str(plan)


def test_every_group_is_seen_however_long_the_others_are(db: Database, clock: Clock) -> None:
    many(db, clock, 700)
    last = submit(db, "zoe").run.id
    assert standing(db, last, "zoe").position in (351, 352)
    urgent = submit(db, "zoe", priority=5).run.id
    assert standing(db, urgent, "zoe").position == 1
    queued = runs.list_runs(db, "a", status="queued", limit=50).items
    places = [found.position for found in runs.standings(db, queued).values()]
    assert all(place > 100 for place in places) and max(places) <= 702

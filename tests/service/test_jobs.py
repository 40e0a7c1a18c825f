"""Submitting, listing and running jobs again: cases 8, 12, 13, 17, 21, 23 and 24."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest
from sqlalchemy import func, select

from mok_service import jobs, runs
from mok_service.db import tables
from mok_service.db.session import Database
from mok_service.errors import Conflict, InvalidSpec, NotFound, Unrunnable
from mok_service.idempotency import Idempotency
from mok_service.runs import LogLine, Node
from mok_service.spec import SEED_MAX, CudaDevice, Machine, resolve, training_digest
from tests.databases import Clock
from tests.service.play import checkpoint, digest, execution, records, spec, start, submit, trained

ROUTE = "POST /v1/jobs"


def count(db: Database, table: str) -> int:
    with db.read() as tx:
        found: int = tx.execute(select(func.count()).select_from(tables.metadata.tables[table])).scalar_one()
    return found


# ---- Submit ----------------------------------------------------------------------------------------------------------

def test_a_submitted_job_is_resolved_and_its_first_run_is_queued(db: Database, clock: Clock) -> None:
    asked = spec(name="first", seed=3, priority=5, queue_deadline_seconds=60)
    submitted = jobs.submit(db, asked)
    job, run = submitted.job, submitted.run
    assert submitted.created
    assert job == jobs.get_job(db, job.id) and run == runs.get_run(db, run.id)
    assert str(job.training_digest) == training_digest(resolve(asked).training)
    assert job.spec == resolve(asked) and job.execution.micro_batches == 2
    assert job.submitted["execution"]["micro_batches"] == 0 and job.manifest is None and job.created_at == clock.now
    assert (run.kind, run.status, run.desired_state, run.attempt, run.step) == ("original", "queued", "run", 0, None)
    assert run.steps == 4
    assert run.queue_deadline_at is not None and (run.queue_deadline_at - clock.now).total_seconds() == 60
    events = runs.events(db, run.id)
    assert [(event.number, event.type, event.payload["status"]) for event in events] == [(1, "run.status", "queued")]


def test_values_come_back_from_their_rest_shape(db: Database, clock: Clock) -> None:
    job, run = trained(db, clock)
    job = jobs.get_job(db, job.id)
    assert jobs.Job.from_dict(job.as_dict()) == job and job.manifest is not None
    assert runs.Run.from_dict(run.as_dict()) == run and run.weights is not None


def test_a_seed_is_drawn_returned_and_recorded(db: Database, clock: Clock) -> None:
    """Case 8, without the training: a rerun is of the same job, so it has the same seed."""
    first, second = submit(db, seed=None).job, submit(db, seed=None).job
    assert first.training.seed is not None and 0 <= first.training.seed <= SEED_MAX
    assert first.training.seed != second.training.seed
    assert first.submitted["training"]["seed"] is None
    assert jobs.get_job(db, first.id).training.seed == first.training.seed
    run = runs.list_runs(db, job=first.id).items[0]
    assert runs.provenance(db, run.id)["seeds"]["seed"] == str(first.training.seed)


@pytest.mark.parametrize("seed", [0, 2**53 + 1, SEED_MAX])
def test_seeds_are_exact(db: Database, seed: int) -> None:
    """Case 21."""
    job = jobs.get_job(db, submit(db, seed=seed).job.id)
    assert job.training.seed == seed and job.as_dict()["seed"] == seed
    with db.read() as tx:
        assert tx.execute(select(tables.jobs.c.seed)).scalar_one() == seed


def test_a_job_that_a_machine_cannot_run_is_refused(db: Database) -> None:
    with pytest.raises(Unrunnable, match="asks for a CUDA device"):
        jobs.submit(db, spec(device="cuda"), machine=Machine(cpu_count=2, memory_bytes=2**33))
    assert count(db, "jobs") == 0
    jobs.submit(db, spec(device="cuda"), machine=Machine(cpu_count=2, memory_bytes=2**33, cuda_devices=(
        CudaDevice(name="H200", memory_bytes=2**37),)))


def test_more_devices_than_the_cluster_has_are_refused(db: Database, clock: Clock) -> None:
    """Case 23: as long as nothing was reported, or only long ago, nothing is known and the job may queue."""
    submit(db, device="cuda", count=2)
    runs.report_nodes(db, "w", [Node("a", {"cpu": 4, "cuda": 1}), Node("b", {"cpu": 4})], clock.now)
    with pytest.raises(Unrunnable, match=r"asks for 2 cuda device\(s\), and the cluster has 1") as refused:
        submit(db, device="cuda", count=2)
    assert refused.value.detail["allowed"] == 1
    submit(db, device="cuda", count=1)
    clock.tick(600)
    submit(db, device="cuda", count=2)
    assert count(db, "jobs") == count(db, "runs") == 3


def test_reported_nodes_replace_those_of_the_same_scheduler(db: Database, clock: Clock) -> None:
    runs.report_nodes(db, "w1", [Node("a", {"cpu": 1}), Node("b", {"cpu": 1}, {"zone": "x"})], clock.now)
    runs.report_nodes(db, "w2", [Node("b", {"cpu": 2}), Node("c", {"cuda": 8})], clock.tick())
    runs.report_nodes(db, "w1", [Node("a", {"cpu": 3})], clock.tick())
    assert [(node.name, node.capacity, node.worker) for node in runs.nodes(db)] == [
        ("a", {"cpu": 3}, "w1"), ("b", {"cpu": 2}, "w2"), ("c", {"cuda": 8}, "w2")]
    runs.report_nodes(db, "w2", [], clock.now)
    assert [node.name for node in runs.nodes(db)] == ["a"]


def test_initial_weights_of_a_run_get_their_digest(db: Database, clock: Clock) -> None:
    job, run = trained(db, clock)
    later = spec().model_dump()
    later["training"]["init_from"] = {"source": f"{run.id}@4", "weights": None}
    start_from = jobs.submit(db, type(spec()).model_validate(later)).job.training.init_from
    assert start_from is not None and start_from.weights == str(run.weights)
    later["training"]["init_from"]["weights"] = "sha256:" + "0" * 64
    with pytest.raises(Unrunnable, match="has the weights sha256:"):
        jobs.submit(db, type(spec()).model_validate(later))
    for source in (f"{run.id}@3", f"run_{'0' * 12}7{'0' * 3}8{'0' * 15}@4"):
        later["training"]["init_from"] = {"source": source, "weights": None}
        with pytest.raises(Unrunnable, match=f"there is no checkpoint {source}"):
            jobs.submit(db, type(spec()).model_validate(later))
    later["training"]["init_from"] = {"source": f"{run.id}@4", "weights": None}
    with pytest.raises(Unrunnable, match="there is no checkpoint"):
        jobs.submit(db, type(spec()).model_validate(later), tenant="other")
    assert job.training.init_from is None


# ---- Idempotency -----------------------------------------------------------------------------------------------------

def test_twenty_parallel_submits_with_one_key_make_one_job(db: Database, url: str, clock: Clock) -> None:
    """Case 12; the last submit comes after a restart, when the run has long gone on."""
    key = Idempotency(ROUTE, "retry-1", digest("body"))
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: jobs.submit(db, spec(seed=None), idempotency=key), range(20)))
    assert len({answer.job.id for answer in answers}) == len({answer.run.id for answer in answers}) == 1
    assert len({answer.job.training.seed for answer in answers}) == 1
    assert sum(answer.created for answer in answers) == 1
    assert (count(db, "jobs"), count(db, "runs"), count(db, "events")) == (1, 1, 1)
    assert runs.claim(db, clock.now, "w", {"cpu": 1}) is not None
    again = Database(url, clock=clock)
    late = jobs.submit(again, spec(seed=None), idempotency=key)
    again.close()
    assert (late.job, late.run, late.created) == (answers[0].job, answers[0].run, False)
    assert late.run.status == "queued", "the answer is the one that was lost"


def test_the_same_key_with_another_body_is_a_conflict(db: Database) -> None:
    """Case 13."""
    first = jobs.submit(db, spec(), idempotency=Idempotency(ROUTE, "k", digest("one")))
    with pytest.raises(Conflict, match=f"'k' was used with another body, for job {first.job.id}") as conflict:
        jobs.submit(db, spec(seed=8), idempotency=Idempotency(ROUTE, "k", digest("two")))
    assert conflict.value.detail == {"job": first.job.id, "run": first.run.id, "key": "k"}
    assert count(db, "jobs") == 1


def test_a_key_belongs_to_its_tenant_and_route(db: Database, clock: Clock) -> None:
    job, _ = trained(db, clock)
    key = Idempotency(ROUTE, "k", digest("b"))
    made = {jobs.submit(db, spec(), tenant=tenant, idempotency=key).job.id for tenant in ("a", "b")}
    route = f"POST /v1/jobs/{job.id}/runs"
    again = [jobs.create_run(db, job.id, idempotency=Idempotency(route, "k", digest("b"))) for _ in range(3)]
    assert len(made) == 2 and len({run.id for run in again}) == 1
    assert len(runs.list_runs(db, job=job.id).items) == 2


@pytest.mark.parametrize("key", ["", "a" * 256, "tab\t", "schlüssel", "nul\0"])
def test_a_malformed_key_is_refused(key: str) -> None:
    with pytest.raises(InvalidSpec, match="allowed: 1 to 255 printable ASCII characters"):
        Idempotency(ROUTE, key, digest("b"))


# ---- Lists -----------------------------------------------------------------------------------------------------------

def test_paging_through_one_timestamp_while_rows_change(db: Database, clock: Clock) -> None:
    """Case 24: 205 jobs with one timestamp, paged by 20; between pages runs change and newer jobs arrive."""
    wanted = [jobs.submit(db, spec(name=f"job {number}")) for number in range(205)]
    seen_jobs, seen_runs, job_cursor, run_cursor, pages = list[str](), list[str](), None, None, 0
    while pages == 0 or job_cursor is not None:
        job_page = jobs.list_jobs(db, cursor=job_cursor, limit=20)
        run_page = runs.list_runs(db, cursor=run_cursor, limit=20)
        seen_jobs += [job.id for job in job_page.items]
        seen_runs += [run.id for run in run_page.items]
        job_cursor, run_cursor, pages = job_page.next_cursor, run_page.next_cursor, pages + 1
        runs.cancel(db, wanted[7 * pages].run.id)
        runs.claim(db, clock.now, "w", {"cpu": 1000})
        submit(db, name="newer", now=clock.tick())
    assert pages == 11 and run_cursor is None
    assert sorted(seen_jobs) == sorted(submitted.job.id for submitted in wanted)
    assert sorted(seen_runs) == sorted(submitted.run.id for submitted in wanted)


def test_lists_are_filtered(db: Database, clock: Clock) -> None:
    job, run = trained(db, clock)
    other = submit(db, name="other", seed=9, now=clock.tick())
    manifest = jobs.get_job(db, job.id).manifest
    assert manifest is not None

    def found(**filters: str) -> list[str]:
        return [item.id for item in runs.list_runs(db, **filters).items]  # type: ignore[arg-type]

    assert found() == [other.run.id, run.id]
    assert found(status="queued") == [other.run.id] and found(job=job.id) == [run.id] and found(job="job_x") == []
    for wanted in (run.weights, run.head, job.training_digest, manifest.digest()):
        assert found(digest=str(wanted)) == [run.id]
    assert found(digest=str(digest("none"))) == []
    assert [j.id for j in jobs.list_jobs(db, name="other").items] == [other.job.id]
    assert [j.id for j in jobs.list_jobs(db, digest=str(job.training_digest)).items] == [job.id]
    assert jobs.list_jobs(db, name="nul\0").items == () and jobs.list_jobs(db, tenant="else").items == ()


@pytest.mark.parametrize("filters", [
    {"cursor": "x"}, {"cursor": "=" * 40}, {"cursor": "MjAyNi0wMS0wMSBqb2Jf"}, {"limit": 0}, {"limit": 1001}, {"status": "done"},
    {"digest": "sha256:1"}, {"cursor": "\0"},
])
def test_malformed_filters_are_refused(db: Database, filters: dict[str, object]) -> None:
    with pytest.raises(InvalidSpec, match=f"{next(iter(filters))}: .*"):
        runs.list_runs(db, **filters)  # type: ignore[arg-type]


@pytest.mark.parametrize("wanted", ["run_x", "", "run_\0", "run_" + "0" * 32, "run_0198c0dec0de7000800000000000c0de", "job_1"])
def test_an_unknown_id_is_not_found(db: Database, wanted: str) -> None:
    for look in (runs.get_run, runs.steps, runs.events, runs.logs, runs.checkpoints, runs.attempts, runs.verifications,
                 runs.provenance, runs.cancel, runs.pause, runs.resume, jobs.get_job, runs.get_verification, jobs.create_run):
        with pytest.raises(NotFound, match="there is no"):
            look(db, wanted)  # type: ignore[operator]


def test_another_tenants_run_is_not_found(db: Database, clock: Clock) -> None:
    _, run = trained(db, clock)
    for look in (runs.get_run, runs.steps, runs.events, runs.logs, runs.checkpoints, runs.attempts, runs.verifications,
                 runs.provenance, runs.cancel, runs.pause, runs.resume):
        with pytest.raises(NotFound):
            look(db, run.id, tenant="other")  # type: ignore[operator]
    with pytest.raises(NotFound):
        jobs.create_run(db, run.job_id, tenant="other")


# ---- Run again -------------------------------------------------------------------------------------------------------

def test_what_a_new_run_reproduces(db: Database, clock: Clock) -> None:
    submitted = submit(db)
    job, first = submitted.job, submitted.run
    with pytest.raises(Conflict, match=f"run {first.id} is queued: it can be reproduced once it has ended"):
        jobs.create_run(db, job.id)
    with pytest.raises(Conflict, match="once it has ended"):
        jobs.create_run(db, job.id, reproduces=first.id)
    runs.cancel(db, first.id)
    with pytest.raises(Conflict, match="left no step record"):
        jobs.create_run(db, job.id, reproduces=first.id)
    second = jobs.create_run(db, job.id)
    assert (second.kind, second.reproduces) == ("original", None), "there is nothing to compare with"
    lease = start(db, clock)
    runs.append(db, lease, records(job)[:3], now=clock.now)
    runs.cancel(db, second.id)
    runs.finish(db, lease, runs.Outcome("cancelled", "user_cancelled"), clock.now)
    third = jobs.create_run(db, job.id)
    assert (third.kind, third.reproduces) == ("reproduction", second.id), "the first that ended and left records"
    lease = start(db, clock)
    made = records(job)
    runs.append(db, lease, made, checkpoints=[checkpoint(made[-1])], now=clock.now)
    assert made[-1].state is not None
    runs.finish(db, lease, runs.Outcome("succeeded", "finished", None, made[-1].state.weights, made[-1].head()), clock.now)
    assert jobs.create_run(db, job.id).reproduces == third.id, "the first that succeeded"
    assert jobs.create_run(db, job.id, reproduces=second.id).reproduces == second.id
    other, _ = trained(db, clock, name="other")
    with pytest.raises(NotFound, match=f"job {other.id} has no run '{second.id}'"):
        jobs.create_run(db, other.id, reproduces=second.id)


def test_a_run_may_have_its_own_execution_spec(db: Database, clock: Clock) -> None:
    job, first = trained(db, clock)
    run = jobs.create_run(db, job.id, execution=execution(threads=3, micro_batches=1, priority=2))
    assert (run.execution.threads, run.execution.micro_batches, run.execution.priority) == (3, 1, 2)
    assert first.execution.threads == 0 and jobs.create_run(db, job.id).execution == job.execution
    impossible = execution().model_copy(update={"micro_batches": 3})
    with pytest.raises(InvalidSpec, match="micro_batches"):
        jobs.create_run(db, job.id, execution=impossible)


# ---- Load ------------------------------------------------------------------------------------------------------------

def test_fifty_parallel_submits_beside_metric_writers(db: Database, clock: Clock) -> None:
    """Case 17: nothing fails, nothing is lost, while two attempts store steps and log lines all the time."""
    pairs = []
    for number in range(2):
        job = submit(db, name=f"writer {number}", steps=60).job
        pairs.append((job, start(db, clock)))

    def write(pair: tuple[jobs.Job, runs.Lease]) -> int:
        job, lease = pair
        for number, record in enumerate(records(job)):
            line = LogLine(number, datetime(2026, 1, 1, tzinfo=UTC), "info", f"step {number}")
            assert runs.append(db, lease, [record], [line], now=clock.now).stop is None
        return len(runs.steps(db, lease.run_id))

    with ThreadPoolExecutor(50) as pool:
        writing = [pool.submit(write, pair) for pair in pairs]
        submitted = list(pool.map(lambda number: submit(db, name=f"job {number}"), range(50)))
        assert [future.result(timeout=60) for future in writing] == [61, 61]
    assert len({one.job.id for one in submitted}) == 50 and count(db, "runs") == 52
    for _, lease in pairs:
        assert [log.line.sequence for log in runs.logs(db, lease.run_id)] == list(range(61))

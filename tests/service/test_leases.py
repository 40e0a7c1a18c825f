"""Claims, leases, what users want and what time does: cases 14, 15, 16 and 23, as far as the database goes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy import select

from mok_service import jobs, runs
from mok_service.db import tables
from mok_service.db.session import Database
from mok_service.errors import Conflict, LeaseLost
from mok_service.lifecycle import ACTIVE
from mok_service.placement import Held, NodeSize, Room, room_beside
from mok_service.runs import Lease, Node, Outcome, Run
from mok_service.spec import ExecutionSpec
from tests.databases import Clock
from tests.service.play import (
    CPU,
    ENVIRONMENT,
    MANIFEST,
    NO_ROOM_LIMIT,
    PLACEMENT,
    checkpoint,
    digest,
    event_words,
    records,
    start,
    submit,
    succeed,
    trained,
)

CANCELLED = Outcome("cancelled", "user_cancelled")
PAUSED = Outcome("paused", "user_paused")


def claim(db: Database, clock: Clock, capacity: dict[str, int] = NO_ROOM_LIMIT, worker: str = "w") -> Lease | None:
    return runs.claim(db, clock.now, worker, capacity)


def claimed(db: Database, clock: Clock) -> Lease:
    lease = claim(db, clock)
    assert lease is not None
    return lease


def last_attempt(db: Database, run_id: str) -> runs.Attempt:
    return runs.attempts(db, run_id)[-1]


# ---- Claims ----------------------------------------------------------------------------------------------------------

def test_the_queue_goes_by_priority_then_age(db: Database, clock: Clock) -> None:
    names = [("old", 0), ("young", 0), ("urgent", 9), ("later", -1)]
    order = {name: submit(db, name=name, priority=priority, now=clock.tick()).run.id for name, priority in names}
    assert [claimed(db, clock).run_id for _ in names] == [order[name] for name in ("urgent", "old", "young", "later")]
    assert claim(db, clock) is None


def test_a_claim_leaves_a_run_that_does_not_fit(db: Database, clock: Clock) -> None:
    big = submit(db, device="cuda", count=2, name="big").run
    small = submit(db, name="small", now=clock.tick()).run
    lease = claim(db, clock, {"cpu": 1, "cuda": 1})
    assert lease is not None and lease.run_id == small.id
    assert claim(db, clock, {"cpu": 1, "cuda": 1}) is None, "the cpu is taken"
    lease = claim(db, clock, {"cpu": 1, "cuda": 2})
    assert lease is not None and lease.run_id == big.id


def test_a_judge_sees_the_candidate_and_the_active_runs(db: Database, clock: Clock) -> None:
    made = [submit(db, name=f"{threads}", threads=threads, now=clock.tick()).run.id for threads in range(3)]

    def judge(candidate: ExecutionSpec, active: Sequence[Held]) -> Room | None:
        free = candidate.threads == 1 or [(held.execution.threads, held.node) for held in active] == [(1, "n1")]
        return Room(f"n{candidate.threads}") if free else None

    first, second = (runs.claim(db, clock.now, "w", judge) for _ in range(2))
    assert first is not None and second is not None and (first.run_id, second.run_id) == (made[1], made[0])
    assert (first.node, second.node) == ("n1", "n0"), "and the next judge is told where"


def test_two_schedulers_never_take_more_of_a_node_than_it_has(db: Database, url: str, clock: Clock) -> None:
    """Two nodes of 2 CPUs; runs of 1, 1, 1 and 2 threads: the last one doesn't fit on any node before one of the first ends."""
    made = [submit(db, name=f"job {n}", threads=threads, now=clock.tick()).run.id for n, threads in enumerate((1, 1, 1, 2))]
    schedulers = [(Database(url, clock=clock), f"scheduler {number}") for number in range(2)]

    def judge(candidate: ExecutionSpec, active: Sequence[Held]) -> Room | None:
        return room_beside(candidate, active, [NodeSize("a", 2, 0), NodeSize("b", 2, 0)])

    def take(number: int) -> Lease | None:
        own, worker = schedulers[number % 2]
        return runs.claim(own, clock.now, worker, judge)

    with ThreadPoolExecutor(4) as pool:
        taken = {lease.run_id: lease for lease in pool.map(take, range(8)) if lease is not None}
    assert {run_id: lease.node for run_id, lease in taken.items()} == {made[0]: "a", made[1]: "a", made[2]: "b"}
    runs.release(db, taken[made[0]], "failed", "any", clock.now, clock.now + timedelta(days=1))
    assert take(0) is None, "a CPU is free on each node"
    runs.release(db, taken[made[2]], "failed", "any", clock.now, clock.now + timedelta(days=1))
    last = take(1)
    assert last is not None and (last.run_id, last.node) == (made[3], "b")
    for own, _ in schedulers:
        own.close()


def test_an_attempt_without_a_node_on_record_counts_as_packed(db: Database, clock: Clock) -> None:
    """As those of before the upgrade."""
    for number, threads in enumerate((2, 2, 1)):
        submit(db, name=f"job {number}", threads=threads, now=clock.tick())

    def judge(candidate: ExecutionSpec, active: Sequence[Held]) -> Room | None:
        return room_beside(candidate, active, [NodeSize("a", 2, 0), NodeSize("b", 2, 0)])

    before = claim(db, clock)
    with db.write() as tx:
        assert tx.execute(select(tables.attempts.c.node)).scalars().all() == [None]
    after = runs.claim(db, clock.now, "w", judge)
    assert before is not None and after is not None and after.node in ("a", "b")
    assert runs.claim(db, clock.now, "w", judge) is None


def test_two_schedulers_never_take_more_than_there_is(db: Database, url: str, clock: Clock) -> None:
    """Case 16: two schedulers, one device, ten jobs. Each claim is checked against what every scheduler holds."""
    wanted = {submit(db, name=f"job {number}").run.id for number in range(10)}
    schedulers = [(Database(url, clock=clock), f"scheduler {number}") for number in range(2)]

    def work(scheduler: tuple[Database, str]) -> list[str]:
        own, worker = scheduler
        done: list[str] = []
        for _ in range(500):
            lease = runs.claim(own, clock.now, worker, CPU)
            if lease is None:
                if all(run.ended for run in runs.list_runs(own).items):
                    break
                continue
            active = [run for run in runs.list_runs(own).items if run.status in ACTIVE]
            assert [(run.id, run.worker) for run in active] == [(lease.run_id, worker)]
            runs.mark_starting(own, lease, clock.now)
            runs.finish(own, lease, Outcome("failed", "internal", "only a test"), clock.now)
            done.append(lease.run_id)
        return done

    with ThreadPoolExecutor(2) as pool:
        shares = list(pool.map(work, schedulers))
    assert sorted(shares[0] + shares[1]) == sorted(wanted)
    for own, _ in schedulers:
        own.close()


def test_parallel_claims_take_each_run_once(db: Database, clock: Clock) -> None:
    wanted = {submit(db, name=f"job {number}").run.id for number in range(12)}
    with ThreadPoolExecutor(16) as pool:
        taken = pool.map(lambda number: claim(db, clock, worker=f"w{number}"), range(16))
        leases = [lease for lease in taken if lease is not None]
    assert {lease.run_id for lease in leases} == wanted and len(leases) == 12
    assert len({lease.token for lease in leases}) == 12


def test_a_claim_puts_the_attempt_on_record(db: Database, clock: Clock) -> None:
    run = submit(db).run
    lease = claimed(db, clock)
    attempt = last_attempt(db, run.id)
    assert (lease.run_id, lease.attempt, lease.tenant) == (run.id, 1, "local")
    assert lease.expires_at == clock.now + timedelta(seconds=30)
    assert (attempt.attempt, attempt.worker, attempt.claimed_at, attempt.started_at) == (1, "w", clock.now, None)
    assert (attempt.from_step, attempt.from_head, attempt.ended_at) == (None, None, None)
    assert (runs.get_run(db, run.id).status, runs.get_run(db, run.id).worker) == ("claimed", "w")


# ---- Fencing ---------------------------------------------------------------------------------------------------------

def test_every_late_write_is_refused(db: Database, clock: Clock) -> None:
    job = submit(db).job
    late = start(db, clock)
    made = records(job)
    runs.append(db, late, made[:2], now=clock.now)
    assert runs.reap(db, clock.tick(31)) == [late.run_id]
    clock.tick(10)
    lease = start(db, clock)
    assert (lease.run_id, lease.attempt) == (late.run_id, 2)
    before = runs.events(db, late.run_id)
    for write in (
        lambda: runs.renew(db, late, clock.now), lambda: runs.mark_starting(db, late, clock.now),
        lambda: runs.mark_running(db, late, clock.now, ENVIRONMENT, PLACEMENT, MANIFEST),
        lambda: runs.append(db, late, made[2:], now=clock.now),
        lambda: runs.finish(db, late, CANCELLED, clock.now),
        lambda: runs.release(db, late, "worker_lost", "late", clock.now),
    ):
        with pytest.raises(LeaseLost, match=f"attempt 1 of {late.run_id} has lost its lease"):
            write()
    assert runs.events(db, late.run_id) == before
    succeed(db, lease, clock, made)


def test_a_renewed_lease_lives_on(db: Database, clock: Clock) -> None:
    submit(db)
    lease = start(db, clock)
    for _ in range(5):
        assert runs.renew(db, lease, clock.tick(29)) == "run"
        assert runs.reap(db, clock.now) == []
    assert runs.reap(db, clock.tick(29.999)) == []
    assert runs.reap(db, clock.tick(0.001)) == [lease.run_id]


# ---- Cancel ----------------------------------------------------------------------------------------------------------

def test_cancel_while_queued_or_paused(db: Database, clock: Clock) -> None:
    first, second = submit(db).run, submit(db).run
    runs.pause(db, second.id)
    for run in (first, second):
        ended = runs.cancel(db, run.id)
        assert (ended.status, ended.stop_reason, ended.ended_at) == ("cancelled", "user_cancelled", clock.now)
        assert runs.cancel(db, run.id) == ended, "again changes nothing"
    assert claim(db, clock) is None
    assert event_words(db, second.id) == ["queued", "queued", "paused", "paused", "cancelled"]


def test_cancel_between_claim_and_start_leaves_nothing_to_make(db: Database, clock: Clock) -> None:
    """Case 14: the scheduler that claimed the run finds its lease gone before it makes anything."""
    run = submit(db).run
    lease = claimed(db, clock)
    assert runs.cancel(db, run.id).status == "cancelled"
    with pytest.raises(LeaseLost):
        runs.mark_starting(db, lease, clock.now)
    attempt = last_attempt(db, run.id)
    assert (attempt.end, attempt.started_at, attempt.ended_at) == ("stopped", None, clock.now)
    submit(db)
    assert claim(db, clock, CPU) is not None, "its device is free"


@pytest.mark.parametrize("running", [False, True])
def test_cancel_of_what_holds_devices_waits_until_they_are_free(db: Database, clock: Clock, running: bool) -> None:
    run = submit(db).run
    lease = claimed(db, clock)
    runs.mark_starting(db, lease, clock.now)
    if running:
        runs.mark_running(db, lease, clock.now, ENVIRONMENT, PLACEMENT, MANIFEST)
    stopping = runs.cancel(db, run.id)
    assert (stopping.status, stopping.stop_reason, stopping.desired_state) == ("stopping", "user_cancelled", "cancel")
    submit(db)
    assert claim(db, clock, CPU) is None, "its device is still held"
    if not running:
        assert runs.mark_running(db, lease, clock.now, ENVIRONMENT, PLACEMENT, MANIFEST).stop == "user_cancelled"
    assert runs.renew(db, lease, clock.now) == "cancel"
    assert runs.finish(db, lease, CANCELLED, clock.now).status == "cancelled"
    assert claim(db, clock, CPU) is not None


def test_cancel_against_finish_has_one_winner(db: Database, clock: Clock) -> None:
    job = submit(db).job
    lease = start(db, clock)
    runs.cancel(db, lease.run_id)
    assert succeed(db, lease, clock, records(job)).status == "cancelled", "cancel came first"
    job = submit(db).job
    lease = start(db, clock)
    assert succeed(db, lease, clock, records(job)).status == "succeeded"
    with pytest.raises(Conflict, match=r"can't be cancelled: it is succeeded \(finished\)"):
        runs.cancel(db, lease.run_id)


def test_cancel_while_retrying(db: Database, clock: Clock) -> None:
    run = submit(db).run
    runs.release(db, start(db, clock), "worker_lost", "gone", clock.now)
    assert runs.get_run(db, run.id).status == "queued"
    assert runs.cancel(db, run.id).status == "cancelled"
    assert claim(db, clock) is None


def test_cancel_and_the_worker_is_lost(db: Database, clock: Clock) -> None:
    submit(db)
    lease = start(db, clock)
    runs.cancel(db, lease.run_id)
    assert runs.release(db, lease, "worker_lost", "gone", clock.now).status == "cancelled"
    submit(db)
    lease = start(db, clock)
    runs.cancel(db, lease.run_id)
    assert runs.reap(db, clock.tick(30)) == [lease.run_id]
    assert runs.get_run(db, lease.run_id).status == "cancelled"


# ---- Pause and resume ------------------------------------------------------------------------------------------------

def test_pause_and_resume_of_a_running_run(db: Database, clock: Clock) -> None:
    job = submit(db).job
    made, lease = records(job), start(db, clock)
    runs.append(db, lease, made[:2], now=clock.now)
    assert runs.pause(db, lease.run_id).status == "stopping"
    assert runs.renew(db, lease, clock.now) == "pause"
    assert runs.append(db, lease, made[2:3], checkpoints=[checkpoint(made[2])], now=clock.now).stop == "user_paused"
    paused = runs.finish(db, lease, PAUSED, clock.now)
    assert (paused.status, paused.stop_reason, paused.desired_state) == ("paused", "user_paused", "pause")
    assert paused.run_deadline_at is None and paused.worker is None
    assert claim(db, clock) is None and runs.reap(db, clock.tick(10**7)) == []
    assert runs.pause(db, paused.id) == paused
    resumed = runs.resume(db, paused.id)
    assert (resumed.status, resumed.stop_reason, resumed.desired_state) == ("queued", None, "run")
    assert resumed.failures == 0 and runs.resume(db, paused.id) == resumed
    lease = start(db, clock)
    attempt = last_attempt(db, paused.id)
    assert (lease.attempt, attempt.from_step, attempt.from_head) == (2, 2, made[2].head())
    assert succeed(db, lease, clock, made[3:]).status == "succeeded"
    assert runs.attempts(db, paused.id)[0].end == "stopped"


def test_pause_between_claim_and_start(db: Database, clock: Clock) -> None:
    run = submit(db).run
    lease = claimed(db, clock)
    assert runs.pause(db, run.id).status == "paused"
    with pytest.raises(LeaseLost):
        runs.mark_starting(db, lease, clock.now)
    assert runs.resume(db, run.id).status == "queued"


def test_what_comes_after_pause_while_it_is_stopping(db: Database, clock: Clock) -> None:
    submit(db)
    lease = start(db, clock)
    runs.pause(db, lease.run_id)
    runs.resume(db, lease.run_id)
    assert runs.finish(db, lease, PAUSED, clock.now).status == "queued", "resumed before it had stopped"
    lease = start(db, clock)
    runs.pause(db, lease.run_id)
    assert runs.cancel(db, lease.run_id).stop_reason == "user_cancelled", "a pause is no end"
    assert runs.renew(db, lease, clock.now) == "cancel"
    assert runs.finish(db, lease, PAUSED, clock.now).status == "cancelled"
    job = submit(db).job
    lease = start(db, clock)
    runs.pause(db, lease.run_id)
    assert succeed(db, lease, clock, records(job)).status == "succeeded", "it had finished when it was told to pause"


def test_wishes_for_a_run_that_is_over_are_conflicts(db: Database, clock: Clock) -> None:
    _, run = trained(db, clock)
    for wish in (runs.cancel, runs.pause, runs.resume):
        with pytest.raises(Conflict, match="it is succeeded"):
            wish(db, run.id)
    submit(db)
    lease = start(db, clock)
    runs.cancel(db, lease.run_id)
    for wish in (runs.pause, runs.resume):
        with pytest.raises(Conflict, match=r"it is stopping \(user_cancelled\)"):
            wish(db, lease.run_id)


# ---- Attempts that end -----------------------------------------------------------------------------------------------

def test_lost_attempts_are_retried_with_backoff_until_they_are_exhausted(db: Database, clock: Clock) -> None:
    run = submit(db, max_attempts=3).run
    for failures, wait in ((1, 2), (2, 4)):
        lost = runs.release(db, start(db, clock), "worker_lost", f"gone {failures}", clock.now)
        assert (lost.status, lost.failures, lost.retry_at) == ("queued", failures, clock.now + timedelta(seconds=wait))
        assert claim(db, clock) is None
        clock.tick(wait - 0.001)
        assert claim(db, clock) is None
        clock.tick(0.001)
    failed = runs.release(db, start(db, clock), "worker_lost", "gone 3", clock.now)
    assert (failed.status, failed.stop_reason) == ("failed", "attempts_exhausted")
    assert failed.message == "3 attempts failed; the last one: gone 3"
    assert [(a.attempt, a.end, a.message) for a in runs.attempts(db, run.id)] == [
        (number, "worker_lost", f"gone {number}") for number in (1, 2, 3)]


def test_causes_differ(db: Database, clock: Clock) -> None:
    submit(db, max_attempts=2)
    assert runs.release(db, start(db, clock), "out_of_memory", "killed", clock.now).stop_reason == "out_of_memory"
    run = submit(db, max_attempts=2).run
    for _ in range(3):
        lost = runs.release(db, start(db, clock), "stopped", "the node is drained", clock.now)
        assert (lost.status, lost.failures, lost.retry_at) == ("queued", 0, clock.now)
    at = clock.now + timedelta(seconds=77)
    assert runs.release(db, start(db, clock), "failed", "a bug", clock.now, retry_at=at).retry_at == at
    runs.cancel(db, run.id)


def test_expired_leases_are_requeued_or_end(db: Database, clock: Clock) -> None:
    """Case 15: with nobody there, every run resolves when its lease runs out."""
    job = submit(db, max_attempts=2).job
    lease = start(db, clock)
    runs.append(db, lease, records(job)[:2], now=clock.now)
    assert runs.reap(db, clock.tick(30)) == [lease.run_id]
    run = runs.get_run(db, lease.run_id)
    assert (run.status, run.failures, run.worker, run.step) == ("queued", 1, None, 1)
    assert last_attempt(db, run.id).end == "lease_expired"
    clock.tick(2)
    start(db, clock)
    assert runs.reap(db, clock.tick(30)) == [lease.run_id]
    assert (runs.get_run(db, run.id).status, runs.get_run(db, run.id).stop_reason) == ("failed", "attempts_exhausted")
    assert runs.reap(db, clock.tick(10**6)) == []


def test_deadlines(db: Database, clock: Clock) -> None:
    """Case 23: a run that waits in vain fails at its queue deadline with the reason, and can be cancelled until then."""
    waiting = submit(db, device="cuda", count=2, queue_deadline_seconds=60).run
    also = submit(db, device="cuda", count=2, queue_deadline_seconds=60).run
    runs.report_nodes(db, "w", [Node("a", {"cpu": 1, "cuda": 1})], clock.now)
    assert claim(db, clock, {"cpu": 1, "cuda": 1}) is None
    assert runs.reap(db, clock.tick(59.999)) == []
    assert runs.cancel(db, also.id).status == "cancelled"
    assert runs.reap(db, clock.tick(0.001)) == [waiting.id]
    failed = runs.get_run(db, waiting.id)
    assert (failed.status, failed.stop_reason) == ("failed", "queue_deadline")
    assert failed.message == ("it waited for 2 cuda device(s) for longer than execution.queue_deadline_seconds (60 s); "
                              "the cluster has 1")


def test_the_run_deadline_counts_over_attempts(db: Database, clock: Clock) -> None:
    submit(db, run_deadline_seconds=100)
    lease = start(db, clock)
    runs.renew(db, lease, clock.tick(20))
    runs.release(db, lease, "worker_lost", "gone", clock.now)
    lease = start(db, Clock.tick(clock, 10) and clock)
    runs.renew(db, lease, clock.tick(69))
    assert runs.reap(db, clock.now) == [] and runs.reap(db, clock.tick(1)) == [lease.run_id]
    assert runs.renew(db, lease, clock.now) == "cancel"
    failed = runs.finish(db, lease, CANCELLED, clock.now)
    assert (failed.status, failed.stop_reason) == ("failed", "run_deadline")
    assert failed.message == "it has been going on for longer than execution.run_deadline_seconds (100 s)"
    submit(db, run_deadline_seconds=100)
    lease = start(db, clock)
    runs.release(db, lease, "stopped", "drained", clock.now)
    assert runs.reap(db, clock.tick(100)) == [lease.run_id]
    assert runs.get_run(db, lease.run_id).stop_reason == "run_deadline"


def test_a_new_boot_ends_the_leases_of_earlier_ones(db: Database, clock: Clock) -> None:
    job = submit(db, max_attempts=1, name="goes on").job
    lease = start(db, clock, boot_id="boot 1")
    runs.append(db, lease, records(job)[:2], now=clock.now)
    submit(db, name="cancelled")
    other = start(db, clock, boot_id="boot 1")
    runs.cancel(db, other.run_id)
    submit(db, name="of this boot")
    kept = start(db, clock, boot_id="boot 2")
    assert runs.end_leases_of_earlier_boots(db, "boot 2", clock.now, worker="somebody else") == []
    assert runs.end_leases_of_earlier_boots(db, "boot 2", clock.now, worker="w") == sorted([lease.run_id, other.run_id])
    run = runs.get_run(db, lease.run_id)
    assert (run.status, run.failures, run.retry_at) == ("queued", 0, clock.now), "it had got on: that is no failure"
    assert runs.get_run(db, other.run_id).status == "cancelled"
    assert runs.renew(db, kept, clock.now) == "run"
    start(db, clock, boot_id="boot 2")
    runs.end_leases_of_earlier_boots(db, "boot 3", clock.now)
    run = runs.get_run(db, run.id)
    assert (run.status, run.stop_reason) == ("failed", "attempts_exhausted"), "it stored nothing new, and may be the cause"
    assert last_attempt(db, run.id).end == "service_restarted"


# ---- The end of a run ------------------------------------------------------------------------------------------------

def test_a_run_succeeds_only_with_its_proof(db: Database, clock: Clock) -> None:
    def ending(**what: object) -> Run:
        job: jobs.Job = submit(db).job
        lease, made = start(db, clock), records(job)
        assert made[-1].state is not None
        stored = made[:-1] if "short" in what else made
        runs.append(db, lease, stored, checkpoints=[] if "bare" in what else [checkpoint(stored[-1])], now=clock.now)
        weights = digest("others") if "weights" in what else made[-1].state.weights
        head = digest("other") if "head" in what else made[-1].head()
        return runs.finish(db, lease, Outcome("succeeded", "finished", None, weights, head), clock.now)

    good = ending()
    assert (good.status, good.message, good.head) == ("succeeded", None, records(jobs.get_job(db, good.job_id))[-1].head())
    for fault, message in (("short", "the last step on record is 3, of 4"), ("bare", "there is no checkpoint of step 4"),
                           ("weights", "weights of step 4: on record sha256:"), ("head", "head of step 4: on record sha256:")):
        bad = ending(**{fault: True})
        assert (bad.status, bad.stop_reason, bad.weights) == ("failed", "internal", None)
        assert bad.message is not None and bad.message.startswith(f"it can't count as succeeded: {message}")


def test_a_failed_attempt_may_end_the_run(db: Database, clock: Clock) -> None:
    """Case 20, as far as the database goes: a non-finite loss ends the run, with the step in its message."""
    submit(db)
    lease = start(db, clock)
    run = runs.finish(db, lease, Outcome("failed", "non_finite", "step 3: a logit or the loss is not finite"), clock.now)
    assert (run.status, run.stop_reason, run.message) == ("failed", "non_finite", "step 3: a logit or the loss is not finite")
    assert last_attempt(db, run.id).end == "failed"
    assert event_words(db, run.id) == ["queued", "claimed", "starting", "running", "stopping", "failed"]


def test_an_illegal_change_is_a_conflict(db: Database, clock: Clock) -> None:
    submit(db)
    lease = claimed(db, clock)
    with pytest.raises(Conflict, match="is claimed, which can't become running"):
        runs.mark_running(db, lease, clock.now, ENVIRONMENT, PLACEMENT, MANIFEST)
    runs.mark_starting(db, lease, clock.now)
    with pytest.raises(Conflict, match="is starting, which can't become starting"):
        runs.mark_starting(db, lease, clock.now)


def test_deleted_checkpoints_keep_their_digests(db: Database, clock: Clock) -> None:
    submitted = submit(db)
    lease, made = start(db, clock), records(submitted.job)
    runs.append(db, lease, made, checkpoints=[checkpoint(made[2]), checkpoint(made[4])], now=clock.now)
    with pytest.raises(Conflict, match="may resume from its checkpoint of step 2"):
        runs.checkpoint_deleted(db, lease.run_id, 2)
    succeed(db, lease, clock, made)
    gone = runs.checkpoint_deleted(db, lease.run_id, 2, now=clock.tick())
    assert gone.deleted_at == clock.now and gone.info == checkpoint(made[2])
    assert runs.checkpoint_deleted(db, lease.run_id, 2, now=clock.tick()) == gone
    assert [c.deleted_at is None for c in runs.checkpoints(db, lease.run_id)] == [False, True]
    with pytest.raises(Exception, match="has no checkpoint of step 3"):
        runs.checkpoint_deleted(db, lease.run_id, 3)

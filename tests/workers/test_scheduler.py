"""The scheduler with a real database: every run ends right, whatever dies, and devices are never held for nothing."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy.exc import OperationalError

from mok_service import jobs, runs
from mok_service.db.session import Database
from mok_service.placement import NodeSize
from mok_service.spec import parse_job
from mok_workers.attempt import Control
from mok_workers.cluster import InProcessHandle
from mok_workers.messages import Payload
from mok_workers.scheduler import Scheduler
from tests.workers.fakes import FakeTraining, Opens, chain, job_document
from tests.workers.world import SECONDS_MAX, MakeWorld, World


def test_a_run_goes_from_queued_to_succeeded(make_world: MakeWorld, url: str) -> None:
    world = make_world(url=url)
    run_id = world.submit()
    world.ended(run_id)
    world.assert_whole(run_id)
    assert world.ends(run_id) == ["finished"]
    attempt = runs.attempts(world.db, run_id)[0]
    assert attempt.environment is not None and attempt.environment["code"] == {"version": "0"}
    assert attempt.placement is not None and attempt.placement["rank"] == 0
    assert [c.info.step for c in runs.checkpoints(world.db, run_id)] == [2, 4, 6]
    assert any("opened" in stored.line.message for stored in runs.logs(world.db, run_id))
    assert world.scheduler.idle


def test_nodes_are_kept_fresh(world: World) -> None:
    world.tick()
    first = runs.nodes(world.db)
    assert [(node.name, dict(node.capacity), node.labels["cpus"]) for node in first] == [("here", {"cpu": 1, "cuda": 0}, "2")]
    world.now += timedelta(seconds=world.settings.heartbeat_seconds)
    world.tick()
    assert runs.nodes(world.db)[0].heartbeat_at > first[0].heartbeat_at  # type: ignore[operator]


# ---- Workers die -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("step", [0, 1, 2, 5, 6])
def test_a_killed_worker_costs_an_attempt_and_no_bit(make_world: MakeWorld, step: int) -> None:
    opens = Opens({step: "wait"}, gate=True)
    world = make_world(opens=opens)
    run_id = world.submit()
    world.until(lambda: bool(world.cluster.handles))
    world.stored(run_id, step - 1)
    world.handle(run_id).kill()
    assert opens.go is not None
    opens.go.set()
    world.ended(run_id)
    world.assert_whole(run_id)
    assert world.ends(run_id) == ["worker_lost", "finished"]
    resumed = [stored.line.message for stored in runs.logs(world.db, run_id) if "resumed" in stored.line.message]
    base = max(step - 1, 0) // 2 * 2
    assert resumed == ([f"resumed from the checkpoint after step {base}"] if base else [])


def test_the_next_attempt_waits_longer_each_time_and_then_there_is_none(world: World) -> None:
    run_id = world.submit(max_attempts=3)
    for wait in (1.0, 2.0):
        world.until(lambda: bool(world.cluster.handles))
        world.handle(run_id).kill()
        world.until(lambda: world.run(run_id).status == "queued")
        retry_at = world.run(run_id).retry_at
        assert retry_at is not None
        assert timedelta(seconds=wait) - 2 * timedelta(milliseconds=20) <= retry_at - world.now <= timedelta(seconds=wait)
        world.now = retry_at - timedelta(milliseconds=1)
        world.scheduler.tick(world.now)
        assert world.run(run_id).status == "queued"
        world.now = retry_at
    world.until(lambda: bool(world.cluster.handles))
    world.handle(run_id).kill()
    run = world.ended(run_id)
    assert (run.status, run.stop_reason) == ("failed", "attempts_exhausted")
    assert world.ends(run_id) == ["worker_lost"] * 3 and "killed" in (run.message or "")


@pytest.mark.parametrize(("fault", "status", "reason", "ends"), [
    ("nan", "failed", "non_finite", ["failed"]),
    ("memory", "failed", "out_of_memory", ["out_of_memory"]),
    ("crash", "succeeded", "finished", ["failed", "finished"]),
])
def test_failures_are_tried_again_only_where_that_helps(
    make_world: MakeWorld, fault: str, status: str, reason: str, ends: list[str]
) -> None:
    world = make_world(opens=Opens({3: fault}))
    run = world.ended(run_id := world.submit())
    assert (run.status, run.stop_reason, world.ends(run_id)) == (status, reason, ends)
    assert run.status == "succeeded" or run.step == 2


def test_a_failure_before_the_first_record_is_told(make_world: MakeWorld) -> None:
    def opens(payload: Payload, control: Control) -> FakeTraining:
        control.log("looking for the data")
        raise KeyError("the disk is upside down")

    world = make_world(opens=opens)
    run = world.ended(world.submit(max_attempts=1))
    assert run.status == "failed" and "the disk is upside down" in (run.message or "")


def test_a_worker_that_never_comes_up_is_replaced(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = world.submit()
    with monkeypatch.context() as patch:
        patch.setattr(InProcessHandle, "poll", lambda self: None)
        world.until(lambda: bool(world.cluster.handles))
        world.wait(world.settings.start_seconds_max + 10)
        assert world.ends(run_id)[0] == "worker_lost"
    world.ended(run_id)
    world.assert_whole(run_id)
    assert world.ends(run_id)[-1] == "finished"


def test_another_result_for_a_stored_step_ends_the_run(make_world: MakeWorld) -> None:
    opens = Opens({5: "wait"}, gate=True)
    world = make_world(opens=opens)
    run_id = world.submit(checkpoint_interval=0)
    world.stored(run_id, 4)
    world.handle(run_id).kill()
    opens.flip = 3
    assert opens.go is not None
    opens.go.set()
    run = world.ended(run_id)
    assert (run.status, run.stop_reason) == ("failed", "nondeterministic") and "step 3" in (run.message or "")
    assert world.records(run_id) == list(chain(job_document()))[:5], "nothing stored is overwritten"


# ---- Schedulers die --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("step", [0, 3, 6])
def test_a_killed_scheduler_is_followed_by_one_that_goes_on_at_once(make_world: MakeWorld, url: str, step: int) -> None:
    opens = Opens({step: "wait"}, gate=True)
    world = make_world(opens=opens, url=url)
    run_id = world.submit()
    world.until(lambda: world.run(run_id).status in ("starting", "running"))
    world.stored(run_id, step - 1)
    dead = world.scheduler
    world.boot()
    assert world.run(run_id).status == "queued", "no lease had to expire"
    assert opens.go is not None
    opens.go.set()
    world.ended(run_id)
    world.assert_whole(run_id)
    assert world.ends(run_id) == ["service_restarted", "finished"]
    before = world.run(run_id), runs.events(world.db, run_id)
    while not dead.idle:  # were it only slow, and not dead: it finds its lease gone, and leaves
        dead.tick(world.now)
    assert (world.run(run_id), runs.events(world.db, run_id)) == before


def test_another_schedulers_lease_must_expire_first(make_world: MakeWorld) -> None:
    world = make_world(opens=Opens({3: "wait"}, gate=True))
    run_id = world.submit()
    world.stored(run_id, 2)
    first = world.scheduler
    world.boot("other")
    world.tick()
    assert world.run(run_id).status == "running" and not world.cluster.handles
    world.now += timedelta(seconds=world.settings.lease_seconds + 1)
    assert isinstance(world.opens, Opens) and world.opens.go is not None
    world.opens.go.set()
    world.ended(run_id)
    world.assert_whole(run_id)
    assert world.ends(run_id) == ["lease_expired", "finished"]
    while not first.idle:
        first.tick(world.now)
    assert not world.clusters[0].handles


def test_closing_gives_the_run_back_and_nothing_is_lost(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    opens = Opens({20: "wait"}, gate=True)
    world = make_world(opens=opens)
    run_id = world.submit(steps=40)
    world.stored(run_id, 3)
    end = InProcessHandle.end

    def end_while_it_computes(handle: InProcessHandle) -> None:
        end(handle)
        assert opens.go is not None
        opens.go.set()

    monkeypatch.setattr(InProcessHandle, "end", end_while_it_computes)
    world.scheduler.close(lambda: world.now)
    run = world.run(run_id)
    assert run.status == "queued" and world.ends(run_id) == ["stopped"] and not world.cluster.handles
    assert run.failures == 0 and runs.nodes(world.db) == []
    world.boot()
    world.ended(run_id)
    world.assert_whole(run_id, 40)


def test_what_holds_devices_and_is_in_no_ones_book_is_ended(make_world: MakeWorld) -> None:
    world = make_world(opens=Opens({1: "wait"}, gate=True))
    run_id = world.submit()
    world.stored(run_id, 0)
    payload = replace(world.cluster.placed[0], name="run_0-1")
    world.cluster.place(payload)
    world.now += timedelta(seconds=world.settings.heartbeat_seconds)
    world.tick()
    assert world.cluster.handles["run_0-1"].lost is not None
    assert all(handle.lost is None for name, handle in world.cluster.handles.items() if name != "run_0-1")


# ---- Devices ---------------------------------------------------------------------------------------------------------

def test_never_more_runs_than_devices_and_none_is_left_over(world: World) -> None:
    many = [world.submit(threads=1, seed=seed) for seed in range(6)] + [world.submit(threads=0)]
    most = 0

    def all_ended() -> bool:
        nonlocal most
        whole = [name for name in world.cluster.handles if name.startswith(many[-1])]
        assert len(world.cluster.handles) <= (1 if whole else 2)
        most = max(most, len(world.cluster.handles))
        return all(world.run(run_id).ended for run_id in many)

    world.until(all_ended)
    assert most == 2 and {world.run(run_id).status for run_id in many} == {"succeeded"}


TWO_NODES = (NodeSize("a", 2, 0), NodeSize("b", 2, 0))


def test_free_devices_that_lie_apart_are_none(make_world: MakeWorld, url: str) -> None:
    opens = Opens({0: "wait"}, gate=True)
    world = make_world(nodes=TWO_NODES, opens=opens, url=url)
    small = [world.submit(threads=1) for _ in range(3)]
    world.until(lambda: len(world.cluster.placed) == 3)
    assert [given.node for given in world.cluster.placed] == ["a", "a", "b"]
    runs.cancel(world.db, small[0], now=world.now)
    big = world.submit(threads=2)
    assert opens.go is not None
    for _ in range(3):
        world.tick()
    assert len(world.cluster.placed) == 3
    opens.go.set()
    world.ended(*small, big)
    assert len(world.cluster.placed) == 4


def test_a_node_that_goes_away_before_the_worker_is_up_costs_an_attempt(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(nodes=TWO_NODES)
    run_id = world.submit(threads=2)
    with monkeypatch.context() as patch:
        patch.setattr(InProcessHandle, "poll", lambda self: None)
        world.until(lambda: bool(world.cluster.handles))
        world.cluster._nodes = TWO_NODES[1:]
        world.now += timedelta(seconds=world.settings.heartbeat_seconds)
        world.until(lambda: world.ends(run_id)[0] == "worker_lost")
    world.ended(run_id)
    world.assert_whole(run_id)
    assert [given.node for given in world.cluster.placed] == ["a", "b"]
    assert runs.attempts(world.db, run_id)[0].message == "node a went away before a worker came up"


def test_what_never_fits_waits_for_its_deadline_and_blocks_nobody(make_world: MakeWorld) -> None:
    world = make_world(nodes=(NodeSize("here", 2, 0), NodeSize("gpus", 8, 2)))
    too_large = world.submit(device="cuda", count=1, queue_deadline_seconds=60)
    world.cluster._nodes = (NodeSize("here", 2, 0),)
    small = world.submit()
    assert world.ended(small).status == "succeeded" and world.run(too_large).status == "queued"
    world.now += timedelta(seconds=60)
    run = world.ended(too_large)
    assert (run.status, run.stop_reason) == ("failed", "queue_deadline")


def test_two_schedulers_together_never_use_more_than_there_is(make_world: MakeWorld, url: str) -> None:
    world = make_world(url=url)
    run_ids = [world.submit(threads=1)]
    first = world.scheduler
    world.tick()
    run_ids += [world.submit(threads=1, seed=seed) for seed in range(9)]
    world.boot("other")
    world.tick()  # it takes the other CPU
    most = 0

    def all_ended() -> bool:
        nonlocal most
        first.tick(world.now)
        most = max(most, sum(len(cluster.handles) for cluster in world.clusters))
        return all(world.run(run_id).ended for run_id in run_ids)

    world.until(all_ended)
    assert most == 2 and {world.run(run_id).status for run_id in run_ids} == {"succeeded"}
    assert {attempt.worker for run_id in run_ids for attempt in runs.attempts(world.db, run_id)} == {"local", "other"}


# ---- Reproductions ---------------------------------------------------------------------------------------------------

def test_a_reproduction_is_compared_as_it_goes(make_world: MakeWorld) -> None:
    opens = Opens()
    world = make_world(opens=opens)
    world.ended(original := world.submit())
    run = world.ended(again := world.rerun(original, threads=2))
    world.assert_whole(again)
    assert run.verdict == "REPRODUCED"
    opens.flip = 3
    run = world.ended(world.rerun(original))
    assert (run.status, run.stop_reason, run.verdict, run.step) == ("failed", "diverged", "DIVERGED", 3)


def test_other_data_end_a_reproduction(make_world: MakeWorld) -> None:
    def opens(payload: Payload, control: Control) -> FakeTraining:
        training = FakeTraining(payload, control)
        if payload.manifest is not None:
            assert payload.manifest == training.manifest
            training.manifest = replace(payload.manifest, tokens=payload.manifest.tokens + 1)
        return training

    world = make_world(opens=opens)
    world.ended(original := world.submit())
    run = world.ended(world.rerun(original))
    assert (run.status, run.stop_reason, run.verdict, run.step) == ("failed", "source_drift", "INCONCLUSIVE", None)


# ---- Trouble ---------------------------------------------------------------------------------------------------------

def test_one_attempts_trouble_is_not_anothers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = world.submit(threads=1, max_attempts=1), world.submit(threads=1, seed=8)
    world.until(lambda: len(world.cluster.handles) == 2)
    monkeypatch.setattr(world.handle(bad), "poll", lambda: 1 // 0)
    world.ended(bad, good)
    assert world.run(good).status == "succeeded"
    assert world.run(bad).stop_reason == "attempts_exhausted" and "ZeroDivisionError" in (world.run(bad).message or "")


def test_a_placement_that_fails_costs_an_attempt(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = world.submit()
    with monkeypatch.context() as patch:
        patch.setattr(world.cluster, "place", lambda payload: 1 // 0)
        world.tick()
    assert world.run(run_id).status == "queued"
    world.ended(run_id)
    world.assert_whole(run_id)
    assert world.ends(run_id) == ["failed", "finished"]


def test_a_database_that_goes_away_and_comes_back_loses_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = world.submit(steps=40)
    append, choose, failed = runs.append, random.Random(1), 0

    def flaky(*arguments: object) -> object:
        if choose.random() < 0.3:
            raise OperationalError("INSERT", {}, Exception("the server closed the connection"))
        result = append(*arguments)  # type: ignore[arg-type]
        if choose.random() < 0.3:
            raise OperationalError("COMMIT", {}, Exception("the answer was lost"))
        return result

    monkeypatch.setattr(runs, "append", flaky)
    while not world.run(run_id).ended:
        try:
            world.tick()
        except OperationalError:
            failed += 1
    world.assert_whole(run_id, 40)
    assert failed and world.ends(run_id) == ["finished"]


def test_what_cannot_be_ended_does_not_keep_the_rest_from_ending(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ids = [world.submit(steps=1000, threads=1, seed=seed) for seed in (1, 2)]
    world.until(lambda: len(world.cluster.handles) == 2)
    monkeypatch.setattr(world.handle(run_ids[0]), "end", lambda: 1 // 0)
    world.scheduler.close(lambda: world.now)
    assert [world.run(run_id).status for run_id in run_ids] == ["queued", "queued"]


@pytest.mark.parametrize("seed", range(12))
def test_whatever_dies_whenever_every_run_ends_with_the_same_bits(make_world: MakeWorld, seed: int) -> None:
    choose = random.Random(seed)
    world = make_world(opens=Opens({choose.randrange(12): "crash"}))
    run_ids = [world.submit(steps=12, threads=1, checkpoint_interval=choose.randrange(5), max_attempts=100) for _ in range(3)]

    def disturb() -> None:
        match choose.randrange(12):
            case 0:
                world.boot()
            case 1 if world.cluster.handles:
                choose.choice(list(world.cluster.handles.values())).kill()
            case 2 if not (run := world.run(choose.choice(run_ids))).ended and run.stop_reason is None:
                runs.pause(world.db, run.id)
            case 3:
                world.scheduler.close(lambda: world.now)
                world.boot()
            case _:
                world.now += timedelta(seconds=choose.choice([0.0, 0.3, 3.0]))

    for _ in range(60):
        disturb()
        world.tick()
    for run_id in run_ids:
        if not world.run(run_id).ended:
            runs.resume(world.db, run_id)
    world.ended(*run_ids)
    for run_id in run_ids:
        world.assert_whole(run_id, 12)


def test_a_round_follows_what_this_process_writes_and_news_of_elsewhere(world: World) -> None:
    """No time passes but a moment, and the scheduler looks by itself once in a minute."""
    world.settings = world.settings.model_copy(update={"tick_seconds": 60.0})
    news, stop = threading.Event(), threading.Event()
    scheduler = Scheduler(world.db, world.cluster, world.settings, news=news)
    up = threading.Event()
    thread = threading.Thread(target=scheduler.run_forever, args=(stop, up.set))
    thread.start()

    def ended(run_id: str) -> None:
        deadline = time.monotonic() + SECONDS_MAX
        while not world.run(run_id).ended:
            assert time.monotonic() < deadline, "nobody looked"
            time.sleep(0.01)

    try:
        assert up.wait(SECONDS_MAX)
        written_here = world.submit()
        ended(written_here)
        elsewhere = Database(world.url, clock=lambda: world.now)
        written_there = jobs.submit(elsewhere, parse_job(job_document(seed=8)), now=world.now).run.id
        elsewhere.close()
        news.set()
        ended(written_there)
    finally:
        stop.set()
        news.set()
        thread.join(SECONDS_MAX)
    world.assert_whole(written_here)
    assert world.run(written_there).status == "succeeded" and not thread.is_alive()

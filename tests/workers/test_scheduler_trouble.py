"""Trouble of cluster, database and clock: no run is to blame for it, none is lost, and the scheduler goes on."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from mok_service import runs
from mok_service.errors import LeaseLost
from mok_workers.cluster import InProcessHandle, RayCluster
from mok_workers.placed import ClusterTrouble, RayHandle, cluster_trouble
from tests.workers.fakes import Opens
from tests.workers.world import MakeWorld, World


def trouble(*_: object) -> Any:
    raise ClusterTrouble("RaySystemError: nobody is there")


def test_a_cluster_that_takes_nothing_costs_no_attempt(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ids = [world.submit(seed=seed, max_attempts=1) for seed in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(world.cluster, "place", trouble)
        for _ in range(300):
            world.tick()
            world.now += timedelta(seconds=1)
    assert [world.run(run_id).failures for run_id in run_ids] == [0] * 4
    world.ended(*run_ids)
    for run_id in run_ids:
        assert world.run(run_id).status == "succeeded" and world.ends(run_id)[-1] == "finished"
        assert set(world.ends(run_id)[:-1]) <= {"stopped"}


def test_after_trouble_the_cluster_is_asked_before_anything_is_claimed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new cluster at the old address says so there: the process is then started anew, and joins it."""
    run_ids = [world.submit(seed=seed) for seed in range(4)]
    world.tick()
    monkeypatch.setattr(world.cluster, "place", trouble)
    for handle in list(world.cluster.handles.values()):
        handle.kill()
    world.until(lambda: any("stopped" in world.ends(run_id) for run_id in run_ids))
    assert sum(world.ends(run_id).count("stopped") for run_id in run_ids) == 1

    def another() -> Any:
        raise RuntimeError("WrongClusterID")

    monkeypatch.setattr(world.cluster, "nodes", another)
    with pytest.raises(RuntimeError, match="WrongClusterID"):
        world.tick()


def test_trouble_about_one_attempt_loses_no_other(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one whose worker hasn't come up: its node isn't gone."""
    first, second = (world.submit(seed=seed, threads=1, max_attempts=1) for seed in (1, 2))
    with monkeypatch.context() as patch:
        patch.setattr(InProcessHandle, "poll", lambda self: None)
        world.until(lambda: len(world.cluster.handles) == 2)
        patch.setattr(world.handle(first), "poll", trouble)
        world.tick()
        world.tick()
    world.ended(first, second)
    assert world.ends(first) == world.ends(second) == ["finished"]


@pytest.mark.parametrize("call", ["gone", "release", "poll", "ask", "end"])
def test_what_a_worker_did_stays_done_whatever_the_cluster_says(
    world: World, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    real, calls = getattr(InProcessHandle, call), [0]

    def sometimes(self: InProcessHandle, *arguments: Any) -> Any:
        calls[0] += 1
        return trouble() if calls[0] % 3 else real(self, *arguments)

    monkeypatch.setattr(InProcessHandle, call, sometimes)
    world.settings = world.settings.model_copy(update={"stop_seconds_max": 5.0})
    run_id = world.submit(max_attempts=1)
    run = world.ended(run_id)
    assert run.status == "succeeded" and run.failures == 0 and calls[0]
    assert [end for end in world.ends(run_id) if end != "stopped"] == ["finished"]


def test_a_worker_that_the_cluster_hides_for_a_lease_is_lost(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(opens=Opens({5: "wait"}, gate=True))
    run_id = world.submit()
    world.stored(run_id, 4)
    with monkeypatch.context() as patch:
        patch.setattr(InProcessHandle, "poll", trouble)
        world.wait(world.settings.lease_seconds - 10)
        assert world.ends(run_id) == [None]
        world.wait(20)
        assert isinstance(world.opens, Opens) and world.opens.go is not None
        world.opens.go.set()
        world.until(lambda: world.ends(run_id)[0] is not None)
    world.ended(run_id)
    world.assert_whole(run_id)
    assert world.ends(run_id) == ["worker_lost", "finished"]


def test_what_fails_while_a_failure_is_dealt_with_stays_there(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(opens=Opens({5: "wait"}, gate=True))
    run_id = world.submit()
    world.stored(run_id, 4)
    handle, end = world.handle(run_id), InProcessHandle.end

    def end_badly() -> None:
        end(handle)
        raise OSError("nor can it be ended")

    monkeypatch.setattr(handle, "poll", lambda: 1 // 0)
    monkeypatch.setattr(handle, "end", end_badly)
    world.tick()
    assert isinstance(world.opens, Opens) and world.opens.go is not None
    world.opens.go.set()
    world.ended(run_id)
    world.assert_whole(run_id)
    assert world.ends(run_id) == ["failed", "finished"]


def test_a_lease_that_ran_out_while_its_run_was_placed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = world.submit()

    def slow(payload: Any) -> Any:
        world.now += timedelta(seconds=world.settings.lease_seconds + 1)
        runs.reap(world.db, world.now)
        trouble()

    with monkeypatch.context() as patch:
        patch.setattr(world.cluster, "place", slow)
        world.tick()
    world.ended(run_id)
    world.assert_whole(run_id)
    assert world.ends(run_id) == ["lease_expired", "finished"]


def test_a_database_that_goes_away_after_a_claim_costs_no_attempt(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = world.submit(max_attempts=1)

    def gone(*_: object, **__: object) -> Any:
        raise OperationalError("UPDATE", {}, Exception("the server closed the connection"))

    with monkeypatch.context() as patch:
        patch.setattr(runs, "mark_starting", gone)
        with pytest.raises(OperationalError):
            world.tick()
        patch.setattr(runs, "release", gone)
        with pytest.raises(OperationalError):
            world.tick()
    world.ended(run_id)
    world.assert_whole(run_id)
    assert world.ends(run_id) == ["stopped", "finished"]


def test_a_scheduler_that_slept_keeps_its_attempts(make_world: MakeWorld) -> None:
    world = make_world(opens=Opens({5: "wait"}, gate=True))
    run_id = world.submit(max_attempts=1)
    world.stored(run_id, 4)
    world.now += timedelta(hours=1)
    world.tick()
    assert isinstance(world.opens, Opens) and world.opens.go is not None
    world.opens.go.set()
    world.ended(run_id)
    world.assert_whole(run_id)
    assert world.ends(run_id) == ["finished"]


@pytest.mark.parametrize(("in_order", "end", "failures"), [(True, "stopped", 0), (False, "service_restarted", 1)])
def test_only_an_end_that_nobody_wanted_may_be_a_runs_fault(
    make_world: MakeWorld, in_order: bool, end: str, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that had nothing new to store when the service ended."""
    world = make_world(opens=Opens({0: "wait"}, gate=True))
    run_id, stop = world.submit(), threading.Event()
    world.until(lambda: bool(world.cluster.handles))
    assert isinstance(world.opens, Opens) and world.opens.go is not None
    world.opens.go.set()

    def tick(now: Any) -> None:
        if not in_order:
            raise RuntimeError("the cluster is gone")
        stop.set()

    monkeypatch.setattr(world.scheduler, "tick", tick)
    monkeypatch.setattr(world.scheduler, "boot", lambda now: None)
    if in_order:
        world.scheduler.run_forever(stop)
    else:
        with pytest.raises(RuntimeError, match="the cluster is gone"):
            world.scheduler.run_forever(stop)
    run = world.run(run_id)
    assert (run.status, run.failures, world.ends(run_id)) == ("queued", failures, [end])


def test_what_ray_raises_is_trouble_of_the_cluster(ray_cluster: RayCluster) -> None:
    """`ray_cluster`: who imports Ray before it is set up can't join it."""
    from ray.exceptions import AuthenticationError, GetTimeoutError, RaySystemError

    @cluster_trouble
    def asked(error: Exception) -> None:
        raise error

    for error in (AuthenticationError("WrongClusterID"), GetTimeoutError("slow"), ConnectionError("refused"),
                  RaySystemError(Exception("not started"))):
        with pytest.raises(ClusterTrouble, match=type(error).__name__):
            asked(error)
    with pytest.raises(LeaseLost):
        asked(LeaseLost("somebody else has it"))
    assert all(hasattr(getattr(RayHandle, name), "__wrapped__") for name in ("ask", "poll", "stop", "release", "end", "gone"))


def test_a_databases_error_shows_no_values(world: World) -> None:
    with pytest.raises(SQLAlchemyError) as raised, world.db.write() as tx:
        tx.execute(text("INSERT INTO nowhere (token) VALUES (:token)"), {"token": "hush-hush"})
    assert "INSERT INTO nowhere" in str(raised.value) and "hush-hush" not in str(raised.value)

"""The scheduler on a real Ray: one for all of these tests, with a training that needs no kernels."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from mok_service import runs
from mok_workers import placed
from mok_workers.cluster import OBJECT_STORE_BYTES, RayCluster, names_of, temp_folder
from mok_workers.messages import Lost, Seen
from mok_workers.placed import RayActors, RayHandle
from mok_workers.pool import Limits, Pool
from mok_workers.scheduler import Scheduler
from mok_workers.supervisor import runs as runs_still
from tests.workers.fakes import Opens, nothing, payload
from tests.workers.world import World

SECONDS_MAX = 60.0


@pytest.fixture
def make_ray_world(make_world: Callable[..., World], ray_cluster: RayCluster) -> Callable[[Opens], World]:
    def make(opens: Opens) -> World:
        world = make_world()
        # Its clock runs faster than a real process starts on a busy machine.
        world.settings = world.settings.model_copy(update={"start_seconds_max": 3600.0})
        ray_cluster._opens = opens
        world.scheduler = Scheduler(world.db, ray_cluster, world.settings, boot_id=f"boot-{world.boots}")
        return world

    return make


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """What the programs of the processes are measured by."""
    path = tmp_path / "programs"
    path.write_text("as they were")
    return path


@pytest.fixture
def keeping(ray_cluster: RayCluster, programs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """The cluster keeps processes while a test lasts."""
    pool = Pool(RayActors(programs.read_text, nothing), Limits(kept_max=2), time.monotonic)
    monkeypatch.setattr(ray_cluster, "_pool", pool)
    yield pool
    pool.clear("the test is over")
    until(lambda: not actors())


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not reached():
        assert time.monotonic() < deadline, "it never came to be"


def free_cpus() -> float:
    import ray

    return float(ray.available_resources().get("CPU", 0.0))  # type: ignore[no-untyped-call]


def actors() -> list[psutil.Process]:
    """The processes of our actors that run."""
    return [process for process in psutil.Process().children(recursive=True) if is_actor(process)]


def is_actor(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # it may end while it is looked at
        return process.name().startswith("ray::TrainActor") and runs_still(process)
    return False


def test_a_run_completes_and_no_secret_reaches_the_worker(
    make_ray_world: Callable[[Opens], World], ray_cluster: RayCluster
) -> None:
    world = make_ray_world(Opens())
    run_id = world.submit(threads=0)
    world.ended(run_id)
    world.assert_whole(run_id)
    attempt = runs.attempts(world.db, run_id)[0]
    assert attempt.environment is not None and attempt.placement is not None
    seen = set(attempt.environment["seen"])
    assert "RAY_AUTH_TOKEN" in seen and "PATH" in seen
    assert not {name for name in seen if "DATABASE" in name or "SECRET" in name or name.startswith("PYTEST")}
    assert attempt.placement["pid"] != os.getpid()
    until(lambda: not actors())
    assert ray_cluster.names() == set() and ray_cluster.nodes()[0].cpus == len(os.sched_getaffinity(0))


def test_a_killed_actor_costs_an_attempt_and_no_bit(make_ray_world: Callable[[Opens], World]) -> None:
    world = make_ray_world(Opens({5: "kill"}))
    run_id = world.submit()
    world.ended(run_id)
    world.assert_whole(run_id)
    assert world.ends(run_id) == ["worker_lost", "finished"]
    lost = next(attempt for attempt in runs.attempts(world.db, run_id) if attempt.end == "worker_lost")
    assert "died" in (lost.message or "") and "common causes" not in (lost.message or "")


def test_an_actor_killed_for_memory_fails_for_memory(
    make_ray_world: Callable[[Opens], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_ray_world(Opens({1100: "kill"}))
    run_id = world.submit(steps=1100)  # more than may be unread: it was heard of before it is killed
    world.until(lambda: world.run(run_id).status == "running")
    counter = itertools.count(1)
    monkeypatch.setattr(placed, "memory_kills", lambda: next(counter))  # as if the kernel had just killed another one
    run = world.ended(run_id)
    assert (run.status, run.stop_reason) == ("failed", "out_of_memory")


def test_a_cancelled_run_frees_its_devices_first(make_ray_world: Callable[[Opens], World], ray_cluster: RayCluster) -> None:
    world = make_ray_world(Opens())
    run_id = world.submit(steps=100_000)
    world.stored(run_id, 10)
    assert len(actors()) == 1 and ray_cluster.names() == {f"{run_id}-1"}
    runs.cancel(world.db, run_id)
    run = world.ended(run_id)
    assert run.status == "cancelled" and not actors() and ray_cluster.names() == set()
    until(lambda: free_cpus() == len(os.sched_getaffinity(0)))


def test_an_actor_that_nobody_asks_leaves_by_itself(ray_cluster: RayCluster, tmp_path: Path) -> None:
    ray_cluster._opens = Opens()
    ray_cluster.nodes()
    handle = ray_cluster.place(replace(payload(tmp_path, steps=100_000), name="run_left-1", lease_seconds=30.0))
    handle.ask(Seen(), 2.0)
    until(lambda: handle.poll() is not None)
    handle.ask(Seen(), 0.5)
    until(lambda: handle.poll() is not None)
    until(lambda: not actors())
    handle.ask(Seen(), 30.0)
    answer = None
    while answer is None:
        answer = handle.poll()
    assert isinstance(answer, Lost) and answer.end == "worker_lost"
    handle.end()
    until(handle.gone)


# ---- processes that are kept ---------------------------------------------------------------------------------------------

def where(world: World, run_id: str) -> tuple[int, int]:
    """The process of a run's last attempt, and how many attempts it had executed before."""
    placement = runs.attempts(world.db, run_id)[-1].placement
    assert placement is not None
    return placement["pid"], placement["attempts_before"]


def completed(world: World, **fields: Any) -> tuple[int, int]:
    """`where` a run that succeeded at its first attempt was executed."""
    run_id = world.submit(**fields)
    world.ended(run_id)
    world.assert_whole(run_id)
    assert world.ends(run_id) == ["finished"]
    return where(world, run_id)


def test_runs_follow_each_other_in_one_process_which_holds_no_devices(
    make_ray_world: Callable[[Opens], World], ray_cluster: RayCluster, keeping: Pool
) -> None:
    world = make_ray_world(Opens())
    pid, before = completed(world)
    assert before == 0 and [process.pid for process in actors()] == [pid]
    assert ray_cluster.names() == set()
    until(lambda: free_cpus() == len(os.sched_getaffinity(0)))
    assert [completed(world, threads=threads) for threads in (1, 0)] == [(pid, 1), (pid, 2)]
    keeping.clear("the test is over")
    until(lambda: not actors())


def test_a_kept_process_that_died_or_refuses_costs_no_attempt(
    make_ray_world: Callable[[Opens], World], ray_cluster: RayCluster, keeping: Pool, programs: Path
) -> None:
    world = make_ray_world(Opens())
    pid, _ = completed(world)
    psutil.Process(pid).kill()
    another, before = completed(world)
    assert another != pid and before == 0
    programs.write_text("edited")
    third, before = completed(world)
    assert third not in (pid, another) and before == 0
    assert completed(world) == (third, 1)


def test_an_idle_process_that_doesnt_rest_is_ended(
    make_ray_world: Callable[[Opens], World], ray_cluster: RayCluster, keeping: Pool
) -> None:
    completed(make_ray_world(Opens()))
    keeping.idle[0].name = "another's"
    keeping._ask(keeping.idle[0])

    def tended() -> bool:
        ray_cluster.tend()
        return not keeping.idle

    until(tended)
    until(lambda: not actors())


def test_only_a_run_that_came_to_its_end_leaves_its_process_to_others(
    make_ray_world: Callable[[Opens], World], ray_cluster: RayCluster, keeping: Pool
) -> None:
    world = make_ray_world(Opens({5: "crash"}))
    crashed = world.submit()
    world.ended(crashed)
    world.assert_whole(crashed)
    assert world.ends(crashed) == ["failed", "finished"]
    first, second = (attempt.placement["pid"] for attempt in runs.attempts(world.db, crashed) if attempt.placement is not None)
    assert first != second and [worker.attempts for worker in keeping.idle] == [1]
    ray_cluster._opens = Opens()
    cancelled = world.submit(steps=100_000)
    world.stored(cancelled, 10)
    runs.cancel(world.db, cancelled)
    assert world.ended(cancelled).status == "cancelled" and where(world, cancelled) == (second, 1)
    assert not keeping.idle and not actors(), "a cancelled run's process ends, whatever it was before"


def test_a_process_with_a_gpu_sees_that_one_and_serves_one_attempt(
    make_ray_world: Callable[[Opens], World], ray_cluster: RayCluster, keeping: Pool
) -> None:
    world = make_ray_world(Opens())
    completed(world)
    kept = keeping.idle[0]
    run_id = world.submit(device="cuda", threads=1)
    world.ended(run_id)
    world.assert_whole(run_id)
    environment = runs.attempts(world.db, run_id)[0].environment
    assert environment is not None and environment["visible"] == "0" and where(world, run_id)[1] == 0
    assert keeping.idle == [kept], "it was neither used nor joined"
    until(lambda: len(actors()) == 1)


def test_a_process_with_a_gpu_that_refuses_is_lost_like_any_other(
    make_ray_world: Callable[[Opens], World], ray_cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "_actors", RayActors(time.monotonic, nothing))  # never what it was
    world = make_ray_world(Opens())
    run = world.ended(run_id := world.submit(device="cuda", threads=1, max_attempts=1))
    assert run.status == "failed" and world.ends(run_id) == ["worker_lost"]
    assert "have changed since it loaded them" in (runs.attempts(world.db, run_id)[0].message or "")


def test_every_node_has_a_name_of_its_own() -> None:
    assert names_of([("one", "aa"), ("two", "bb"), ("two", "cc")]) == ["one", "two-bb", "two-cc"]


def test_among_several_nodes_group_and_process_are_where_they_were_placed(ray_cluster: RayCluster, tmp_path: Path) -> None:
    ray_cluster._opens = Opens()
    ray_cluster.nodes()
    [node] = ray_cluster._cpu_nodes
    ray_cluster._cpu_nodes = ["another", node]
    ray_cluster._ids["gone"] = "f" * len(node)
    waits = ray_cluster.place(replace(payload(tmp_path), name="run_nowhere-1", node="gone"))
    handle = ray_cluster.place(replace(payload(tmp_path), name="run_somewhere-1"))

    def answered() -> bool:
        handle.ask(Seen(), 30.0)
        return handle.poll() is not None

    until(answered)
    assert isinstance(handle, RayHandle) and handle._worker is not None and handle._worker.node == node
    assert isinstance(waits, RayHandle) and waits._node() is None, "its group goes nowhere else"
    for each in (handle, waits):
        each.end()
        until(each.gone)
    ray_cluster.nodes()


def test_a_process_that_is_ready_executes_the_first_run(
    make_ray_world: Callable[[Opens], World], ray_cluster: RayCluster, keeping: Pool
) -> None:
    keeping._limits = Limits(ready=1)
    ray_cluster.nodes()
    ray_cluster.tend()
    until(lambda: len(actors()) == 1)
    [ready] = actors()
    world = make_ray_world(Opens())
    assert completed(world) == (ready.pid, 0)


def test_who_ends_an_attempt_by_its_name_ends_its_process(
    make_ray_world: Callable[[Opens], World], ray_cluster: RayCluster, keeping: Pool
) -> None:
    """As another scheduler of the cluster does, once the attempt isn't leased any more."""
    world = make_ray_world(Opens())
    run_id = world.submit(steps=100_000)
    world.stored(run_id, 10)
    [process] = actors()
    ray_cluster.end(f"{run_id}-7")
    ray_cluster.end(f"{run_id}-1")
    until(lambda: not runs_still(process))
    assert f"{run_id}-1" not in ray_cluster.names()
    world.until(lambda: world.ends(run_id)[0] == "worker_lost")


def test_rays_folder_is_ours_alone_and_short_enough(tmp_path: Path) -> None:
    for wanted in (Path("/tmp/mok-a/ray"), tmp_path / ("long" * 30)):
        folder = temp_folder(wanted)
        (folder / "left").touch()
        assert folder.stat().st_mode & 0o777 == 0o700 and len(str(folder / "r")) <= 40
        again = temp_folder(wanted)
        assert again == folder and not list(again.iterdir()), "what a killed service left is removed"
        again.rmdir()
    Path("/tmp/mok-a").rmdir()
    assert OBJECT_STORE_BYTES <= 100 << 20

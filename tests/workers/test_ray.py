"""The scheduler on a real Ray: one for all of these tests, with a training that needs no kernels."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from mok_service import runs
from mok_workers import placed
from mok_workers.cluster import OBJECT_STORE_BYTES, RayCluster, temp_folder
from mok_workers.messages import Lost, Seen
from mok_workers.scheduler import Scheduler
from mok_workers.supervisor import runs as runs_still
from tests.workers.fakes import Opens, payload
from tests.workers.world import World

SECONDS_MAX = 60.0


@pytest.fixture
def make_ray_world(make_world: Callable[..., World], ray_cluster: RayCluster) -> Callable[[Opens], World]:
    def make(opens: Opens) -> World:
        world = make_world()
        ray_cluster._opens = opens
        world.scheduler = Scheduler(world.db, ray_cluster, world.settings, boot_id=f"boot-{world.boots}")
        return world

    return make


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not reached():
        assert time.monotonic() < deadline, "it never came to be"


def free_cpus() -> float:
    import ray

    return float(ray.available_resources().get("CPU", 0.0))  # type: ignore[no-untyped-call]


def actors() -> list[psutil.Process]:
    """The processes of our actors that run."""
    return [p for p in psutil.Process().children(recursive=True) if p.name().startswith("ray::TrainActor") and runs_still(p)]


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
    assert attempt.placement["pid"] != os.getpid() and not actors()
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

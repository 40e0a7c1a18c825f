from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mok_workers.cluster import RayCluster
from tests.workers.fakes import Opens, nothing, unchanged
from tests.workers.world import World


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """One Ray for all tests, started with a secret in the environment."""
    cluster = RayCluster(tmp_path_factory.mktemp("ray"), Opens(), seconds_max=0.2, measure=unchanged, load=nothing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOK_DATABASE_URL", "postgresql://user:hunter2@host/name")
        patch.setattr("mok_workers.cluster.gpus", lambda: ("one that nobody uses",))  # Ray believes what it is told
        cluster.start()
    yield cluster
    cluster.close()


@pytest.fixture
def make_world(tmp_path: Path, migrated_file: Path) -> Iterator[Callable[..., World]]:
    """Makes worlds on SQLite, or on the database whose `url` is given."""
    made: list[World] = []

    def make(**fields: Any) -> World:
        folder = tmp_path / f"world-{len(made)}"
        folder.mkdir()
        if "url" not in fields:
            shutil.copy(migrated_file, folder / "mok.db")
        made.append(World(folder, **({"url": f"sqlite:///{folder}/mok.db"} | fields)))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()

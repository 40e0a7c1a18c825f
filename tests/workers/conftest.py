from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mok_workers.cluster import RayCluster
from tests.workers.fakes import Opens
from tests.workers.world import World


@pytest.fixture(scope="session")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """One Ray for all tests, started with a secret in the environment."""
    cluster = RayCluster(tmp_path_factory.mktemp("ray"), Opens(), seconds_max=0.2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOK_DATABASE_URL", "postgresql://user:hunter2@host/name")
        cluster.start()
    yield cluster
    cluster.close()


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(**fields: Any) -> World:
        made.append(World(tmp_path / str(len(made)), **fields))
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()

"""The two forms of the service, as things that can be killed in several ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Protocol

import psutil

from mok_service.settings import Settings
from tests.chaos.postgres import Postgres
from tests.operating.installation import Installation, Program, api

Kill = Callable[[], bool]  # whether there was something to kill
Pids = Callable[[], set[int]]  # the processes that execute an attempt, by what they reported; empty while nobody can say
ACTOR: Final = "ray::TrainActor"
READY: Final = {"MOK_ACTORS_READY": "1"}  # so that there is a process that waits for an attempt, too


class Form(Protocol):
    name: str
    url: str
    settings: Settings

    def kills(self, training: Pids) -> Mapping[str, Kill]:
        """What can be killed, by kind."""

    def keep(self) -> None:
        """Start again what has ended: a service manager's part."""


def kill_one(program: Program, name: str, which: Callable[[int], bool] = lambda pid: True) -> Kill:
    """Kills one process of this name below the program, of those that `which` picks by their pid."""
    def kill() -> bool:
        for process in program.processes():
            with suppress(psutil.Error):
                if process.name().startswith(name) and which(process.pid):
                    process.kill()
                    return True
        return False
    return kill


def kill_actors(program: Program, training: Pids) -> dict[str, Kill]:
    """One that executes an attempt, and one that waits for one."""
    return {"actor that trains": kill_one(program, ACTOR, lambda pid: pid in training()),
            "actor that waits": kill_one(program, ACTOR, lambda pid: pid not in training())}


def kill_whole(program: Program) -> Kill:
    def kill() -> bool:
        was = program.running
        program.kill()
        return was
    return kill


def kill_root(program: Program) -> Kill:
    """The first process alone: what it started must notice."""
    def kill() -> bool:
        if not program.running:
            return False
        assert program.process is not None
        program.process.kill()
        program.wait()
        return True
    return kill


def kill_child(program: Program) -> Kill:
    """The first process's child, which does the work."""
    def kill() -> bool:
        with suppress(psutil.Error, IndexError):
            psutil.Process(program.processes()[0].pid).children()[0].kill()
            return True
        return False
    return kill


class Embedded:
    """`mok serve`."""

    name = "embedded (`mok serve`, SQLite)"

    def __init__(self, folder: Path) -> None:
        self.service = api(folder, "serve", "serve", **READY)
        self.url, self.settings = self.service.url, Settings(data_dir=folder / "serve")

    def kills(self, training: Pids) -> Mapping[str, Kill]:
        program = self.service.program
        return {
            "everything at once": kill_whole(program), "supervisor": kill_root(program),
            "API and scheduler": kill_child(program), **kill_actors(program, training),
            "raylet": kill_one(program, "raylet"), "Ray's control store": kill_one(program, "gcs_server"),
        }

    def keep(self) -> None:
        if not self.service.program.running:
            self.service.start()


class Production:
    """PostgreSQL, one Ray cluster, two API processes, two schedulers."""

    name = "production (2 `mok api`, 2 `mok worker`, PostgreSQL, a Ray cluster)"

    def __init__(self, folder: Path, postgres: Postgres) -> None:
        self.postgres = postgres
        self.installation = Installation(folder, postgres.url, apis=2, schedulers=2, cpus=2, scheduler_settings=READY)
        self.url = self.installation.apis[1].url
        self.settings = Settings(
            data_dir=folder / "reader", database_url=postgres.url, checkpoint_dir=folder / "checkpoints"
        )

    def kills(self, training: Pids) -> Mapping[str, Kill]:
        parts = self.installation
        ray = parts.ray.program
        return {
            "API": kill_whole(parts.apis[1].program), "scheduler, all of it": kill_whole(parts.schedulers[0]),
            "scheduler's supervisor": kill_root(parts.schedulers[1]), "scheduler's process": kill_child(parts.schedulers[0]),
            **kill_actors(ray, training), "raylet": kill_one(ray, "raylet"),
            "Ray, all of it": kill_whole(ray), "PostgreSQL": kill_whole(self.postgres.program),
        }

    def keep(self) -> None:
        parts = self.installation
        for program in (self.postgres.program, parts.ray.program, *(one.program for one in parts.apis), *parts.schedulers):
            if not program.running:
                program.start()


@contextmanager
def embedded(folder: Path) -> Iterator[Form]:
    form = Embedded(folder)
    form.service.start()
    try:
        form.service.ready()
        yield form
    finally:
        form.service.program.stop()


@contextmanager
def production(folder: Path) -> Iterator[Form]:
    postgres = Postgres(folder / "pg")
    postgres.start()
    try:
        form = Production(folder, postgres)
        with form.installation:
            yield form
    finally:
        postgres.program.kill()

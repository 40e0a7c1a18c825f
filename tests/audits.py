"""A data folder with a run that real kernels trained, a scheduler on it, and forgeries of that run."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy import update

from mok_service import jobs, runs
from mok_service.db import tables
from mok_service.kernels import load_backend
from mok_service.runs.rows import checkpoint_row, step_row
from mok_service.settings import Settings
from mok_service.spec import JobSpec
from mok_service.training.checkpoint import CheckpointStore
from mok_service.training.loop import Trainer
from mok_workers.opening import open_training
from tests.services import Service, running_api
from tests.training.jobs import TEXT, corpus_of
from tests.training.jobs import job as small_job
from tests.workers.world import World

STEPS = 6  # a checkpoint after each: six segments
JOB = small_job(steps=STEPS, execution={"threads": 1})
CODE = {"version": "1", "native": {"cpu": "sha256:" + "a" * 64}, "git": None, "lock": None}  # a checkout changes under tests


def train(migrated: Path, folder: Path, spec: JobSpec = JOB) -> str:
    """Trains a run into a data folder; its id."""
    shutil.copy(migrated, folder / "mok.sqlite3")
    with opened(folder) as world:
        run = jobs.submit(world.db, spec, now=world.now).run
        assert world.ended(run.id).status == "succeeded"
    return run.id


def says_same_code(patch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """What these modules record of the code is always the same."""
    for module in modules:
        patch.setattr(module, "environment", lambda: {"code": CODE})


def copied(trained: Path, to: Path) -> Path:
    """A copy of a data folder, in place of an empty one."""
    return Path(shutil.copytree(trained, to / "data"))


@contextmanager
def opened(folder: Path, opens: Any = open_training) -> Iterator[World]:
    """A scheduler on a data folder, with the real kernels and data."""
    world = World(folder, f"sqlite:///{folder}/mok.sqlite3", opens=opens)
    world.settings = Settings(data_dir=folder, data_roots=(TEXT,))
    world.boot()
    try:
        yield world
    finally:
        world.close()


@contextmanager
def serving(world: World) -> Iterator[Service]:
    """The API on that folder, and its scheduler at work."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            world.tick()
            stop.wait(0.005)

    with running_api(world.db, world.settings) as service:
        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield service
        finally:
            stop.set()
            thread.join()


def reader(world: World, run: str) -> Any:
    """What `verifying.check` reads checkpoints by."""
    def read(step: int, name: str) -> Iterator[bytes]:
        yield (world.settings.checkpoints(run) / f"step-{step:08d}" / name).read_bytes()

    return read


def forge(world: World, run: str, at: int, *, chain: bool = True) -> None:
    """Replaces a run's records and checkpoints from step `at` on by an honest chain over a state in which one weight has another
    bit: nothing in it contradicts anything, and only the segment that ends with step `at` can't be computed. Without `chain` only
    that one checkpoint is replaced."""
    trainer = Trainer(JOB, corpus_of(JOB), load_backend("cpu", threads=1), CheckpointStore(world.settings.checkpoints(run)),
                      resume_at_most=at - 1)
    while trainer.step < (STEPS if chain else at):
        record = trainer.advance()
        if record.step == at:
            parameters = trainer.model.parameters
            parameters.weights.view(-1).numpy().view("uint32")[0] ^= 1
            parameters.refresh_operands()
            record = replace(record, state=None if record.state is None else trainer.state_digests())
            trainer.head = record.head()
        shutil.rmtree(world.settings.checkpoints(run) / f"step-{record.step:08d}")  # where the record is the same, it would stay
        info = trainer.save(trainer.state_digests())
        rows = ((tables.step_records, step_row(record, record.head())), (tables.checkpoints, checkpoint_row(info)))
        with world.db.write() as tx:
            for table, row in rows:
                tx.execute(update(table).where(table.c.run_id == run, table.c.step == record.step).values(**row))
    if chain:
        with world.db.write() as tx:
            tx.execute(update(tables.runs).where(tables.runs.c.id == run).values(head=record.head(), weights=info.state.weights))


def attested(world: World, key: Any) -> None:
    """Signs all that has ended."""
    for ended, tenant in runs.unattested(world.db):
        runs.attest(world.db, key, ended, tenant)

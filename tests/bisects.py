"""Runs of a service of which one was made by kernels with a planted fault: those that are asked for two threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mok_service import jobs
from mok_service.kernels import load_backend
from mok_workers import bisecting, opening
from tests.audits import opened, says_same_code, train
from tests.training.planted import PlantedBackend
from tests.training.test_bisect import BATCH, first_plant, tiny

SPEC = tiny()
FAULTY = {"threads": 2}


def kernels(patch: pytest.MonkeyPatch) -> None:
    """Two threads get the faulty kernels, in trainings and in bisects; the code is the same for all."""
    plant, _ = first_plant(SPEC, "service")

    def load(name: str, *, threads: int = 0, **options: Any) -> Any:
        return PlantedBackend(BATCH["sequences"], plant) if threads == 2 else load_backend(name, threads=threads, **options)

    for module in (opening, bisecting):
        patch.setattr(module, "load_backend", load)
    says_same_code(patch, opening)


def train_three(migrated: Path, folder: Path) -> tuple[str, str, str]:
    """A run, one of the same job by the faulty kernels, and one by good ones; their ids."""
    first = train(migrated, folder, SPEC)
    with opened(folder) as world:
        others = [jobs.submit(world.db, SPEC.model_copy(update={"execution": SPEC.execution.model_copy(update=wish)}),
                              now=world.now).run.id for wish in (FAULTY, {})]
        assert world.ended(*others).status == "succeeded"
    return first, others[0], others[1]

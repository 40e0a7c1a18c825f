"""Runs to export: one that succeeded, one that failed, from a data folder without a service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mok_service import jobs
from mok_service.cli.local import Local
from mok_service.db.session import Database, upgrade
from mok_service.settings import Settings
from mok_service.spec import parse_job
from tests.services import Worker, spec


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    settings = Settings(data_dir=tmp_path_factory.mktemp("exported"))
    upgrade(settings.database())
    db = Database(settings.database())
    worker = Worker(db, settings, losses={2: float("inf")})
    jobs.submit(db, parse_job(spec(name="a|b <tiny>")))
    worker.work()
    jobs.submit(db, parse_job(spec(name="failing")))
    worker.fail("non_finite", "step 1: the loss is not finite")
    worker.sign()
    yield Local(db, settings)
    db.close()


@pytest.fixture(scope="session")
def succeeded(local: Local) -> str:
    return str(local.runs(status="succeeded")["items"][0]["id"])


@pytest.fixture(scope="session")
def failed(local: Local) -> str:
    return str(local.runs(status="failed")["items"][0]["id"])


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "to"

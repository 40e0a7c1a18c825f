"""The one place that opens, commits and migrates the database."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final

import psutil
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, select, text
from sqlalchemy.exc import ArgumentError
from sqlalchemy.sql import func

from mok_service.db.together import Group, carry_out
from mok_service.errors import InvalidSpec, MokError

BUSY_SECONDS_MAX: Final = 60.0        # how long another process may hold SQLite's write lock
POSTGRESQL_CONNECTIONS_MAX: Final = 50
SQLITE_CONNECTIONS_KEPT: Final = 40   # as many as the API has threads: opening one costs more than a query
MIGRATION_LOCK: Final = 0x6D6F6B_01   # advisory locks on PostgreSQL: "mok" and a number
CLAIM_LOCK: Final = 0x6D6F6B_02
LOG_LOCK: Final = 0x6D6F6B_03
# What the present request adds to each transaction that writes, last of all: its entry in the audit log (auditlog.py).
before_commit: ContextVar[Callable[[Connection], None] | None] = ContextVar("before_commit", default=None)
_NETWORK_FILE_SYSTEMS: Final = frozenset({
    "nfs", "nfs3", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "afs", "ceph", "fuse.ceph", "fuse.sshfs", "lustre", "gpfs",
    "glusterfs", "fuse.glusterfs", "beegfs", "ocfs2", "gfs2", "davfs", "fuse.davfs2", "fuse.s3fs", "fuse.gcsfuse", "fuse.rclone",
})


class SchemaMismatch(MokError):
    """The database's schema isn't this version's: newer (update the program), or older (upgrade the database)."""

    http_status, code = 503, "schema_mismatch"


class Database:
    """A database by URL: `sqlite:////absolute/path`, or `postgresql://user:password@host/name`.

    `clock` replaces the clock of `now`, for tests. Opening creates and migrates nothing; see `upgrade`.
    Raises InvalidSpec for an unusable URL, and for a SQLite file on a network file system, whose locks can't be trusted.
    """

    def __init__(self, url: str, *, read_only: bool = False, clock: Callable[[], datetime] | None = None) -> None:
        self.url: Final = parse_url(url)
        self.dialect: Final = self.url.get_backend_name()
        self.read_only: Final = read_only
        self._clock = clock
        # Called after each transaction of this process that wrote, in its thread: so that others needn't wait to look for news.
        self.after_write: Final[list[Callable[[], None]]] = []
        # SQLite has one writer: threads of this process queue here, so that only other processes meet its busy handler.
        self._writer: threading.Lock | None = None
        self._groups = threading.local()  # of a thread that carries out several pieces of work together
        if self.dialect == "sqlite":
            self._writer = threading.Lock()
            self.engine = _sqlite_engine(self.url, read_only)
        else:
            self.engine = create_engine(self.url, pool_size=10, max_overflow=POSTGRESQL_CONNECTIONS_MAX - 10, pool_pre_ping=True,
                                        hide_parameters=True)

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that writes: committed when the block ends, rolled back when it raises."""
        assert not self.read_only, "this database was opened for reading"
        group = self._group()
        with self._begin() if group is None else group.write() as connection:
            yield connection
            action = before_commit.get()
            if action is not None:
                action(connection)
        if group is None:
            self._tell()

    def together(self, works: Sequence[Callable[[], object]]) -> list[object]:
        """Carries out pieces of work in turn, in one transaction and with one commit: what each of them returns or, in its place,
        the exception that it raises. If the commit fails, all that would have been returned is that exception. For SQLite."""
        assert self.dialect == "sqlite" and self._group() is None
        found: list[object] = []
        try:
            with ExitStack() as stack:
                self._groups.current = group = Group(self._begin, stack)
                carry_out(works, group, found)
        except Exception as error:
            return [result if isinstance(result, Exception) else error for result in found]
        finally:
            self._groups.current = None
        if group.connection is not None:
            self._tell()
        return found

    def _group(self) -> Group | None:
        found: Group | None = getattr(self._groups, "current", None)
        return found

    @contextmanager
    def _begin(self) -> Iterator[Connection]:
        with self._writer or nullcontext(), self.engine.connect() as connection:
            connection.execution_options(mok_write=True)
            with connection.begin():
                yield connection

    def _tell(self) -> None:
        for tell in self.after_write:
            tell()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that only reads, on one snapshot."""
        group = self._group()
        if group is not None and group.connection is not None:
            yield group.connection  # what the group has written is to be seen, and nobody else writes
            return
        with self.engine.connect() as connection:
            if self.dialect == "postgresql":
                connection.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
            with connection.begin():
                yield connection

    def now(self, tx: Connection | None = None) -> datetime:
        """The time that leases and deadlines go by: on PostgreSQL the database's, whatever host asks; else the host's.

        Whoever is in a transaction gives it: then it's asked on that connection. It's the present time all the same.
        """
        if self._clock is not None:
            return self._clock()
        if self.dialect != "postgresql":
            return datetime.now(UTC)
        with nullcontext(tx) if tx is not None else self.engine.connect() as connection:
            at: datetime = connection.execute(select(func.clock_timestamp())).scalar_one()
            return at.astimezone(UTC)

    def close(self) -> None:
        """Closes every connection."""
        self.engine.dispose()


def parse_url(url: str) -> URL:
    """The URL with its driver. Raises InvalidSpec for anything but a SQLite file or PostgreSQL. Passwords aren't shown."""
    allowed = "sqlite:////absolute/path or postgresql://user:password@host/name"
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise InvalidSpec(f"this database URL can't be read; allowed: {allowed}", field="database_url") from None
    name = parsed.drivername
    if name in ("postgresql", "postgres", "postgresql+psycopg"):
        return parsed.set(drivername="postgresql+psycopg")
    if name in ("sqlite", "sqlite+pysqlite") and parsed.database and parsed.database != ":memory:":
        return parsed.set(drivername="sqlite+pysqlite")
    shown = parsed.render_as_string(hide_password=True)
    raise InvalidSpec(f"the database {shown!r} can't be used; allowed: {allowed}", field="database_url", value=shown)


def _sqlite_engine(url: URL, read_only: bool) -> Engine:
    assert url.database is not None
    path = Path(url.database).absolute()
    refuse_network_file_system(path)
    if read_only:
        url = url.set(database=f"file:{path}", query={"mode": "ro", "uri": "true"})
    # Threads may read while one writes: as many connections as the thread pool asks for.
    # An error names the statement, never the values: it may be shown to people who mustn't see those.
    engine = create_engine(url, connect_args={"timeout": BUSY_SECONDS_MAX}, pool_size=SQLITE_CONNECTIONS_KEPT, max_overflow=-1,
                           hide_parameters=True)

    @event.listens_for(engine, "connect")
    def connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself
        cursor = connection.cursor()
        cursor.execute("PRAGMA foreign_keys = ON")
        cursor.execute("PRAGMA synchronous = FULL")  # a committed step survives a power cut
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that reads first and writes later can't wait for another writer: it fails at once. So take the lock first.
        write = connection.get_execution_options().get("mok_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine


def refuse_network_file_system(path: Path) -> None:
    """Raises InvalidSpec when a path is, or would be, on a network file system."""
    real = path.resolve()
    mounts = [p for p in psutil.disk_partitions(all=True) if real.is_relative_to(p.mountpoint)]
    mount = max(mounts, key=lambda p: len(p.mountpoint), default=None)
    if mount is not None and mount.fstype.lower() in _NETWORK_FILE_SYSTEMS:
        raise InvalidSpec(
            f"the database {path} is on a network file system ({mount.fstype} at {mount.mountpoint}), where SQLite loses data; "
            "allowed: a local disk, or PostgreSQL", field="database_url", value=str(path),
        )


def upgrade(url: str) -> None:
    """Brings the schema to this version, creating it if there is none. Of several processes one migrates, the others wait.

    Raises SchemaMismatch when the database is newer than this program.
    """
    database = Database(url)
    try:
        if database.dialect == "sqlite":
            _upgrade_sqlite(database)
        else:
            with database.write() as connection:
                connection.execute(select(func.pg_advisory_xact_lock(MIGRATION_LOCK)))
                _migrate(connection)
    finally:
        database.close()


def _upgrade_sqlite(database: Database) -> None:
    from filelock import FileLock

    path = Path(str(database.url.database)).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(path.name + ".migration.lock")):
        with database.engine.connect() as connection:  # a property of the file: set once, outside any transaction
            driver = connection.connection.dbapi_connection
            assert driver is not None
            driver.execute("PRAGMA journal_mode = WAL")
        with database.write() as connection:
            _migrate(connection)


def _migrate(connection: Connection) -> None:
    from alembic import command

    if current_revision(connection) != head_revision():
        config = alembic_config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def check_schema(database: Database) -> None:
    """Raises SchemaMismatch unless the schema is this version's. Changes nothing."""
    with database.read() as connection:
        found, wanted = current_revision(connection), head_revision()
    if found != wanted:
        raise SchemaMismatch(
            f"the database has schema {found or 'none'}, and this program needs {wanted}: start the service once to upgrade it",
            found=found, wanted=wanted,
        )


def alembic_config() -> Any:
    """Alembic's configuration, with the scripts of a checkout or those that a wheel carries."""
    from alembic.config import Config

    installed = Path(__file__).parent / "migrations"
    folder = installed if installed.is_dir() else Path(__file__).parents[2] / "migrations"
    config = Config()
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


@cache
def known_revisions() -> tuple[str, ...]:
    """The schemas that this program can read or upgrade, the newest first."""
    from alembic.script import ScriptDirectory

    return tuple(script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions())


def head_revision() -> str:
    """The schema that this program needs."""
    return known_revisions()[0]


def current_revision(connection: Connection) -> str | None:
    """The schema that the database has; None for an empty one. Raises SchemaMismatch for one that this program doesn't know."""
    exists = connection.dialect.has_table(connection, "alembic_version")
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none() if exists else None
    if found is not None and found not in known_revisions():
        raise SchemaMismatch(
            f"the database has schema {found}, which is newer than this program: update the program, or restore a backup",
            found=found, wanted=head_revision(),
        )
    return found

"""Backups of the database, and putting one back.

SQLite: its online backup, into a file of its own; the service may go on. PostgreSQL: `pg_dump` and `pg_restore`, in its custom
format. Each file says which it is by its first bytes. A backup appears whole or not at all, and so does what is restored.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, inspect

from mok_service.db.session import (
    MIGRATION_LOCK,
    Database,
    current_revision,
    known_revisions,
    parse_url,
    refuse_network_file_system,
)
from mok_service.errors import Conflict, InvalidSpec, MokError, NotFound, Tampered

_SQLITE_MAGIC: Final = b"SQLite format 3\0"
_POSTGRESQL_MAGIC: Final = b"PGDMP"
_NAMES: Final = {"sqlite": "an SQLite database", "postgresql": "a dump of PostgreSQL"}
_COMMENT_MAX: Final = 1000
# In one transaction with what follows: tables that the backup doesn't know (a newer version's) must not stay.
_DROP_ALL: Final = """
SET client_min_messages = warning;
DO $$ DECLARE one record; BEGIN
    FOR one IN SELECT tablename FROM pg_tables WHERE schemaname = current_schema() LOOP
        EXECUTE format('DROP TABLE %I CASCADE', one.tablename);
    END LOOP;
END $$;
"""
_IS_KNOWN: Final = """
DO $$ BEGIN
    IF (SELECT version_num FROM public.alembic_version) NOT IN ({}) THEN
        RAISE EXCEPTION 'its schema is newer than this program';
    END IF;
END $$;
"""


class BackupFailed(MokError):
    """A program that was needed isn't there, or it failed: the message has its words."""

    code = "backup_failed"


def backup(url: str, file: Path, *, force: bool = False) -> int:
    """Writes a backup of the database to a file with mode 0600; its size in bytes. The service may go on meanwhile.

    Raises Conflict for a file that exists unless `force`, NotFound where there is no database, Tampered for one that is damaged.
    """
    parsed = parse_url(url)
    if file.exists() and not force:
        raise Conflict(f"{file} exists; --force replaces it", file=str(file))
    with _whole(file) as partial:
        if parsed.get_backend_name() == "sqlite":
            _copy_sqlite(_database_file(parsed), partial)
        else:
            os.close(os.open(partial, os.O_WRONLY | os.O_CREAT, 0o600))
            _run(parsed, ["pg_dump", "--format=custom", "--no-owner", "--no-privileges", f"--file={partial}"])
    return file.stat().st_size


def restore(url: str, file: Path, *, force: bool = False) -> str:
    """Puts a backup in the place of the database; the revision of its schema. No service may use the database meanwhile.

    Raises Conflict where there is a database already unless `force`, InvalidSpec for a file that is no backup of this kind of
    database, SchemaMismatch for one that is newer than this program, Tampered for one that is damaged.
    """
    parsed = parse_url(url)
    kind = parsed.get_backend_name()
    found = _kind_of(file)
    if found != kind:
        what = "no backup" if found is None else _NAMES[found]
        raise InvalidSpec(f"{file} is {what}; allowed for this database: {_NAMES[kind]}", field="file", value=str(file))
    if kind == "sqlite":
        return _restore_sqlite(_database_file(parsed, wanted=False), file, force)
    return _restore_postgresql(url, file, force)


def revision_of(url: str) -> str | None:
    """The revision of the database's schema; None for an empty one. Raises SchemaMismatch for one that is newer."""
    database = Database(url, read_only=True)
    try:
        with database.read() as connection:
            return current_revision(connection)
    finally:
        database.close()


def _kind_of(file: Path) -> str | None:
    try:
        with file.open("rb") as opened:
            start = opened.read(16)
    except OSError as error:
        raise NotFound(f"{file} can't be read: {error.strerror}", file=str(file)) from None
    return "sqlite" if start == _SQLITE_MAGIC else "postgresql" if start.startswith(_POSTGRESQL_MAGIC) else None


@contextmanager
def _whole(file: Path) -> Iterator[Path]:
    """A path to write to, in the same folder; it becomes `file` once the block has ended well, and is on the disk then."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        yield partial
        _to_disk(partial)
        partial.replace(file)
        _to_disk(file.parent)
    finally:
        partial.unlink(missing_ok=True)


def _to_disk(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


# ---- SQLite ----------------------------------------------------------------------------------------------------------

def _database_file(url: URL, *, wanted: bool = True) -> Path:
    path = Path(str(url.database)).absolute()
    if wanted and not path.is_file():
        raise NotFound(f"there is no database {path}", database=str(path))
    return path


def _copy_sqlite(source: Path, target: Path) -> None:
    """A consistent copy, with what is still in the source's journal. Raises Tampered when source or copy is damaged."""
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    try:
        reader = sqlite3.connect(f"file:{_quoted(source)}?mode=ro", uri=True)
        with closing(reader) as old, closing(sqlite3.connect(target)) as new:
            old.backup(new)
            new.execute("PRAGMA journal_mode = DELETE")  # one file, whatever the source had beside it
            faults = [row[0] for row in new.execute("PRAGMA integrity_check")]
    except sqlite3.DatabaseError as error:
        raise Tampered(f"{source} is damaged: {error}", database=str(source)) from None
    if faults != ["ok"]:
        raise Tampered(f"{source} is damaged: {'; '.join(faults)[:_COMMENT_MAX]}", database=str(source))


def _quoted(path: Path) -> str:
    return str(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def _restore_sqlite(path: Path, file: Path, force: bool) -> str:
    refuse_network_file_system(path)
    if path.exists() and not force:
        raise Conflict(f"there is a database {path} already; --force replaces it", database=str(path))
    with _whole(path) as partial:
        _copy_sqlite(file.absolute(), partial)
        revision = revision_of(f"sqlite:///{partial}")
        if revision is None:
            raise InvalidSpec(f"{file} is an SQLite database of something else", field="file", value=str(file))
        _settle_journal(path)
    return revision


def _settle_journal(path: Path) -> None:
    """Nothing of the old database's journal may be taken for the new one's: it's written into the old file, or set aside."""
    try:
        with closing(sqlite3.connect(f"file:{_quoted(path)}?mode=rw", uri=True)) as old:
            old.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.DatabaseError:  # damaged, or absent
        pass
    for ending in ("-wal", "-shm"):
        beside = path.with_name(path.name + ending)
        if beside.exists():
            beside.replace(path.with_name(path.name + ".replaced" + ending))


# ---- PostgreSQL ------------------------------------------------------------------------------------------------------

def _restore_postgresql(url: str, file: Path, force: bool) -> str:
    database = Database(url)
    try:
        with database.read() as connection:
            tables = inspect(connection).get_table_names()
        if tables and not force:
            raise Conflict(f"the database has {len(tables)} tables already; --force replaces them", tables=len(tables))
        if b" public alembic_version " not in _run(database.url, ["pg_restore", "--list", str(file)], connect=False):
            raise InvalidSpec(f"{file} is a dump of something else", field="file", value=str(file))
        with tempfile.TemporaryDirectory(prefix="mok-restore-") as folder:
            scripts = [Path(folder) / name for name in ("before.sql", "dump.sql", "after.sql")]
            scripts[0].write_text(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK});{_DROP_ALL}")
            _run(database.url, ["pg_restore", "--no-owner", "--no-privileges", f"--file={scripts[1]}", str(file)], connect=False)
            scripts[2].write_text(_IS_KNOWN.format(", ".join(f"'{name}'" for name in sorted(known_revisions()))))
            _run(database.url, ["psql", "--no-psqlrc", "--quiet", "--single-transaction", "--set=ON_ERROR_STOP=1",
                                "--output=/dev/null", *(f"--file={script}" for script in scripts)])
    finally:
        database.close()
    revision = revision_of(url)
    assert revision is not None, "the dump has a revision"
    return revision


def _run(url: URL, command: Sequence[str], *, connect: bool = True) -> bytes:
    """What a program of PostgreSQL's prints. It gets the password in its environment, where other users can't see it.

    Raises BackupFailed with its words when it fails, or when there is no such program.
    """
    program = shutil.which(command[0])
    if program is None:
        raise BackupFailed(f"{command[0]} isn't on the PATH; install PostgreSQL's client programs, of the server's version or "
                           "newer", program=command[0])
    environment = {"PATH": os.defpath, "LC_ALL": "C", "HOME": os.environ.get("HOME", "/")}
    words = [program, *command[1:]]
    if connect:
        password, address = _address(url)
        environment |= {"PGPASSWORD": password} if password else {}
        words.append(f"--dbname={address}")
    done = subprocess.run(words, stdin=subprocess.DEVNULL, env=environment, capture_output=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split())[:_COMMENT_MAX]
        raise BackupFailed(f"{command[0]} failed: {said}", program=command[0], status=done.returncode)
    return done.stdout


def _address(url: URL) -> tuple[str, str]:
    """Password, and connection string without it."""
    from psycopg.conninfo import make_conninfo

    given: dict[str, Any] = {"host": url.host, "port": url.port, "user": url.username, "dbname": url.database, **url.query}
    return str(url.password or ""), make_conninfo("", **{name: value for name, value in given.items() if value is not None})

"""Migrations: they agree with the tables, wait for each other, and refuse what they don't know."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

from mok_service.db import session
from mok_service.db.session import Database, SchemaMismatch, check_schema, upgrade
from mok_service.db.tables import metadata
from mok_service.errors import InvalidSpec
from tests.databases import Clock

ROOT = Path(__file__).parents[2]
UPGRADE = """
import sys, alembic.command, psycopg
from mok_service.db.session import upgrade
print("ready", flush=True)
sys.stdin.readline()
upgrade(sys.argv[1])
print("done")
"""


def test_the_migrated_schema_is_that_of_the_tables(db: Database) -> None:
    with db.read() as tx:
        context = MigrationContext.configure(tx, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, metadata) == []


def test_every_owned_table_has_a_tenant() -> None:
    assert {name for name, table in metadata.tables.items() if "tenant" not in table.c} == {
        "nodes", "log_entries", "signing_keys", "queue_turns",
    }


def test_four_processes_upgrade_an_empty_database_at_once(empty_url: str) -> None:
    """Case 25: one migrates, the others wait, and all go on."""
    processes = [
        subprocess.Popen([sys.executable, "-c", UPGRADE, empty_url], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in processes:  # all have imported what they need before the first one may begin
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert (process.returncode, out) == (0, "done\n"), err
    database = Database(empty_url)
    check_schema(database)
    with database.read() as tx:
        assert tx.execute(text("SELECT count(*) FROM alembic_version")).scalar_one() == 1
    database.close()


def test_an_upgraded_database_is_left_alone(url: str) -> None:
    upgrade(url)
    upgrade(url)


def test_a_newer_schema_is_refused(empty_url: str) -> None:
    upgrade(empty_url)
    database = Database(empty_url)
    with database.write() as tx:
        tx.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(SchemaMismatch, match="schema 9999, which is newer than this program"):
        upgrade(empty_url)
    with pytest.raises(SchemaMismatch, match="9999"):
        check_schema(database)
    database.close()


def test_an_empty_database_is_refused_until_it_is_upgraded(empty_url: str) -> None:
    upgrade(empty_url)
    database = Database(empty_url)
    check_schema(database)
    with database.write() as tx:
        tx.execute(text("DROP TABLE alembic_version"))
    with pytest.raises(SchemaMismatch, match=r"schema none, and this program needs"):
        check_schema(database)
    database.close()


def test_the_migrations_can_be_undone(empty_url: str) -> None:
    upgrade(empty_url)
    database, config = Database(empty_url), session.alembic_config()
    with database.write() as tx:
        config.attributes["connection"] = tx
        command.downgrade(config, "base")
    with database.read() as tx:
        assert inspect(tx).get_table_names() == ["alembic_version"]
    database.close()


def test_a_failed_migration_leaves_nothing(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    migrate = session._migrate

    def fail_at_the_end(connection: object) -> None:
        migrate(connection)  # type: ignore[arg-type]
        raise RuntimeError("the power went")

    monkeypatch.setattr(session, "_migrate", fail_at_the_end)
    with pytest.raises(RuntimeError):
        upgrade(empty_url)
    database = Database(empty_url)
    with database.read() as tx:
        assert inspect(tx).get_table_names() == []
    database.close()
    monkeypatch.undo()
    upgrade(empty_url)


@pytest.mark.parametrize("url", ["", "sqlite://", "sqlite:///:memory:", "mysql://u:secret@h/x", "postgresql+asyncpg://u:secret@h/x"])
def test_a_url_that_cannot_be_used_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(InvalidSpec, match="allowed: sqlite:////absolute/path or postgresql://") as refused:
        Database(url)
    assert "secret" not in str(refused.value) + str(refused.value.detail)


@pytest.mark.parametrize("name", ["postgres", "postgresql", "postgresql+psycopg"])
def test_every_name_of_postgresql_means_psycopg(name: str) -> None:
    if name == "postgres":
        assert session.parse_url(f"{name}://u:p@h/x").drivername == "postgresql+psycopg"
    assert session.parse_url(f"{name}://u:p@h/x").get_backend_name() == "postgresql"


def test_sqlite_on_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mount:
        mountpoint, fstype = str(tmp_path), "nfs4"

    monkeypatch.setattr(session.psutil, "disk_partitions", lambda all: [Mount])
    with pytest.raises(InvalidSpec, match=r"network file system \(nfs4 at .*allowed: a local disk, or PostgreSQL"):
        Database(f"sqlite:///{tmp_path}/deeper/mok.db")


def test_a_database_opened_for_reading_writes_nothing(migrated_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "mok.db"
    copy.write_bytes(migrated_file.read_bytes())
    database = Database(f"sqlite:///{copy}", read_only=True)
    check_schema(database)
    with pytest.raises(AssertionError), database.write():
        pass
    database.close()
    with pytest.raises(Exception, match="unable to open"):
        check_schema(Database(f"sqlite:///{tmp_path}/absent.db", read_only=True))
    assert not (tmp_path / "absent.db").exists()


def test_the_clock_is_the_databases(url: str, kind: str, clock: Clock) -> None:
    database = Database(url)
    before = database.now()
    with database.read() as tx:
        if kind == "postgresql":
            at = tx.execute(text("SELECT clock_timestamp()")).scalar_one()
            assert before <= at
    assert before.utcoffset() is not None and before <= database.now()
    database.close()
    assert Database(url, clock=clock).now() == clock.now


def test_in_a_transaction_the_time_takes_no_other_connection(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database(url)
    with database.read() as tx:
        before = database.now()
        with monkeypatch.context() as patch:
            patch.setattr(database, "engine", None)
            first, second = database.now(tx), database.now(tx)
        assert before <= first <= second <= database.now()
        assert first < second or database.dialect == "sqlite", "not the transaction's time"
    database.close()

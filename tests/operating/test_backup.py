"""Backups: whole or not at all, restored only where that was meant, and checked against the database's own rules."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from mok_service import cli, jobs, runs
from mok_service.db import backup as backups
from mok_service.db.backup import BackupFailed, backup, restore, revision_of
from mok_service.db.session import Database, SchemaMismatch, upgrade
from mok_service.errors import Conflict, InvalidSpec, NotFound, Tampered
from mok_service.integrity import inspect
from mok_service.settings import Settings
from mok_service.spec import parse_job
from tests import databases
from tests.services import Worker, spec


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """PostgreSQL's own programs first on the PATH: those of the system may be older than the server."""
    if kind == "postgresql":
        monkeypatch.setenv("PATH", str(databases._binaries(tmp_path_factory.mktemp("bin"))), prepend=":")


@pytest.fixture
def filled(empty_url: str, tmp_path: Path, programs: None) -> Iterator[tuple[str, Settings]]:
    """A database with two runs that have ended, attested, and the settings of its service."""
    upgrade(empty_url)
    settings = Settings(data_dir=tmp_path / "data", database_url=empty_url)
    db = Database(empty_url)
    for seed in (1, 2):
        jobs.submit(db, parse_job(spec(seed=seed)))
        Worker(db, settings).work()
    Worker(db, settings).sign()
    db.close()
    yield empty_url, settings


def faults(url: str, settings: Settings) -> list[str]:
    db = Database(url, read_only=True)
    try:
        return [f"{fault.of}: {fault.message}" for fault in inspect(db, settings.checkpoints).faults]
    finally:
        db.close()


def everything(url: str) -> dict[str, list[Any]]:
    db = Database(url)
    try:
        with db.read() as tx:
            tables = ("runs", "step_records", "events", "log_entries", "attestations", "alembic_version")
            return {name: sorted(map(repr, tx.execute(text(f"SELECT * FROM {name}")).all())) for name in tables}
    finally:
        db.close()


def change(url: str, statement: str) -> None:
    db = Database(url)
    with db.write() as tx:
        tx.execute(text(statement))
    db.close()


def test_what_is_restored_is_what_was_backed_up(filled: tuple[str, Settings], tmp_path: Path, kind: str) -> None:
    url, settings = filled
    file, before = tmp_path / "kept" / "mok.backup", everything(url)
    assert backup(url, file) == file.stat().st_size and file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(Conflict, match="--force replaces it"):
        backup(url, file)
    change(url, "UPDATE runs SET message = 'later'")
    with pytest.raises(Conflict, match="already; --force replaces"):
        restore(url, file)
    assert everything(url) != before, "a refused restore changes nothing"
    assert restore(url, file, force=True) == revision_of(url)
    assert everything(url) == before and faults(url, settings) == []
    assert [path.name for path in file.parent.iterdir()] == ["mok.backup"], "nothing is left beside it"
    if kind == "sqlite":
        moved = f"sqlite:///{tmp_path}/elsewhere/mok.db"
        restore(moved, file)
        upgrade(moved)
        assert everything(moved) == before


def test_a_restore_that_fails_leaves_what_was_there(filled: tuple[str, Settings], tmp_path: Path) -> None:
    url, _ = filled
    good, bad = tmp_path / "good", tmp_path / "bad"
    backup(url, good)
    change(url, "UPDATE runs SET message = 'later'")
    before = everything(url)
    content = good.read_bytes()
    bad.write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises((Tampered, BackupFailed)):
        restore(url, bad, force=True)
    bad.write_bytes(b"something else altogether")
    with pytest.raises(InvalidSpec, match="is no backup; allowed for this database"):
        restore(url, bad, force=True)
    with pytest.raises(NotFound):
        restore(url, tmp_path / "absent", force=True)
    assert everything(url) == before


def test_a_backup_of_a_newer_version_is_refused(filled: tuple[str, Settings], tmp_path: Path) -> None:
    url, _ = filled
    change(url, "UPDATE alembic_version SET version_num = '9999'")
    backup(url, tmp_path / "newer")
    change(url, "UPDATE alembic_version SET version_num = '0001'")
    before = everything(url)
    with pytest.raises((SchemaMismatch, BackupFailed), match="newer than this program"):
        restore(url, tmp_path / "newer", force=True)
    assert everything(url) == before


def test_a_database_is_backed_up_while_somebody_writes(filled: tuple[str, Settings], tmp_path: Path) -> None:
    """What is committed is in it, also when it's only in the journal; what isn't, isn't."""
    url, _ = filled
    change(url, "UPDATE runs SET message = 'committed'")
    db = Database(url)
    with db.write() as tx:
        tx.execute(text("UPDATE runs SET message = 'open'"))
        backup(url, tmp_path / "meanwhile")
    db.close()
    restore(url, tmp_path / "meanwhile", force=True)
    db = Database(url)
    with db.read() as tx:
        assert set(tx.execute(text("SELECT message FROM runs")).scalars()) == {"committed"}
    db.close()


FAULTS = [
    ("DELETE FROM events WHERE number = 2", "its events should be numbered 1 to"),
    ("UPDATE runs SET event_count = event_count + 1", "its events should be numbered 1 to"),
    ("UPDATE step_records SET loss_bits = '3f800000' WHERE step = 2", "step record 2 hashes to"),
    ("DELETE FROM step_records WHERE step = 1", "step record 1 is missing"),
    ("DELETE FROM step_records WHERE step = 3", "its chain ends with step 2"),
    ("DELETE FROM step_records", "it names a last step and has no step record"),
    ("UPDATE runs SET head = weights", "the run says step 3 and head"),
    ("UPDATE attestations SET digest = (SELECT weights FROM runs LIMIT 1) WHERE log_index = 1", "and its attestation has"),
    ("UPDATE log_entries SET entry = (SELECT weights FROM runs LIMIT 1) WHERE log_index = 0", "don't make the tree"),
    ("UPDATE log_entries SET head = replace(head, '\"payload\":\"ey', '\"payload\":\"e2')", "the log's head"),
    ("UPDATE jobs SET seed = seed, training_digest = manifest_digest", "step record 0 links to"),
]


def test_the_check_finds(filled: tuple[str, Settings], tmp_path: Path, kind: str) -> None:
    url, settings = filled
    assert faults(url, settings) == []
    backup(url, tmp_path / "good")
    for statement, sentence in FAULTS if kind == "sqlite" else FAULTS[::4]:
        change(url, statement)
        found = faults(url, settings)
        assert any(sentence in fault for fault in found), (statement, found)
        restore(url, tmp_path / "good", force=True)
    assert faults(url, settings) == []


def test_the_check_looks_for_the_checkpoints_files(filled: tuple[str, Settings]) -> None:
    url, settings = filled
    db = Database(url)
    run = runs.list_runs(db).items[0].id
    db.close()
    folder = settings.checkpoints(run)
    (folder / "step-00000001" / "model.safetensors").unlink()
    with (folder / "step-00000002" / "optimizer.safetensors").open("ab") as file:
        file.write(b"!")
    found = faults(url, settings)
    assert len(found) == 2 and "isn't there" in found[0] and " bytes; on record are " in found[1]


@pytest.mark.parametrize("kind", ["sqlite"], indirect=True)
def test_a_damaged_file_is_not_backed_up_and_is_replaced(filled: tuple[str, Settings], tmp_path: Path) -> None:
    url, settings = filled
    path = Path(url.removeprefix("sqlite:///"))
    backup(url, tmp_path / "kept")
    before = everything(url)
    sqlite3.connect(path).execute("PRAGMA wal_checkpoint(TRUNCATE)").connection.close()
    with path.open("r+b") as file:
        for page in range(2, path.stat().st_size // 4096):
            file.seek(page * 4096)
            file.write(b"\xff" * 64)
    with pytest.raises(Tampered, match="is damaged"):
        backup(url, tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()
    path.with_name(path.name + "-wal").write_bytes(b"the journal of the damaged one")
    restore(url, tmp_path / "kept", force=True)
    assert everything(url) == before and faults(url, settings) == []


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_without_its_programs_the_message_names_them(empty_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackupFailed, match="pg_dump isn't on the PATH"):
        backup(empty_url, tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_a_password_is_not_among_a_programs_arguments() -> None:
    password, address = backups._address(backups.parse_url("postgresql://mok:hunter2@db:5433/mok?sslmode=require"))
    assert password == "hunter2" and address == "host=db port=5433 user=mok dbname=mok sslmode=require"


@pytest.mark.parametrize("kind", ["sqlite"], indirect=True)
def test_the_verbs(filled: tuple[str, Settings], tmp_path: Path, capsys: pytest.CaptureFixture[str],
                   monkeypatch: pytest.MonkeyPatch) -> None:
    from mok_workers.serve import lock_folder

    url, settings = filled
    monkeypatch.setenv("MOK_DATABASE_URL", url)

    def mok(*words: str) -> int:
        return cli.run(["db", *words, "--data-dir", str(settings.data_dir)])

    file = str(tmp_path / "kept")
    assert mok("check") == 0 and " 0 faults in 2 runs, 8 step records, 8 checkpoints, 2 entries" in capsys.readouterr().out
    assert mok("current") == 0 and mok("backup", file) == 0 and mok("backup", file) == 1 and mok("restore", file) == 1
    change(url, "DELETE FROM events WHERE number = 2")
    assert mok("check") == 4 and mok("restore", file, "--force") == 0 and mok("check") == 0
    capsys.readouterr()
    with lock_folder(settings.data_dir):
        assert mok("restore", file, "--force") == 1
        assert "in use by the service" in capsys.readouterr().err
    change(url, "UPDATE alembic_version SET version_num = '0001'")
    assert mok("current") == 1 and mok("check") == 1
    monkeypatch.setenv("MOK_DATABASE_URL", f"sqlite:///{tmp_path}/absent.db")
    assert mok("check") == 6 and mok("backup", file) == 6 and mok("current") == 6

"""Transactions: what is committed is durable, what fails leaves nothing, and readers never wait."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from mok_service import jobs, runs
from mok_service.db import ids
from mok_service.db.session import Database
from tests.databases import Clock
from tests.service.play import spec, submit

ROOT = Path(__file__).parents[2]
SUBMIT = """
import sys
from mok_service import jobs
from mok_service.db.session import Database
from tests.service.play import spec
db = Database(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print(len({jobs.submit(db, spec(name=str(number))).job.id for number in range(30)}))
"""


def test_a_failed_transaction_leaves_nothing(db: Database) -> None:
    with pytest.raises(RuntimeError), db.write() as tx:
        tx.execute(text("INSERT INTO nodes VALUES ('n', 'w', '{}', '{}', '2026-01-01 00:00:00')"))
        raise RuntimeError
    assert runs.nodes(db) == []


def test_who_waits_for_news_hears_of_what_was_committed_and_of_nothing_else(db: Database) -> None:
    heard: list[int] = []
    db.after_write.append(lambda: heard.append(len(runs.nodes(db))))
    insert = text("INSERT INTO nodes VALUES ('n', 'w', '{}', '{}', '2026-01-01 00:00:00')")
    with pytest.raises(RuntimeError), db.write() as tx:
        tx.execute(insert)
        raise RuntimeError
    with db.read() as tx:
        tx.execute(text("SELECT 1"))
    assert heard == []
    with db.write() as tx:
        tx.execute(insert)
        assert heard == []
    assert heard == [1], "it's committed by then, and can be read"


def test_readers_see_one_snapshot_while_others_write(db: Database, clock: Clock) -> None:
    submit(db, name="before")
    count = text("SELECT count(*) FROM jobs")
    with db.read() as tx:
        assert tx.execute(count).scalar_one() == 1
        writer = threading.Thread(target=submit, args=(db,), kwargs={"name": "meanwhile"})
        writer.start()
        writer.join(timeout=30)
        assert not writer.is_alive(), "a reader holds up no writer"
        assert tx.execute(count).scalar_one() == 1
    with db.read() as tx:
        assert tx.execute(count).scalar_one() == 2


def test_a_reader_cannot_write(db: Database, kind: str) -> None:
    if kind == "postgresql":
        with pytest.raises(Exception, match="read-only transaction"), db.read() as tx:
            tx.execute(text("DELETE FROM jobs"))
        submit(db)  # the connection went back to the pool as it was


def test_foreign_keys_hold(db: Database) -> None:
    submit(db)
    with pytest.raises(IntegrityError), db.write() as tx:
        tx.execute(text("DELETE FROM jobs"))
    assert len(jobs.list_jobs(db).items) == 1


def test_sqlite_is_set_up_to_lose_nothing(migrated_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "mok.db"
    copy.write_bytes(migrated_file.read_bytes())
    database = Database(f"sqlite:///{copy}")
    other = sqlite3.connect(copy, timeout=0, isolation_level=None)
    with database.write() as tx:
        settings = [tx.execute(text(f"PRAGMA {name}")).scalar_one() for name in ("journal_mode", "synchronous", "foreign_keys")]
        assert settings == ["wal", 2, 1]
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")  # the write lock is taken before anything is read
    other.execute("BEGIN IMMEDIATE")
    other.execute("ROLLBACK")
    other.close()
    database.close()


def test_several_processes_write_at_once(url: str) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", SUBMIT, url], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    outcomes = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        out, err = process.communicate(timeout=120)
        outcomes.append((process.returncode, out, err))
    assert outcomes == [(0, "30\n", "")] * 3
    database = Database(url)
    with database.read() as tx:
        assert tx.execute(text("SELECT count(*) FROM runs")).scalar_one() == 90
    database.close()


def test_ids_name_their_kind_and_sort_by_time() -> None:
    made = [ids.new_id("run") for _ in range(2000)]
    assert len(set(made)) == 2000 and all(ids.is_id(one, "run") and ids.is_id(one) for one in made)
    stamps = [one[4:16] for one in made]
    assert stamps == sorted(stamps)
    assert not ids.is_id(made[0], "job") and not ids.is_id(made[0] + "0") and not ids.is_id(made[0].upper())
    assert not ids.is_id(made[0][:16] + "4" + made[0][17:]), "only version 7"


def test_specs_come_back_equal(db: Database) -> None:
    asked = spec(seed=2**53 + 1)
    job = jobs.submit(db, asked).job
    assert jobs.get_job(db, job.id).training == job.training
    assert jobs.get_job(db, job.id).submitted == asked.model_dump(mode="json")

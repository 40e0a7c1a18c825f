"""Several pieces of work in one transaction: each as if alone, all or none on the disk."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import OperationalError

from mok_service import jobs, runs
from mok_service.db.session import Database
from mok_service.errors import Conflict, QuotaExceeded, Unrunnable
from mok_service.idempotency import Idempotency
from mok_service.provenance.digest import sha256
from tests.databases import Clock
from tests.service.play import spec, submit

ROW = text("INSERT INTO nodes VALUES (:name, 'w', '{}', '{}', '2026-01-01 00:00:00')")


@pytest.fixture
def kind() -> str:
    """The one with a single writer."""
    return "sqlite"


@pytest.fixture
def commits(db: Database) -> list[int]:
    """One item for each commit of a transaction that wrote."""
    made: list[int] = []

    @event.listens_for(db.engine, "commit")
    def committed(connection: Any) -> None:
        if connection.get_execution_options().get("mok_write"):
            made.append(1)

    return made


def inserts(db: Database, name: str, then: Callable[[Any], None] = lambda tx: None) -> str:
    with db.write() as tx:
        tx.execute(ROW, {"name": name})
        then(tx)
    return name


def fails(tx: Any) -> None:
    raise RuntimeError


def names(db: Database) -> list[str]:
    return [node.name for node in runs.nodes(db)]


def test_what_is_done_together_is_committed_once(db: Database, commits: list[int]) -> None:
    heard: list[int] = []
    db.after_write.append(lambda: heard.append(len(names(db))))
    results = db.together([partial(submit, db, name=str(number)) for number in range(5)] + [partial(inserts, db, "n")])
    assert len(jobs.list_jobs(db).items) == 5 and names(db) == ["n"]
    made = {result.job.id: result.job.training.name for result in results[:5]}  # type: ignore[attr-defined]
    assert list(made.values()) == ["0", "1", "2", "3", "4"]
    assert made == {job.id: job.training.name for job in jobs.list_jobs(db).items}, "ids of one millisecond have no order"
    assert len(commits) == 1 and heard == [1]


def test_who_fails_takes_back_its_own_and_nothing_else(db: Database) -> None:
    results = db.together([partial(inserts, db, "a"), partial(inserts, db, "b", fails), partial(inserts, db, "c")])
    assert results[0] == "a" and isinstance(results[1], RuntimeError) and results[2] == "c"
    assert names(db) == ["a", "c"]


def test_each_sees_what_those_before_it_wrote_and_others_see_nothing_yet(db: Database, url: str) -> None:
    other = Database(url)
    works: list[Callable[[], object]] = [partial(inserts, db, "a"), lambda: names(db), lambda: names(other)]
    assert db.together(works) == ["a", ["a"], []]
    assert names(other) == ["a"]
    other.close()


def test_a_quota_counts_those_of_the_same_transaction(db: Database) -> None:
    runs.set_quota(db, "local", {"queued_max": 2})
    results = db.together([partial(submit, db, name=str(number)) for number in range(4)])
    assert [isinstance(result, QuotaExceeded) for result in results] == [False, False, True, True]
    assert len(jobs.list_jobs(db).items) == 2


def test_a_key_that_comes_twice_is_carried_out_once(db: Database) -> None:
    def with_key(body: bytes, **training: Any) -> jobs.Submitted:
        return jobs.submit(db, spec(**training), idempotency=Idempotency("POST /v1/jobs", "k", sha256(body)))

    first, again, other = db.together([partial(with_key, b"1", name="one"), partial(with_key, b"1", name="one"),
                                       partial(with_key, b"2", name="two")])
    assert isinstance(first, jobs.Submitted) and isinstance(again, jobs.Submitted) and isinstance(other, Conflict)
    assert (first.created, again.created) == (True, False) and first.job.id == again.job.id
    assert len(jobs.list_jobs(db).items) == 1


def test_nothing_has_happened_if_the_commit_fails(db: Database, commits: list[int]) -> None:
    def broken(connection: Any) -> None:
        if connection.get_execution_options().get("mok_write"):
            raise OperationalError("COMMIT", None, Exception("disk I/O error"))

    heard: list[int] = []
    db.after_write.append(lambda: heard.append(1))
    event.listen(db.engine, "commit", broken)
    results = db.together([partial(inserts, db, "a"), partial(inserts, db, "b", fails), partial(inserts, db, "c")])
    event.remove(db.engine, "commit", broken)
    assert [type(result) for result in results] == [OperationalError, RuntimeError, OperationalError]
    assert names(db) == [] and not heard
    assert db.together([partial(inserts, db, "a")]) == ["a"], "the next one finds everything in order"


def test_nothing_has_happened_if_the_database_gives_up_in_the_middle(db: Database, commits: list[int]) -> None:
    """As SQLite does by itself when the disk is full."""
    def full(tx: Any) -> None:
        tx.connection.driver_connection.execute("ROLLBACK")
        raise OperationalError("INSERT", None, Exception("database or disk is full"))

    results = db.together([partial(inserts, db, "a"), partial(inserts, db, "b", full), partial(inserts, db, "c")])
    assert [type(result) for result in results] == [OperationalError] * 3
    assert names(db) == [] and not commits
    assert inserts(db, "a") == "a" and names(db) == ["a"]


def test_what_is_refused_waits_for_no_writer(db: Database, clock: Clock) -> None:
    def refused() -> None:
        raise Unrunnable("never", field="x")

    with db.write() as tx:
        tx.execute(ROW, {"name": "a"})
        results: list[object] = []
        thread = threading.Thread(target=lambda: results.extend(db.together([refused, lambda: names(db)])))
        thread.start()
        thread.join(30)
        assert not thread.is_alive() and isinstance(results[0], Unrunnable) and results[1] == []

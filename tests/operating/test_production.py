"""The production form from its real programs: two API processes, two schedulers, one Ray cluster, PostgreSQL."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from sqlalchemy import text

from mok_service import runs
from mok_service.db.session import Database, alembic_config, check_schema
from mok_service.integrity import inspect
from mok_service.settings import Settings
from tests.databases import Server
from tests.operating.installation import Installation, api, ended, get, job, submit, until


@pytest.fixture(scope="module")
def production(postgresql: Server) -> Iterator[Installation]:
    """One installation for these tests: its cluster has a single device, for which two schedulers compete."""
    name = f"mok_{uuid.uuid4().hex}"
    postgresql.run(f"CREATE DATABASE {name}")
    folder = Path(tempfile.mkdtemp(prefix="mok-op-", dir="/tmp"))
    try:
        with Installation(folder, postgresql.database(name), apis=2, schedulers=2, cpus=1) as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        postgresql.run(f"DROP DATABASE {name} WITH (FORCE)")


def attempts(production: Installation, run_ids: list[str]) -> list[Any]:
    db = Database(production.database_url)
    try:
        return sorted((one for run in run_ids for one in runs.attempts(db, run)), key=lambda one: one.claimed_at)
    finally:
        db.close()


def test_two_schedulers_share_one_device_and_one_dies_in_the_middle(production: Installation) -> None:
    """Cases 15 and 16: never more than one attempt holds the device; what a killed scheduler ran, the other one goes on with."""
    first, second = (api.url for api in production.apis)
    run_ids = [submit(url, job(0)) for url in (first, second)]  # the same job twice
    long = submit(first, job(100, steps=500, checkpoint_interval=50))
    small = ended(second, run_ids)
    assert [(run["status"], run["message"]) for run in small] == [("succeeded", None)] * 2
    assert small[0]["weights"] == small[1]["weights"]

    running = until(lambda: (run := get(second, f"/v1/runs/{long}"))["step"] and run, "the long run trains")
    holder = next(s for s in production.schedulers if str(s.folder / s.name) in running["worker"])
    other = next(s for s in production.schedulers if s is not holder)
    holder.kill()
    production.apis[0].program.kill()
    whole = ended(second, [long])[0]
    assert (whole["status"], whole["step"], whole["message"]) == ("succeeded", 500, None)

    found = attempts(production, [*run_ids, long])
    for before, after in itertools.pairwise(found):
        assert before.ended_at is not None and after.claimed_at >= before.ended_at, "two attempts had the device at once"
    lost, last = attempts(production, [long])
    assert (lost.end, last.end) == ("lease_expired", "finished") and str(other.folder / other.name) in last.worker
    assert isinstance(last.from_step, int) and last.from_step > 0
    db = Database(production.database_url)
    settings = Settings(data_dir=production.folder / "api-0", checkpoint_dir=production.folder / "checkpoints")
    until(lambda: not runs.unattested(db), "every run is attested")
    assert inspect(db, settings.checkpoints).faults == []
    db.close()


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
@pytest.mark.parametrize("old", [False, True], ids=["empty", "old"])
def test_four_apis_at_once_migrate_once_and_all_serve(empty_url: str, tmp_path: Path, old: bool) -> None:
    """Case 25, with real API processes."""
    if old:
        database, config = Database(empty_url), alembic_config()
        with database.write() as tx:
            config.attributes["connection"] = tx
            command.upgrade(config, "0001")
        database.close()
    apis = [api(tmp_path, f"api-{number}", MOK_DATABASE_URL=empty_url) for number in range(4)]
    try:
        for one in apis:
            one.start()
        for one in apis:
            one.ready()
            assert get(one.url, "/v1/runs")["items"] == []
    finally:
        for one in apis:
            assert one.program.stop() == 0
    database = Database(empty_url)
    check_schema(database)
    with database.read() as tx:
        assert tx.execute(text("SELECT count(*) FROM alembic_version")).scalar_one() == 1
    database.close()

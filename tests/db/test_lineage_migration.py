"""Migration 0006 fills its tables and columns from what is there: as if the rows had been written by this version."""

from __future__ import annotations

from typing import Any

from alembic import command
from sqlalchemy import select

from mok_service import jobs
from mok_service.db import session, tables
from mok_service.db.session import Database, upgrade
from mok_service.spec import parse_job
from tests.databases import Clock
from tests.service import play


def filled(db: Database) -> dict[str, Any]:
    columns = [tables.runs.c[name] for name in ("id", "name", "seed", "model", "init_run", "init_weights")]
    with db.read() as tx:
        found = {"runs": sorted(map(tuple, tx.execute(select(*columns))))}
        for table in (tables.digest_uses, tables.manifest_files):
            found[table.name] = sorted(map(tuple, tx.execute(select(table))))
        return found


def test_rows_of_before_are_filled_in(empty_url: str, clock: Clock) -> None:
    upgrade(empty_url)
    db, config = Database(empty_url, clock=clock), session.alembic_config()
    job, run = play.trained(db, clock)
    jobs.create_run(db, job.id)
    play.succeed(db, play.start(db, clock), clock, play.records(job))
    tiny = play.spec(name="tiny", seed=2**63 - 1).model_dump()
    tiny["training"] |= {"model": {"preset": "tiny"}, "init_from": {"source": f"{run.id}@4"}, "batch": {"sequences": 2}}
    jobs.submit(db, parse_job(tiny))
    before = filled(db)
    assert len(before["runs"]) == 3 and len(before["digest_uses"]) == 6 and len(before["manifest_files"]) == 2
    assert [row[1:4] for row in before["runs"] if row[4]] == [("tiny", 2**63 - 1, "tiny")]
    with db.write() as tx:
        config.attributes["connection"] = tx
        command.downgrade(config, "0005")
    upgrade(empty_url)
    assert filled(db) == before
    db.close()

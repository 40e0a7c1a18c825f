"""Reads whole tables for the check of a database. Rows come in pieces: a database may be larger than the memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from sqlalchemy import Connection, Executable, func, or_, select, text

from mok_service.db.tables import (
    attestations,
    checkpoints,
    events,
    jobs,
    log_entries,
    runs,
    signing_keys,
    step_records,
    verification_attestations,
)

Row = dict[str, Any]
ROWS_A_PIECE: Final = 1000
FAULTS_MAX: Final = 100


def sqlite_faults(tx: Connection) -> list[str]:
    """What SQLite itself says about the file: damaged pages and indexes, rows that name rows that aren't there."""
    faults = [str(row[0]) for row in tx.execute(text(f"PRAGMA integrity_check({FAULTS_MAX})")) if row[0] != "ok"]
    for table, rowid, parent, _ in tx.execute(text("PRAGMA foreign_key_check")).fetchmany(FAULTS_MAX):
        faults.append(f"row {rowid} of {table} names a row of {parent} that isn't there")
    return faults


def counted_events(tx: Connection) -> Iterator[Row]:
    """Runs whose events aren't numbered 1 to `event_count`: each with how many there are, and the first and last number."""
    t = events
    numbers = (func.count().label("found"), func.min(t.c.number).label("first"), func.max(t.c.number).label("last"))
    found = select(t.c.run_id, *numbers).group_by(t.c.run_id).subquery()
    query = select(runs.c.id, runs.c.event_count, found.c.found, found.c.first, found.c.last).outerjoin(
        found, found.c.run_id == runs.c.id)
    wrong = or_(func.coalesce(found.c.found, 0) != runs.c.event_count, found.c.first != 1, found.c.last != runs.c.event_count)
    return _pieces(tx, query.where(wrong).order_by(runs.c.id))


def chained_records(tx: Connection) -> Iterator[Row]:
    """The step records of every run with a chain of its own (an audit has none), by run and step."""
    query = select(step_records).join(runs, runs.c.id == step_records.c.run_id).join(jobs, jobs.c.id == runs.c.job_id)
    return _pieces(tx, query.where(runs.c.kind != "audit").order_by(step_records.c.run_id, step_records.c.step))


def chain_facts(tx: Connection, run_id: str) -> Row:
    """What a run and its job say of the run's chain: `step`, `head`, `training_digest`, `manifest_digest`, `training`. The run is
    one of `chained_records`."""
    told = (runs.c.step, runs.c.head, jobs.c.training_digest, jobs.c.manifest_digest, jobs.c.training)
    query = select(*told).join(jobs, jobs.c.id == runs.c.job_id).where(runs.c.id == run_id)
    return {str(name): value for name, value in tx.execute(query).mappings().one().items()}


def runs_without_records(tx: Connection) -> Iterator[Row]:
    """Runs that name a last step and have no record."""
    some = select(step_records.c.run_id).where(step_records.c.run_id == runs.c.id).exists()
    return _pieces(tx, select(runs.c.id).where(runs.c.step.is_not(None), ~some).order_by(runs.c.id))


def kept_checkpoints(tx: Connection) -> Iterator[Row]:
    """The checkpoints whose files are to be there."""
    t = checkpoints
    return _pieces(tx, select(t).where(t.c.deleted_at.is_(None)).order_by(t.c.run_id, t.c.step))


def whole_log(tx: Connection) -> Iterator[Row]:
    """The log's entries in order, each with the digest that its attestation has (`attested`; None: there is no attestation)."""
    t, one, other = log_entries, attestations, verification_attestations
    attested = func.coalesce(one.c.digest, other.c.digest).label("attested")
    query = select(t, attested).outerjoin(one, one.c.log_index == t.c.log_index)
    return _pieces(tx, query.outerjoin(other, other.c.log_index == t.c.log_index).order_by(t.c.log_index))


def public_pems(tx: Connection) -> list[str]:
    return list(tx.execute(select(signing_keys.c.pem).order_by(signing_keys.c.id)).scalars())


def _pieces(tx: Connection, query: Executable) -> Iterator[Row]:
    for row in tx.execute(query.execution_options(yield_per=ROWS_A_PIECE)).mappings():
        yield {str(name): value for name, value in row.items()}

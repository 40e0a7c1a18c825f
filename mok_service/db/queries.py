"""All SQL. Functions take the connection of an open transaction, and return rows as mappings or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import (
    Connection,
    Executable,
    Select,
    Table,
    bindparam,
    func,
    literal,
    or_,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from mok_service.db.session import CLAIM_LOCK, LOG_LOCK
from mok_service.db.tables import (
    RUN_TO_ATTEST,
    VERDICT_TO_ATTEST,
    attempts,
    attestations,
    checkpoints,
    events,
    idempotency_keys,
    jobs,
    log_entries,
    logs,
    nodes,
    runs,
    signing_keys,
    step_records,
    verification_attestations,
    verifications,
)
from mok_service.provenance.digest import Digest

Key = tuple[datetime, str]  # created_at and id: the order of every list
Row = dict[str, Any]
Values = Mapping[str, Any]


# ---- Any table -------------------------------------------------------------------------------------------------------

def one_row(tx: Connection, query: Executable, values: Values | None = None) -> Row | None:
    """The one row, if there is one. `values` are those of the query's `bindparam`s: a query that is made once, and not for each
    call, costs a third."""
    row = tx.execute(query, values).mappings().one_or_none()
    return None if row is None else {str(name): value for name, value in row.items()}


def all_rows(tx: Connection, query: Executable, values: Values | None = None) -> list[Row]:
    return [{str(name): value for name, value in row.items()} for row in tx.execute(query, values).mappings()]


def add(tx: Connection, table: Table, rows: Sequence[Values]) -> None:
    """Inserts rows, all with the same keys."""
    if rows:
        tx.execute(_insert(tx.dialect.name, table), [dict(row) for row in rows])


def insert_or(tx: Connection, table: Table) -> postgresql.Insert | sqlite.Insert:
    """An INSERT that may say what is to be done where the key is there: both databases say it in the same words."""
    return _insert(tx.dialect.name, table)


@cache
def _insert(dialect: str, table: Table) -> postgresql.Insert | sqlite.Insert:
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)


def put(tx: Connection, table: Table, key: str, values: Values) -> None:
    """Inserts a row, or changes the one that has its key."""
    tx.execute(_put(tx.dialect.name, table, key, tuple(values)), dict(values))


@cache
def _put(dialect: str, table: Table, key: str, columns: tuple[str, ...]) -> Executable:
    inserted = _insert(dialect, table)
    changed = {name: inserted.excluded[name] for name in columns if name != key}
    return inserted.on_conflict_do_update(index_elements=[key], set_=changed)


def add_unless_there(tx: Connection, table: Table, rows: Sequence[Values]) -> None:
    """Inserts rows, all with the same keys; those that are there already stay as they are."""
    if rows:
        tx.execute(insert_or(tx, table).on_conflict_do_nothing(), [dict(row) for row in rows])


def insert_unless_there(tx: Connection, table: Table, values: Values) -> bool:
    """Inserts a row; False when one with its primary key is there. Waits for a concurrent insert of that key."""
    statement = insert_or(tx, table).on_conflict_do_nothing().returning(literal(1))
    return tx.execute(statement, dict(values)).first() is not None  # psycopg counts no rows of an INSERT


def page(tx: Connection, query: Select[Any], table: Table, after: Key | None, limit: int) -> list[Row]:
    """Up to limit + 1 rows, newest first, after a key: the one too many tells that there is a next page."""
    order = tuple_(table.c.created_at, table.c.id)
    if after is not None:
        query = query.where(order < tuple_(*after))
    return all_rows(tx, query.order_by(table.c.created_at.desc(), table.c.id.desc()).limit(limit + 1))


@cache
def _of(table: Table, columns: tuple[str, ...], lock: bool) -> Executable:
    """The rows whose columns have the values of that name. Locked FOR NO KEY UPDATE: inserting rows that refer to one waits for
    nobody."""
    query = select(table).where(*(table.c[name] == bindparam(name) for name in columns))
    return query.with_for_update(key_share=True) if lock else query


def _given(**values: Any) -> Row:
    return {name: value for name, value in values.items() if value is not None}


# ---- Jobs ------------------------------------------------------------------------------------------------------------

def job(tx: Connection, job_id: str, tenant: str | None = None, lock: bool = False) -> Row | None:
    given = _given(id=job_id, tenant=tenant)
    return one_row(tx, _of(jobs, tuple(given), lock), given)


def job_page(tx: Connection, tenant: str, after: Key | None, limit: int, name: str | None,
             digest: Digest | None) -> list[Row]:
    query = select(jobs).where(jobs.c.tenant == tenant)
    if name is not None:
        query = query.where(jobs.c.name == name)
    if digest is not None:
        query = query.where(or_(jobs.c.training_digest == digest, jobs.c.manifest_digest == digest))
    return page(tx, query, jobs, after, limit)


def update_job(tx: Connection, job_id: str, values: Values) -> None:
    tx.execute(update(jobs).where(jobs.c.id == job_id).values(**values))


_IDEMPOTENCY_KEY = select(idempotency_keys).where(
    idempotency_keys.c.tenant == bindparam("tenant"), idempotency_keys.c.route == bindparam("route"),
    idempotency_keys.c.key == bindparam("key"))


def idempotency_key(tx: Connection, tenant: str, route: str, key: str) -> Row | None:
    return one_row(tx, _IDEMPOTENCY_KEY, {"tenant": tenant, "route": route, "key": key})


# ---- Runs ------------------------------------------------------------------------------------------------------------

def run(tx: Connection, run_id: str, tenant: str | None = None) -> Row | None:
    given = _given(id=run_id, tenant=tenant)
    return one_row(tx, _of(runs, tuple(given), False), given)


def lock_run(tx: Connection, run_id: str, tenant: str | None = None, token: str | None = None) -> Row | None:
    """The run under its row lock, if it belongs to the tenant and its lease has this token."""
    given = _given(id=run_id, tenant=tenant, lease_token=token)
    return one_row(tx, _of(runs, tuple(given), True), given)


_UPDATE_RUN = update(runs).where(runs.c.id == bindparam("of"))


def update_run(tx: Connection, run_id: str, values: Values) -> None:
    tx.execute(_UPDATE_RUN, {"of": run_id, **values})


def run_counts(tx: Connection) -> dict[str, int]:
    """How many runs there are of each status that occurs."""
    return {status: count for status, count in tx.execute(select(runs.c.status, func.count()).group_by(runs.c.status))}


def runs_of_job(tx: Connection, job_id: str) -> list[Row]:
    """The oldest first."""
    query = select(runs).where(runs.c.job_id == job_id).order_by(runs.c.created_at, runs.c.id)
    return all_rows(tx, query)


# ---- Queue and leases ------------------------------------------------------------------------------------------------

def lock_claims(tx: Connection) -> None:
    """One claim at a time, so that what the active runs occupy can't change under it but by getting less."""
    if tx.dialect.name == "postgresql":
        tx.execute(select(func.pg_advisory_xact_lock(CLAIM_LOCK)))


_CANDIDATE = select(runs).where(
    runs.c.id == bindparam("of"), runs.c.status == "queued", or_(runs.c.retry_at.is_(None), runs.c.retry_at <= bindparam("now")),
).with_for_update(key_share=True, skip_locked=True)


def lock_candidate(tx: Connection, run_id: str, now: datetime) -> Row | None:
    """The run, locked, if it may be claimed and nobody else holds it."""
    return one_row(tx, _CANDIDATE, {"of": run_id, "now": now})


_RENEW_LEASE = update(runs).where(runs.c.id == bindparam("of"), runs.c.lease_token == bindparam("token")).returning(
    runs.c.status, runs.c.stop_reason)


def renew_lease(tx: Connection, run_id: str, token: str, expires_at: datetime) -> Row | None:
    """Prolongs a lease; status and stop reason of its run, or None when the run is no longer this lease's."""
    return one_row(tx, _RENEW_LEASE, {"of": run_id, "token": token, "lease_expires_at": expires_at})


def leases_of_other_boots(tx: Connection, boot_id: str, worker: str | None) -> list[Row]:
    """Run and token of each lease that another boot took."""
    query = select(runs.c.id, runs.c.lease_token).where(runs.c.lease_token.is_not(None), runs.c.lease_boot != boot_id)
    if worker is not None:
        query = query.where(runs.c.lease_worker == worker)
    return all_rows(tx, query.order_by(runs.c.id))


# ---- What belongs to a run -------------------------------------------------------------------------------------------

def attempt(tx: Connection, run_id: str, number: int) -> Row | None:
    return one_row(tx, _of(attempts, ("run_id", "attempt"), False), {"run_id": run_id, "attempt": number})


def attempts_of(tx: Connection, run_id: str) -> list[Row]:
    return all_rows(tx, select(attempts).where(attempts.c.run_id == run_id).order_by(attempts.c.attempt))


def has_read_data(tx: Connection, run_id: str) -> bool:
    """Whether an attempt of the run was ready to step."""
    query = select(attempts.c.attempt).where(attempts.c.run_id == run_id, attempts.c.running_at.is_not(None))
    return tx.execute(query.limit(1)).first() is not None


_UPDATE_ATTEMPT = update(attempts).where(attempts.c.run_id == bindparam("of"), attempts.c.attempt == bindparam("number"))


def update_attempt(tx: Connection, run_id: str, number: int, values: Values) -> None:
    tx.execute(_UPDATE_ATTEMPT, {"of": run_id, "number": number, **values})


_STEPS = select(step_records).where(step_records.c.run_id == bindparam("run")).order_by(step_records.c.step)
_STEPS_BETWEEN = _STEPS.where(step_records.c.step.between(bindparam("first"), bindparam("last")))
_STEPS_AT = _STEPS.where(step_records.c.step.in_(bindparam("steps", expanding=True)))


def steps_between(tx: Connection, run_id: str, first: int, last: int) -> list[Row]:
    """The step records `first` to `last`, both included."""
    return all_rows(tx, _STEPS_BETWEEN, {"run": run_id, "first": first, "last": last})


def steps_at(tx: Connection, run_id: str, steps: Sequence[int]) -> list[Row]:
    """The step records of these steps, as far as they are there."""
    return all_rows(tx, _STEPS_AT, {"run": run_id, "steps": list(steps)})


def steps_after(tx: Connection, run_id: str, after: int, limit: int | None) -> list[Row]:
    t = step_records
    query = select(t).where(t.c.run_id == run_id, t.c.step > after).order_by(t.c.step).limit(limit)
    return all_rows(tx, query)


def checkpoint(tx: Connection, run_id: str, step: int) -> Row | None:
    return one_row(tx, _of(checkpoints, ("run_id", "step"), False), {"run_id": run_id, "step": step})


def checkpoints_of(tx: Connection, run_id: str) -> list[Row]:
    return all_rows(tx, select(checkpoints).where(checkpoints.c.run_id == run_id).order_by(checkpoints.c.step))


def update_checkpoint(tx: Connection, run_id: str, step: int, values: Values) -> None:
    tx.execute(update(checkpoints).where(checkpoints.c.run_id == run_id, checkpoints.c.step == step).values(**values))


def events_after(tx: Connection, run_id: str, after: int, limit: int) -> list[Row]:
    query = select(events).where(events.c.run_id == run_id, events.c.number > after).order_by(events.c.number).limit(limit)
    return all_rows(tx, query)


def logs_after(tx: Connection, run_id: str, after: int, limit: int) -> list[Row]:
    query = select(logs).where(logs.c.run_id == run_id, logs.c.number > after).order_by(logs.c.number).limit(limit)
    return all_rows(tx, query)


def last_log_sequence(tx: Connection, run_id: str, number: int) -> int | None:
    """The number, in its attempt, of the last log line stored of an attempt."""
    query = select(func.max(logs.c.sequence)).where(logs.c.run_id == run_id, logs.c.attempt == number)
    last: int | None = tx.execute(query).scalar_one()
    return last


def verifications_of(tx: Connection, run_id: str) -> list[Row]:
    """Verifications of the run, bisects that compare another one with it, and the one that it carries out."""
    t = verifications
    concerns = or_(t.c.run_id == run_id, t.c.against == run_id, t.c.executed_by == run_id)
    return all_rows(tx, _with_executor().where(concerns).order_by(t.c.created_at, t.c.id))


def verification_by(tx: Connection, run_id: str) -> Row | None:
    """The verification that a run carries out."""
    return one_row(tx, select(verifications).where(verifications.c.executed_by == run_id))


def update_verification(tx: Connection, verification_id: str, values: Values) -> None:
    tx.execute(update(verifications).where(verifications.c.id == verification_id).values(**values))


def _with_executor() -> Select[Any]:
    """Verifications, each with how far the run that carries it out has come."""
    told = (runs.c.status.label("run_status"), runs.c.stop_reason.label("run_stop_reason"), runs.c.step.label("run_step"),
            runs.c.steps.label("run_steps"))
    return select(verifications, *told).outerjoin(runs, runs.c.id == verifications.c.executed_by)


def verification(tx: Connection, verification_id: str, tenant: str) -> Row | None:
    t = verifications
    return one_row(tx, _with_executor().where(t.c.id == verification_id, t.c.tenant == tenant))


# ---- Attestations and their log --------------------------------------------------------------------------------------

def unattested_runs(tx: Connection, limit: int) -> list[Row]:
    """Id and tenant of runs that have ended and have no attestation; the first that ended comes first."""
    query = select(runs.c.id, runs.c.tenant).where(text(RUN_TO_ATTEST))
    return all_rows(tx, query.order_by(runs.c.ended_at, runs.c.id).limit(limit))


def unattested_verifications(tx: Connection, limit: int) -> list[Row]:
    """Id and tenant of audits, reruns and bisects with a verdict that isn't attested; the first that ended comes first."""
    t = verifications
    query = select(t.c.id, t.c.tenant).where(text(VERDICT_TO_ATTEST))
    return all_rows(tx, query.order_by(t.c.ended_at, t.c.id).limit(limit))


def lock_log(tx: Connection) -> Row | None:
    """The log's last entry. Until the transaction ends nobody else appends."""
    if tx.dialect.name == "postgresql":
        tx.execute(select(func.pg_advisory_xact_lock(LOG_LOCK)))
    return last_log_entry(tx)


def last_log_entry(tx: Connection) -> Row | None:
    return one_row(tx, select(log_entries).order_by(log_entries.c.log_index.desc()).limit(1))


def log_entries_at(tx: Connection, indices: Sequence[int]) -> dict[int, Row]:
    """Entry and frontier of these indices, as far as they are there."""
    query = select(log_entries.c.log_index, log_entries.c.entry, log_entries.c.frontier)
    return {row["log_index"]: row for row in all_rows(tx, query.where(log_entries.c.log_index.in_(indices)))}


def log_entries_after(tx: Connection, after: int, limit: int) -> list[Row]:
    """Index, entry, time, and the run (or the verification, and its run) and key of its attestation."""
    entries, attested, verdicts, t = log_entries, attestations, verification_attestations, verifications
    query = select(
        entries.c.log_index, entries.c.entry, entries.c.created_at, verdicts.c.verification_id,
        func.coalesce(attested.c.run_id, t.c.run_id).label("run_id"),
        func.coalesce(attested.c.key_id, verdicts.c.key_id).label("key_id"),
        func.coalesce(attested.c.tenant, verdicts.c.tenant).label("tenant"),
    ).select_from(
        entries.outerjoin(attested, attested.c.log_index == entries.c.log_index)
        .outerjoin(verdicts, verdicts.c.log_index == entries.c.log_index)
        .outerjoin(t, t.c.id == verdicts.c.verification_id)
    )
    return all_rows(tx, query.where(entries.c.log_index > after).order_by(entries.c.log_index).limit(limit))


def attestation_of(tx: Connection, run_id: str) -> Row | None:
    return one_row(tx, select(attestations).where(attestations.c.run_id == run_id))


def attestation_of_verification(tx: Connection, verification_id: str) -> Row | None:
    t = verification_attestations
    return one_row(tx, select(t).where(t.c.verification_id == verification_id))


def public_keys(tx: Connection) -> list[Row]:
    return all_rows(tx, select(signing_keys).order_by(signing_keys.c.created_at, signing_keys.c.id))


# ---- Nodes -----------------------------------------------------------------------------------------------------------

_ALL_NODES = select(nodes).order_by(nodes.c.name)


def all_nodes(tx: Connection) -> list[Row]:
    return all_rows(tx, _ALL_NODES)


_UNSEEN = nodes.delete().where(nodes.c.worker == bindparam("of"), nodes.c.name.not_in(bindparam("seen", expanding=True)))


def replace_nodes(tx: Connection, worker: str, rows: Sequence[Values]) -> None:
    """The nodes that a scheduler sees: stored by name, and the ones that it saw before and no longer sees are removed."""
    tx.execute(_UNSEEN, {"of": worker, "seen": [row["name"] for row in rows]})
    for row in sorted(rows, key=lambda row: str(row["name"])):
        put(tx, nodes, "name", row)


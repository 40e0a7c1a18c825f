"""The SQL of the queue: what waits, what is active, quotas and shares.

Conditions that choose a partial index are literal words: SQLite doesn't see that a bound value is the one in the index.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import Connection, and_, bindparam, func, select, text, tuple_, union_all

from mok_service.db.queries import Row, Values, all_rows, one_row, put
from mok_service.db.tables import attempts, checkpoints, jobs, queue_turns, quotas, runs, shares

OF_A_GROUP_MAX: Final = 16   # runs of one tenant, device and priority that a claim looks at
ROWS_MAX: Final = 64         # runs that are read at a time

IS_QUEUED: Final = text("runs.status = 'queued'")
HAS_LEASE: Final = text("runs.lease_token IS NOT NULL")
HAS_RUN_DEADLINE: Final = text("runs.run_deadline_at IS NOT NULL")
_NEVER: Final = datetime(9999, 12, 31, tzinfo=UTC)
_GROUP: Final = (runs.c.tenant, runs.c.device, runs.c.queue_rank)
_WAITING: Final = (runs.c.id, runs.c.tenant, runs.c.device, runs.c.queue_rank, runs.c.execution, runs.c.created_at,
                   runs.c.queue_deadline_at, runs.c.run_deadline_at, runs.c.retry_at)
_FRONT: Final = select(*_WAITING).where(IS_QUEUED).order_by(*_GROUP, runs.c.created_at, runs.c.id).limit(ROWS_MAX)
_FRONT_DUE: Final = _FRONT.where((runs.c.retry_at.is_(None)) | (runs.c.retry_at <= bindparam("now")))


def waiting_runs(tx: Connection, now: datetime | None) -> list[Row]:
    """The first queued runs of each tenant, device and priority: the oldest OF_A_GROUP_MAX; with `now`, without those whose
    retry isn't due. How many rows are read depends on the number of groups, not on that of queued runs."""
    found: list[Row] = []
    after: tuple[Any, ...] | None = None
    front, values = (_FRONT, {}) if now is None else (_FRONT_DUE, {"now": now})
    while True:
        query = front
        if after is not None:
            query = front.where(tuple_(*_GROUP, runs.c.created_at) > tuple_(*after, _NEVER))  # a seek past the group
        rows = all_rows(tx, query, values)
        in_group: dict[tuple[Any, ...], int] = {}
        for row in rows:
            group = tuple(row[column.name] for column in _GROUP)
            in_group[group] = in_group.get(group, 0) + 1
            if in_group[group] <= OF_A_GROUP_MAX:
                found.append(row)
        if len(rows) < ROWS_MAX:
            return found
        last = next(reversed(in_group))
        if in_group[last] < OF_A_GROUP_MAX and len(in_group) > 1:  # cut off: the next round reads this group from its beginning
            found = found[:-in_group[last]]
            last = list(in_group)[-2]
        after = last


def queued_between(tx: Connection, group: tuple[str, str, int], first: tuple[datetime, str] | None,
                   last: tuple[datetime, str]) -> int:
    """How many queued runs of a tenant, device and rank are older than `last`, by time and id, and not older than `first`."""
    age = tuple_(runs.c.created_at, runs.c.id)
    query = select(func.count()).where(IS_QUEUED, *(column == value for column, value in zip(_GROUP, group, strict=True)),
                                       age < tuple_(*last))
    return int(tx.execute(query if first is None else query.where(age >= tuple_(*first))).scalar_one())


def queued_by_group(tx: Connection) -> list[Row]:
    """Tenant, device, rank and number of queued runs."""
    return all_rows(tx, select(*_GROUP, func.count().label("count")).where(IS_QUEUED).group_by(*_GROUP))


_ACTIVE: Final = select(
    runs.c.id, runs.c.tenant, runs.c.execution, runs.c.step, runs.c.steps, runs.c.updated_at, runs.c.run_deadline_at,
    attempts.c.claimed_at, attempts.c.running_at, attempts.c.from_step, attempts.c.attempt,
    attempts.c.node,
).select_from(
    runs.join(attempts, and_(attempts.c.run_id == runs.c.id, attempts.c.attempt == runs.c.attempt))
).where(HAS_LEASE).order_by(attempts.c.claimed_at, attempts.c.id)
_OVERDUE: Final = union_all(
    select(runs.c.id).where(HAS_LEASE, runs.c.lease_expires_at <= bindparam("now")),
    select(runs.c.id).where(IS_QUEUED, runs.c.queue_deadline_at <= bindparam("now")),
    select(runs.c.id).where(HAS_RUN_DEADLINE, runs.c.run_deadline_at <= bindparam("now")),
)


def active_runs(tx: Connection) -> list[Row]:
    """The runs that hold devices, with what their attempts say of their pace."""
    return all_rows(tx, _ACTIVE)


def leased_attempts(tx: Connection) -> list[Row]:
    """Run and attempt of every lease."""
    return all_rows(tx, select(runs.c.id, runs.c.attempt).where(HAS_LEASE))


def overdue_runs(tx: Connection, now: datetime) -> list[str]:
    """Runs whose lease, queue deadline or run deadline has passed, in order."""
    return sorted(set(tx.execute(_OVERDUE, {"now": now}).scalars()))  # sorted here: by an ORDER BY, SQLite scans the primary key


# ---- Quotas, shares, turns -------------------------------------------------------------------------------------------

_QUOTAS: Final = select(quotas).order_by(quotas.c.tenant)
_SHARES: Final = select(shares)
_TURNS: Final = select(queue_turns)
_SHARE: Final = select(shares).where(shares.c.tenant == bindparam("tenant")).with_for_update()
_QUOTA = select(quotas).where(quotas.c.tenant == bindparam("tenant")).with_for_update()


def all_quotas(tx: Connection) -> list[Row]:
    return all_rows(tx, _QUOTAS)


def lock_quota(tx: Connection, tenant: str) -> Row | None:
    """A tenant's quota. Until the transaction ends nobody else counts against it."""
    return one_row(tx, _QUOTA, {"tenant": tenant})


def put_quota(tx: Connection, values: Values) -> None:
    put(tx, quotas, "tenant", values)


def all_shares(tx: Connection) -> list[Row]:
    return all_rows(tx, _SHARES)


def lock_share(tx: Connection, tenant: str) -> Row | None:
    return one_row(tx, _SHARE, {"tenant": tenant})


def put_share(tx: Connection, values: Values) -> None:
    put(tx, shares, "tenant", values)


def turns(tx: Connection) -> list[Row]:
    return all_rows(tx, _TURNS)


def put_turn(tx: Connection, priority: int, at: datetime) -> None:
    put(tx, queue_turns, "priority", {"priority": priority, "at": at})


def waiting_count(tx: Connection, tenant: str) -> int:
    """A tenant's runs that are queued or paused."""
    query = select(func.count()).select_from(runs).where(runs.c.tenant == tenant, runs.c.status.in_(("queued", "paused")))
    return int(tx.execute(query).scalar_one())


def jobs_since(tx: Connection, tenant: str, since: datetime) -> int:
    query = select(func.count()).select_from(jobs).where(jobs.c.tenant == tenant, jobs.c.created_at > since)
    return int(tx.execute(query).scalar_one())


def next_job_leaves(tx: Connection, tenant: str, since: datetime) -> timedelta:
    """How long after `since` the first job since then was created."""
    query = select(func.min(jobs.c.created_at)).where(jobs.c.tenant == tenant, jobs.c.created_at > since)
    first: datetime = tx.execute(query).scalar_one()
    return first - since


def checkpoint_bytes(tx: Connection, tenant: str) -> int:
    """The bytes of a tenant's checkpoints that aren't deleted."""
    query = select(func.coalesce(func.sum(checkpoints.c.size), 0))
    return int(tx.execute(query.where(checkpoints.c.tenant == tenant, text("checkpoints.deleted_at IS NULL"))).scalar_one())


def active_use(tx: Connection, tenant: str) -> tuple[int, int]:
    """How many runs of a tenant are active, and the devices that they hold."""
    query = select(func.count(), func.coalesce(func.sum(runs.c.devices), 0)).where(HAS_LEASE, runs.c.tenant == tenant)
    count, devices = tx.execute(query).one()
    return int(count), int(devices)

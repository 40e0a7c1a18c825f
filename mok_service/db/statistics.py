"""SQL of what monitoring asks for: counts over everything, of all tenants."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Connection, func, select, text

from mok_service.db.tables import RUN_TO_ATTEST, attempts, deliveries, nodes, runs


def attempt_ends(tx: Connection) -> dict[str, int]:
    """How many attempts ended in which way."""
    query = select(attempts.c.end_reason, func.count()).where(attempts.c.end_reason.is_not(None)).group_by(attempts.c.end_reason)
    return {str(end): count for end, count in tx.execute(query)}


def queue(tx: Connection) -> tuple[int, datetime | None]:
    """Queued runs, and since when the oldest of them exists."""
    return _count_and_first(tx, runs.c.created_at, runs.c.status == "queued")


def outbox(tx: Connection) -> tuple[int, datetime | None]:
    """Deliveries to be sent, and since when the oldest waits."""
    return _count_and_first(tx, deliveries.c.created_at, deliveries.c.status == "pending")


def unsigned(tx: Connection) -> tuple[int, datetime | None]:
    """Runs that have ended and aren't attested, and since when the first of them waits."""
    return _count_and_first(tx, runs.c.ended_at, text(RUN_TO_ATTEST))


def steps(tx: Connection) -> int:
    """Optimizer steps on record, of all runs."""
    return int(tx.execute(select(func.coalesce(func.sum(runs.c.step), 0))).scalar_one())


def given_up(tx: Connection) -> int:
    """Deliveries that were given up."""
    return int(tx.execute(select(func.count()).where(deliveries.c.status == "given_up")).scalar_one())


def last_heartbeat(tx: Connection) -> datetime | None:
    """When a scheduler last reported a machine."""
    found: datetime | None = tx.execute(select(func.max(nodes.c.heartbeat_at, type_=nodes.c.heartbeat_at.type))).scalar_one()
    return found


def _count_and_first(tx: Connection, at: Any, *conditions: Any) -> tuple[int, datetime | None]:
    count, first = tx.execute(select(func.count(), func.min(at, type_=at.type)).where(*conditions)).one()
    return count, first

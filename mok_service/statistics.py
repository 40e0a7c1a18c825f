"""How the whole service is, of all tenants: for monitoring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from mok_service.db import queries
from mok_service.db import statistics as sql
from mok_service.db.session import Database
from mok_service.lifecycle import STATUSES


@dataclass(frozen=True, slots=True)
class Waiting:
    """How many wait, and for how long the first of them has waited."""

    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Statistics:
    """One snapshot."""

    runs: Mapping[str, int]             # by status
    attempts: Mapping[str, int]         # that have ended, by how
    steps: int                          # optimizer steps on record
    nodes: int
    queue: Waiting
    outbox: Waiting
    unsigned: Waiting                   # runs that have ended and aren't attested yet
    given_up: int                       # deliveries
    heartbeat_seconds: float | None     # since a scheduler's last sign of life; None: never


def read(db: Database) -> Statistics:
    """How it is now."""
    now = db.now()

    def waiting(found: tuple[int, datetime | None]) -> Waiting:
        return Waiting(found[0], _seconds(found[1], now) or 0.0)

    with db.read() as tx:
        counts, beat = queries.run_counts(tx), sql.last_heartbeat(tx)
        return Statistics(
            {status: counts.get(status, 0) for status in STATUSES}, sql.attempt_ends(tx), sql.steps(tx),
            len(queries.all_nodes(tx)), waiting(sql.queue(tx)), waiting(sql.outbox(tx)), waiting(sql.unsigned(tx)),
            sql.given_up(tx), _seconds(beat, now),
        )


def heartbeat_age(db: Database) -> float | None:
    """Seconds since a scheduler's last sign of life; None: never."""
    with db.read() as tx:
        beat = sql.last_heartbeat(tx)
    return _seconds(beat, db.now())


def _seconds(since: datetime | None, now: datetime) -> float | None:
    return None if since is None else max(0.0, (now - since).total_seconds())

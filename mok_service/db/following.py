"""The SQL of what follows many runs at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import Connection, bindparam, select

from mok_service.db.queries import Row, all_rows
from mok_service.db.tables import runs

RUNS_MAX: Final = 500  # of one query
_PROGRESS = select(runs.c.id, runs.c.status, runs.c.event_count).where(runs.c.id.in_(bindparam("of", expanding=True)))


def progress(tx: Connection, run_ids: Sequence[str]) -> list[Row]:
    """Status and number of events of each of these runs."""
    found: list[Row] = []
    for first in range(0, len(run_ids), RUNS_MAX):
        found += all_rows(tx, _PROGRESS, {"of": list(run_ids[first:first + RUNS_MAX])})
    return found

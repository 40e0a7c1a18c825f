"""Following many runs at once: what has happened to any of them since somebody looked, from one snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mok_service.db import following as sql
from mok_service.db import queries
from mok_service.db.session import Database
from mok_service.lifecycle import FINAL
from mok_service.runs import rows
from mok_service.runs.types import Event


@dataclass(frozen=True, slots=True)
class News:
    """Of one run: its next events, if any were asked for; the number of its last event; and whether it has ended."""

    events: list[Event]
    last: int
    ended: bool


def news(db: Database, seen: Mapping[str, int | None], events_max: int) -> dict[str, News]:
    """By run: what came after the event that was seen last, at most `events_max` events of each; None asks for no events."""
    found: dict[str, News] = {}
    with db.read() as tx:
        for row in sql.progress(tx, list(seen)):
            after, last = seen[row["id"]], row["event_count"]
            later = [] if after is None or after >= last else queries.events_after(tx, row["id"], after, events_max)
            found[row["id"]] = News([rows.event_of(event) for event in later], last, row["status"] in FINAL)
    return found

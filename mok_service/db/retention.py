"""SQL of what is removed after a time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Connection, delete, func, or_, select, update

from mok_service.db.tables import events, logs, runs


def runs_with_too_much(tx: Connection, lines_max: int, ended_before: datetime | None) -> list[tuple[str, int, str]]:
    """(run, last line to go, why) of runs with lines that are to be removed. A single line that is left is a note."""
    too_many = runs.c.log_count > lines_max
    first = func.min(logs.c.number)
    query = select(runs.c.id, runs.c.log_count, runs.c.ended_at, first).join(logs, logs.c.run_id == runs.c.id)
    due = too_many if ended_before is None else or_(too_many, runs.c.ended_at < ended_before)
    query = query.where(due).group_by(runs.c.id, runs.c.log_count, runs.c.ended_at)
    found = []
    for run_id, count, ended_at, oldest in tx.execute(query.order_by(runs.c.id)):
        old = ended_before is not None and ended_at is not None and ended_at < ended_before
        last, why = (count, "their time was over") if old else (count - lines_max, f"the newest {lines_max} are kept")
        if oldest < last:
            found.append((run_id, last, why))
    return found


def lines_before(tx: Connection, run_id: str, number: int, limit: int) -> Sequence[int]:
    """The first numbers of log lines below a number."""
    query = select(logs.c.number).where(logs.c.run_id == run_id, logs.c.number < number).order_by(logs.c.number).limit(limit)
    return tx.execute(query).scalars().all()


def remove_lines(tx: Connection, run_id: str, numbers: Sequence[int]) -> None:
    tx.execute(delete(logs).where(logs.c.run_id == run_id, logs.c.number.in_(numbers)))


def write_note(tx: Connection, run_id: str, number: int, message: str) -> None:
    line = (logs.c.run_id == run_id, logs.c.number == number)
    tx.execute(update(logs).where(*line).values(message=message, level="info", step=None))


def blank_events(tx: Connection, run_id: str, last_line: int, message: str, after: int, limit: int) -> int | None:
    """Takes the messages of log lines up to `last_line` out of the next events that told them; where to go on, None at the end.
    The events stay: their numbers have no gaps."""
    t = events
    query = select(t.c.number, t.c.payload).where(t.c.run_id == run_id, t.c.type == "log", t.c.number > after)
    found = tx.execute(query.order_by(t.c.number).limit(limit)).all()
    for number, payload in found:
        if payload["number"] > last_line:
            return None
        if payload["message"] != message:
            event = update(t).where(t.c.run_id == run_id, t.c.number == number)
            tx.execute(event.values(payload={**payload, "message": message}))
    return found[-1][0] if found else None

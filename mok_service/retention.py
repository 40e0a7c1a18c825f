"""How long log lines are kept. What is removed leaves a note in its place, in the run's log and in its events."""

from __future__ import annotations

import logging
import threading
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy.exc import SQLAlchemyError

from mok_service.db import retention as sql
from mok_service.db.session import Database
from mok_service.runs.types import time_text
from mok_service.settings import Settings

log = logging.getLogger("mok.retention")

ROUND_SECONDS: Final = 600.0
LINES_MAX: Final = 1000  # of one transaction
REMOVED: Final = "(removed)"


class Retention:
    """Removes log lines: those beyond the newest of a run, and after a time those of runs that have ended."""

    def __init__(self, db: Database, settings: Settings) -> None:
        self._db, self._lines_max = db, settings.log_lines_max
        self._keep = timedelta(days=settings.log_days) if settings.log_days else None

    def tick(self, now: datetime) -> int:
        """Removes what is due; how many lines went."""
        removed = 0
        before = None if self._keep is None else now - self._keep
        with self._db.read() as tx:
            due = sql.runs_with_too_much(tx, self._lines_max, before)
        for run_id, last, why in due:
            self._blank_events(run_id, last)
            while (gone := self._remove(run_id, last, why, now)) > 0:
                removed += gone
            log.info("removed the log lines of %s up to %d: %s", run_id, last, why)
        return removed

    def run_forever(self, stop: threading.Event) -> None:
        """Tick until `stop` is set."""
        while not stop.is_set():
            try:
                self.tick(self._db.now())
            except SQLAlchemyError:
                log.exception("the database can't be reached; trying again")
            stop.wait(ROUND_SECONDS)

    def _blank_events(self, run_id: str, last: int) -> None:
        after: int | None = 0
        while after is not None:
            with self._db.write() as tx:
                after = sql.blank_events(tx, run_id, last, REMOVED, after, LINES_MAX)

    def _remove(self, run_id: str, last: int, why: str, now: datetime) -> int:
        """Removes up to LINES_MAX of the lines before number `last`, which becomes the note."""
        with self._db.write() as tx:
            numbers = sql.lines_before(tx, run_id, last, LINES_MAX)
            sql.remove_lines(tx, run_id, numbers)
            note = f"the lines up to this one were removed on {str(time_text(now))[:10]}: {why}"
            sql.write_note(tx, run_id, last, note)
        return len(numbers)

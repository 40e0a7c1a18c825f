"""Signing the records of runs that have ended: a thread beside the scheduler, in the one process that has the key.

A long record takes seconds to read and digest, so it isn't the scheduler's tick that does it. What isn't signed when the process
dies is signed by the next one.
"""

from __future__ import annotations

import logging
import threading

from mok_service import runs
from mok_service.db.session import Database
from mok_service.provenance.keys import SigningKey
from mok_workers.scheduler import DATABASE_TROUBLE

log = logging.getLogger("mok.signing")


class Signer:
    """Attests runs one by one, in the order in which they ended."""

    def __init__(self, db: Database, key: SigningKey) -> None:
        self._db, self._key = db, key
        self._given_up: set[str] = set()  # their fault is in the log; the next boot tries them again

    def tick(self) -> int:
        """Attest what has ended by now; how many runs that were. One run's trouble is not another's. Raises only when the
        database can't be reached."""
        signed = 0
        for run_id, tenant in runs.unattested(self._db, 100 + len(self._given_up)):
            if run_id in self._given_up:
                continue
            try:
                made = runs.attest(self._db, self._key, run_id, tenant)
            except DATABASE_TROUBLE:
                raise
            except Exception:
                log.exception("%s can't be attested", run_id)
                self._given_up.add(run_id)
            else:
                log.info("%s is attested: entry %d of the log", run_id, made.log_index)
                signed += 1
        return signed

    def run_forever(self, stop: threading.Event, seconds: float) -> None:
        """Tick until `stop` is set."""
        while not stop.is_set():
            try:
                self.tick()
            except DATABASE_TROUBLE:
                log.exception("the database can't be reached; trying again")
            stop.wait(seconds)

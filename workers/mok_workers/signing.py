"""Signing the records of runs that have ended, and verdicts: a thread beside the scheduler, in the one process that has the key.

A long record takes seconds to read and digest, so it isn't the scheduler's tick that does it. What isn't signed when the process
dies is signed by the next one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from mok_service import runs
from mok_service.db.session import Database
from mok_service.provenance.keys import SigningKey
from mok_workers.scheduler import DATABASE_TROUBLE

log = logging.getLogger("mok.signing")

RETRY_SECONDS: Final = 2.0         # after a first failure; doubles with each further one
RETRY_SECONDS_MAX: Final = 600.0


@dataclass(frozen=True, slots=True)
class _Failed:
    """What couldn't be signed: how often it was tried, and when it's tried again."""

    times: int
    retry_at: float


class Signer:
    """Attests runs and verdicts one by one, in the order in which they ended. The clock is passed in for tests."""

    def __init__(self, db: Database, key: SigningKey, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._db, self._key, self._monotonic = db, key, monotonic
        self._failed: dict[str, _Failed] = {}

    def tick(self) -> int:
        """Attest what has ended by now; how much that was. One run's trouble is not another's: it's tried again, less and less
        often. Raises only when the database can't be reached."""
        signed, now = 0, self._monotonic()
        for ended, tenant in runs.unattested(self._db, 100 + len(self._failed)):
            failed = self._failed.get(ended, _Failed(0, now))
            if failed.retry_at > now:
                continue
            try:
                made = runs.attest(self._db, self._key, ended, tenant)
            except DATABASE_TROUBLE:
                raise
            except Exception:
                wait = min(RETRY_SECONDS * 2.0 ** min(failed.times, 16), RETRY_SECONDS_MAX)
                log.exception("%s can't be attested; trying again in %g s", ended, wait)
                self._failed[ended] = _Failed(failed.times + 1, now + wait)
            else:
                log.info("%s is attested: entry %d of the log", ended, made.log_index)
                self._failed.pop(ended, None)
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

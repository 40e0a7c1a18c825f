"""Sending what is in the outbox: a thread of the scheduler's process. No transaction is open while something is sent.

A delivery is taken for as long as an attempt may last, sent, and its outcome written. A process that dies in between leaves
it to be sent again: at least once. Of each webhook one delivery is under way at a time, the oldest first, so that a receiver
that doesn't answer holds up nobody else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Final

import httpx
from sqlalchemy.exc import SQLAlchemyError

from mok_service.db import webhooks as sql
from mok_service.db.queries import Row
from mok_service.db.session import Database
from mok_service.net import GuardedTransport, Refused
from mok_service.settings import Settings
from mok_service.tracing import span
from mok_service.webhooks.signature import sign

log = logging.getLogger("mok.webhooks")

ANSWER_SECONDS_MAX: Final = 10.0    # for each of connecting, sending and the answer's beginning
TAKEN_SECONDS: Final = 60.0         # how long others leave alone what is being sent
WAIT_SECONDS: Final = 5.0           # before the second attempt; it doubles with each further one
WAIT_SECONDS_MAX: Final = 3600.0
AT_ONCE_MAX: Final = 8


class Outbox:
    """Sends deliveries. `transport` replaces the guarded connections, for tests."""

    def __init__(self, db: Database, settings: Settings, transport: httpx.BaseTransport | None = None,
                 unix_time: Callable[[], float] = time.time) -> None:
        self._db, self._unix_time = db, unix_time
        self._patience = timedelta(hours=settings.webhook_hours_max)
        self._http = httpx.Client(
            transport=transport or GuardedTransport(settings.outbound_networks), timeout=ANSWER_SECONDS_MAX, trust_env=False,
            follow_redirects=False,
        )

    def tick(self, now: datetime) -> int:
        """Sends what is due, once each; how many were tried."""
        with self._db.write() as tx:
            taken = sql.take_due(tx, now, now + timedelta(seconds=TAKEN_SECONDS), AT_ONCE_MAX)
        if taken:
            with ThreadPoolExecutor(AT_ONCE_MAX, thread_name_prefix="webhook") as pool:
                list(pool.map(lambda row: self._deliver(row, now), taken))
        return len(taken)

    def run_forever(self, stop: threading.Event, pause_seconds: float) -> None:
        """Tick until `stop` is set."""
        while not stop.is_set():
            tried = 0
            try:
                tried = self.tick(self._db.now())
            except SQLAlchemyError:
                log.exception("the database can't be reached; trying again")
            if tried < AT_ONCE_MAX:
                stop.wait(pause_seconds)
        self._http.close()

    def _deliver(self, row: Row, now: datetime) -> None:
        with span("webhook.deliver", delivery=row["id"], webhook=row["webhook_id"]):
            problem = self._send(row)
        attempts = row["attempts"] + 1
        if problem is None:
            outcome = {"status": "delivered", "attempts": attempts, "message": None, "ended_at": now}
        else:
            next_at = now + timedelta(seconds=min(WAIT_SECONDS * 2.0 ** min(attempts - 1, 20), WAIT_SECONDS_MAX))
            over = next_at > row["created_at"] + self._patience
            outcome = {"status": "given_up" if over else "pending", "attempts": attempts, "message": problem, "next_at": next_at,
                       "ended_at": now if over else None}
            log.log(logging.WARNING if over else logging.INFO, "delivery %s, attempt %d: %s%s", row["id"], attempts, problem,
                    "; given up" if over else "")
        with self._db.write() as tx:
            sql.settle_delivery(tx, row["id"], outcome)

    def _send(self, row: Row) -> str | None:
        """Why it failed; None if the receiver took it."""
        body, timestamp = row["body"].encode(), int(self._unix_time())
        headers = {
            "Content-Type": "application/json", "User-Agent": "mok-service", "webhook-id": row["id"],
            "webhook-timestamp": str(timestamp), "webhook-signature": sign(row["secret"], row["id"], timestamp, body),
        }
        try:
            with self._http.stream("POST", row["url"], content=body, headers=headers) as answer:
                if answer.is_success:  # its body is nothing to us, and isn't read
                    return None
                where = " (redirects aren't followed)" if answer.is_redirect else ""
                return f"the receiver answered {answer.status_code}{where}"
        except Refused as error:
            return error.message
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"{type(error).__name__}: {error}"[:300]

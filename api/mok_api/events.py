"""The event stream of a run (server-sent events): polled in a thread, so that no connection is held between polls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import StreamingResponse

from mok_api.answer import json_text
from mok_api.errors import Busy
from mok_service import runs
from mok_service.access import Principal, is_good
from mok_service.db.session import Database
from mok_service.runs.types import Event

POLL_SECONDS_MIN: Final = 0.1   # while events come
POLL_SECONDS_MAX: Final = 1.0   # when none has come for a while
EVENTS_MAX: Final = 500         # of one poll


def wants_stream(request: Request) -> bool:
    """Whether the client asks for a stream rather than for JSON."""
    return "text/event-stream" in request.headers.get("accept", "")


@dataclass
class Streams:
    """The open event streams of one process. Setting `stopping`, from any thread, ends them all within a second."""

    open_max: int
    tenant_max: int
    silence_seconds: float
    stopping: threading.Event = field(default_factory=threading.Event)
    by_tenant: Counter[str] = field(default_factory=Counter)  # touched by the event loop only

    @property
    def open(self) -> int:
        return self.by_tenant.total()

    async def follow(self, db: Database, who: Principal, run_id: str, after: int) -> AsyncIterator[str]:
        """The stream's text: every event from number `after` + 1 on, until the run has ended and all is told; or until the key
        that asked isn't good any more, which is looked up as often as a silent stream shows a sign of life."""
        self.by_tenant[who.tenant] += 1
        try:
            yield "retry: 1000\n\n"
            wait, said_at = POLL_SECONDS_MIN, time.monotonic()
            checked_at = said_at
            while not self.stopping.is_set():
                if who.key is not None and time.monotonic() - checked_at > self.silence_seconds:
                    if not await run_in_threadpool(is_good, db, who.key):
                        return
                    checked_at = time.monotonic()
                found, ended = await run_in_threadpool(_poll, db, who.tenant, run_id, after)
                for event in found:
                    after = event.number
                    yield f"id: {event.number}\nevent: {event.type}\ndata: {json_text(event.as_dict())}\n\n"
                if found:
                    wait, said_at = POLL_SECONDS_MIN, time.monotonic()
                    continue
                if ended:
                    yield "event: end\ndata: {}\n\n"
                    return
                if time.monotonic() - said_at > self.silence_seconds:
                    yield ": still here\n\n"
                    said_at = time.monotonic()
                await asyncio.sleep(wait)
                wait = min(wait * 1.5, POLL_SECONDS_MAX)
        finally:
            self.by_tenant -= Counter([who.tenant])  # and forgets a tenant that has none left

    def answer(self, db: Database, who: Principal, run_id: str, after: int) -> StreamingResponse:
        """The stream as an answer. Raises Busy when there are too many, NotFound when there is no such run."""
        if self.open >= self.open_max:
            raise Busy(f"{self.open} event streams are open; allowed: at most {self.open_max}", allowed=self.open_max)
        if self.by_tenant[who.tenant] >= self.tenant_max:
            raise Busy(f"{self.by_tenant[who.tenant]} event streams of {who.tenant} are open; allowed: at most {self.tenant_max}",
                       allowed=self.tenant_max)
        runs.get_run(db, run_id, who.tenant)
        headers = {"X-Accel-Buffering": "no"}  # proxies pass events on at once
        return StreamingResponse(self.follow(db, who, run_id, after), headers=headers, media_type="text/event-stream")


def _poll(db: Database, tenant: str, run_id: str, after: int) -> tuple[Sequence[Event], bool]:
    """The next events, and whether the run had ended before they were looked up (so that nothing comes after them)."""
    ended = runs.get_run(db, run_id, tenant).ended
    return runs.events(db, run_id, after, EVENTS_MAX, tenant), ended

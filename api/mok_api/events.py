"""The event stream of a run (server-sent events): told from the run's feed, which all its listeners share."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import AsyncIterator

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import StreamingResponse

from mok_api.errors import Busy
from mok_api.feeds import EVENTS_MAX, Feed, Feeds, text_of, until
from mok_service import runs
from mok_service.access import Principal, is_good
from mok_service.db.session import Database


def wants_stream(request: Request) -> bool:
    """Whether the client asks for a stream rather than for JSON."""
    return "text/event-stream" in request.headers.get("accept", "")


class Streams:
    """The open event streams of one process. Setting `stopping`, from any thread, ends them all within a second."""

    def __init__(self, db: Database, open_max: int, tenant_max: int, silence_seconds: float) -> None:
        self.open_max, self.tenant_max, self.silence_seconds = open_max, tenant_max, silence_seconds
        self.stopping = threading.Event()
        self.by_tenant: Counter[str] = Counter()  # touched by the event loop only
        self._db, self._feeds = db, Feeds(db, self.stopping)

    @property
    def open(self) -> int:
        return self.by_tenant.total()

    async def follow(self, who: Principal, run_id: str, after: int) -> AsyncIterator[bytes]:
        """The stream's text: every event from number `after` + 1 on, until the run has ended and all is told; or until the key
        that asked isn't good any more, which is looked up as often as a silent stream shows a sign of life."""
        self.by_tenant[who.tenant] += 1
        try:
            with self._feeds.listening(run_id) as feed:
                yield b"retry: 1000\n\n"
                say_by = check_by = time.monotonic() + self.silence_seconds
                while not self.stopping.is_set():
                    changed = feed.changed
                    if time.monotonic() >= check_by:
                        if who.key is not None and not await run_in_threadpool(is_good, self._db, who.key):
                            return
                        check_by = time.monotonic() + self.silence_seconds
                    text, after = await self._next(feed, who.tenant, after)
                    if text:
                        yield text
                        say_by = time.monotonic() + self.silence_seconds
                    elif feed.ended:
                        yield b"event: end\ndata: {}\n\n"
                        return
                    elif time.monotonic() >= say_by:
                        yield b": still here\n\n"
                        say_by = time.monotonic() + self.silence_seconds
                    else:
                        await until(changed, min(say_by, check_by) - time.monotonic())
        finally:
            self.by_tenant -= Counter([who.tenant])  # and forgets a tenant that has none left

    async def _next(self, feed: Feed, tenant: str, after: int) -> tuple[bytes, int]:
        """The next events as text, and the number of the last one; no text where there are none yet."""
        if feed.last is None or after >= feed.last:
            return b"", after
        kept = feed.after(after)
        if kept is not None:
            return kept
        found = await run_in_threadpool(runs.events, self._db, feed.run_id, after, EVENTS_MAX, tenant)
        return b"".join(map(text_of, found)), found[-1].number

    def answer(self, who: Principal, run_id: str, after: int) -> StreamingResponse:
        """The stream as an answer. Raises Busy when there are too many, NotFound when there is no such run."""
        if self.open >= self.open_max:
            raise Busy(f"{self.open} event streams are open; allowed: at most {self.open_max}", allowed=self.open_max)
        if self.by_tenant[who.tenant] >= self.tenant_max:
            raise Busy(f"{self.by_tenant[who.tenant]} event streams of {who.tenant} are open; allowed: at most {self.tenant_max}",
                       allowed=self.tenant_max)
        runs.get_run(self._db, run_id, who.tenant)
        headers = {"X-Accel-Buffering": "no"}  # proxies pass events on at once
        return StreamingResponse(self.follow(who, run_id, after), headers=headers, media_type="text/event-stream")

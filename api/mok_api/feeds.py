"""What the event streams of a process are fed with: one reader asks the database for all runs that anybody follows.

A run's feed keeps its latest events as text, once for all listeners; each listener takes from it what it hasn't told yet, at its
own pace. One that fell behind what is kept reads from the database by itself: nobody waits for it, and it costs no memory.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from starlette.concurrency import run_in_threadpool

from mok_api.answer import json_text
from mok_service.db.session import Database
from mok_service.runs.following import News, news
from mok_service.runs.types import Event

logger = logging.getLogger("mok.api")

LOOK_SECONDS_MIN: Final = 0.02   # between two looks, whatever is heard
POLL_SECONDS_MIN: Final = 0.05   # while events come
POLL_SECONDS_MAX: Final = 1.0    # when none has come for a while
EVENTS_MAX: Final = 500          # of one run and look
KEPT_MAX: Final = 500            # events of a run that are kept,
KEPT_BYTES_MAX: Final = 1 << 18  # as long as they aren't larger


@dataclass
class Feed:
    """The latest events of one run. For the event loop's thread."""

    run_id: str
    last: int | None = None   # the number of the last event; None before the first look
    ended: bool = False       # the run has, and no event comes after `last`
    listeners: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # another one after each change
    _kept: deque[tuple[int, bytes]] = field(default_factory=deque)
    _bytes: int = 0

    def after(self, number: int) -> tuple[bytes, int] | None:
        """The text of all events after this one, and the number of the last; None if not all of them are kept."""
        first = self._kept[0][0] if self._kept else (self.last or 0) + 1
        if number + 1 < first:
            return None
        told = [text for _, text in takewhile(lambda kept: kept[0] > number, reversed(self._kept))]  # mostly one
        return b"".join(reversed(told)), number + len(told)

    def add(self, told: list[tuple[int, bytes]], found: News) -> None:
        """What a look has found."""
        last = told[-1][0] if told else found.last if self.last is None else self.last
        if (last, found.ended and last >= found.last) == (self.last, self.ended):
            return
        self.last, self.ended = last, found.ended and last >= found.last
        self._kept.extend(told)
        self._bytes += sum(len(text) for _, text in told)
        while len(self._kept) > KEPT_MAX or self._bytes > KEPT_BYTES_MAX:
            self._bytes -= len(self._kept.popleft()[1])
        self.wake()

    def wake(self) -> None:
        """Has every listener look."""
        self.changed.set()
        self.changed = asyncio.Event()


class Feeds:
    """The feeds of one process, and their reader: a task, as long as there are listeners."""

    def __init__(self, db: Database, stopping: threading.Event) -> None:
        self._db, self._stopping = db, stopping
        self._feeds: dict[str, Feed] = {}
        self._reader: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._heard, self._news = False, asyncio.Event()
        db.after_write.append(self._hear)

    @contextmanager
    def listening(self, run_id: str) -> Iterator[Feed]:
        """The run's feed, for one listener."""
        feed = self._feeds.setdefault(run_id, Feed(run_id))
        feed.listeners += 1
        if feed.last is None:
            self._news.set()  # the first look may come at once
        if self._reader is None:
            self._loop = asyncio.get_running_loop()
            self._reader = asyncio.create_task(self._read())
        try:
            yield feed
        finally:
            feed.listeners -= 1
            if not feed.listeners:
                del self._feeds[run_id]
                self._news.set()  # the reader of nothing ends

    def _hear(self) -> None:
        """This process has written something; in the writer's thread."""
        loop = self._loop
        if loop is None or self._heard:
            return
        self._heard = True
        with suppress(RuntimeError):  # the loop has ended, and with it all listeners
            loop.call_soon_threadsafe(self._news.set)

    async def _read(self) -> None:
        wait = POLL_SECONDS_MIN
        while self._feeds and not self._stopping.is_set():
            self._heard = False
            self._news.clear()
            seen = {run_id: feed.last for run_id, feed in self._feeds.items()}
            try:
                found = await run_in_threadpool(_look, self._db, seen)
            except Exception as error:  # the streams stay, and go on when the database does
                logger.error("the event streams' reader failed, and tries again", exc_info=error)
                wait, found = POLL_SECONDS_MAX, {}
            for run_id, (told, of_run) in found.items():
                feed = self._feeds.get(run_id)
                if feed is not None and feed.last == seen[run_id]:  # else it's a new one, that nobody has looked for yet
                    feed.add(told, of_run)
            behind = any(told and told[-1][0] < of_run.last for told, of_run in found.values())
            if any(told for told, _ in found.values()):
                wait = POLL_SECONDS_MIN
            if not behind:
                await self._pause(wait)
                wait = min(wait * 1.5, POLL_SECONDS_MAX)
        self._reader, self._loop = None, None
        for feed in self._feeds.values():
            feed.wake()

    async def _pause(self, seconds: float) -> None:
        """Until there is news, or the time has passed."""
        began = time.monotonic()
        await until(self._news, seconds)
        await asyncio.sleep(max(0.0, began + LOOK_SECONDS_MIN - time.monotonic()))


async def until(happened: asyncio.Event, seconds: float) -> None:
    """Until this has happened, or the time has passed."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await happened.wait()


def text_of(event: Event) -> bytes:
    """An event as a stream tells it."""
    return f"id: {event.number}\nevent: {event.type}\ndata: {json_text(event.as_dict())}\n\n".encode()


def _look(db: Database, seen: dict[str, int | None]) -> dict[str, tuple[list[tuple[int, bytes]], News]]:
    return {run_id: ([(event.number, text_of(event)) for event in found.events], found)
            for run_id, found in news(db, seen, EVENTS_MAX).items()}

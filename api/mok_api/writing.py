"""Writes that wait at the same time are carried out together.

SQLite has one writer, and every commit waits for the disk: with one transaction for each request, requests queue for both, and
their threads for the interpreter. So whatever came while a group was carried out is the next group (`Database.together`), in one
thread. PostgreSQL has many writers: there each request has a thread of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from functools import partial, wraps
from typing import Any, Final

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from mok_service.db.session import Database

TOGETHER_MAX: Final = 32  # so that others who write, such as the scheduler, don't wait for long


class Writing:
    """The writes of one process. For the event loop's thread."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._waiting: list[tuple[Callable[[], object], asyncio.Future[Any]]] = []
        self._at_work: asyncio.Task[None] | None = None

    async def carry_out(self, work: Callable[[], Any]) -> Any:
        """What the work returns or raises, once it's committed."""
        if self._db.dialect != "sqlite":
            return await run_in_threadpool(work)
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((partial(copy_context().run, work), done))
        if self._at_work is None:
            self._at_work = asyncio.create_task(self._work())
        return await done

    async def _work(self) -> None:
        try:
            while self._waiting:
                group, self._waiting = self._waiting[:TOGETHER_MAX], self._waiting[TOGETHER_MAX:]
                results = await run_in_threadpool(self._db.together, [work for work, _ in group])
                for (_, done), result in zip(group, results, strict=True):
                    if done.cancelled():  # whoever asked has gone
                        continue
                    if isinstance(result, Exception):
                        done.set_exception(result)
                    else:
                        done.set_result(result)
        finally:
            self._at_work = None


def together(route: Callable[..., Response]) -> Callable[..., Any]:
    """A route that writes, carried out together with others. It takes the request as `request`."""
    @wraps(route)
    async def carried_out(**values: Any) -> Response:
        writing: Writing = values["request"].app.state.writing
        answer: Response = await writing.carry_out(partial(route, **values))
        return answer

    return carried_out

"""Several pieces of work in one transaction of SQLite, which has one writer anyway: one commit, and so one wait for the disk.

Each is carried out as if alone, after the one before it: what it writes stands in a savepoint, its error is its own, and it reads
what those before it wrote. No result may be told before the commit; if that fails, nothing of the group has happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError


class Group:
    """The one transaction. `begin` opens it, and commits when it's left; the first piece of work that writes does that."""

    def __init__(self, begin: Callable[[], AbstractContextManager[Connection]], stack: ExitStack) -> None:
        self._begin, self._stack = begin, stack
        self.connection: Connection | None = None

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """What one piece of work writes: all of it, or nothing where the block raises."""
        if self.connection is None:
            self.connection = self._stack.enter_context(self._begin())
        self.check()
        with self.connection.begin_nested():
            yield self.connection

    def check(self) -> None:
        """Raises OperationalError if SQLite has rolled back the transaction by itself, as it does when the disk is full."""
        if self.connection is not None:
            driver: Any = self.connection.connection.driver_connection
            if not driver.in_transaction:
                raise OperationalError("COMMIT", None, Exception("the database has rolled the transaction back"))


def carry_out(works: Sequence[Callable[[], object]], group: Group, found: list[object]) -> None:
    """Adds what each piece of work returns or, in its place, the exception that it raises. Raises OperationalError when none of
    it can be committed."""
    for work in works:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)
    group.check()

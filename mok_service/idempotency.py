"""An Idempotency-Key: what is asked for again with the same key is done once, and answered as the first time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Generic, TypeVar

from sqlalchemy import Connection

from mok_service.db import queries, tables
from mok_service.db.session import Database
from mok_service.errors import Conflict, InvalidSpec, QuotaExceeded
from mok_service.provenance.digest import Digest

KEY_LENGTH_MAX: Final = 255
ROUTE_LENGTH_MAX: Final = 200
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Idempotency:
    """An Idempotency-Key: `route` is method and path ("POST /v1/jobs"), `body` the digest of the request's body.

    Raises InvalidSpec for a key that isn't 1 to 255 printable ASCII characters.
    """

    route: str
    key: str
    body: Digest

    def __post_init__(self) -> None:
        assert 0 < len(self.route) <= ROUTE_LENGTH_MAX, self.route
        if not (0 < len(self.key) <= KEY_LENGTH_MAX and self.key.isascii() and self.key.isprintable()):
            raise InvalidSpec(f"Idempotency-Key: {self.key!r:.60} isn't allowed; allowed: 1 to {KEY_LENGTH_MAX} printable ASCII "
                              "characters", field="Idempotency-Key", value=self.key[:60])


class _SeenBefore(Exception):
    """Rolls back a request whose Idempotency-Key another request has stored in the meantime."""


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What a request made, and what is answered to the same one again."""

    made: T
    job_id: str
    response: dict[str, Any]


def once(db: Database, tenant: str, idempotency: Idempotency | None, work: Callable[[Connection], Answer[T]],
         before: Callable[[dict[str, Any]], T], at: datetime) -> T:
    """What `work` makes in one transaction, with its answer kept under the key; or, where another request with the key was faster
    and `work` is rolled back, what `before` makes of that one's answer."""
    try:
        with db.write() as tx:
            answer = work(tx)
            if idempotency is not None and not queries.insert_unless_there(tx, tables.idempotency_keys, {
                "tenant": tenant, "route": idempotency.route, "key": idempotency.key, "body": idempotency.body,
                "job_id": answer.job_id, "response": answer.response, "created_at": at,
            }):
                raise _SeenBefore
    except (_SeenBefore, QuotaExceeded):
        seen = answered(db, tenant, idempotency)  # whoever was faster has committed, and has perhaps taken the last place
        if seen is None:
            raise
        return before(seen)
    return answer.made


def answered(db: Database, tenant: str, idempotency: Idempotency | None) -> dict[str, Any] | None:
    """What was answered to an earlier request with this key. Raises Conflict when that had another body."""
    if idempotency is None:
        return None
    with db.read() as tx:
        row = queries.idempotency_key(tx, tenant, idempotency.route, idempotency.key)
    if row is None:
        return None
    response: dict[str, Any] = row["response"]
    if row["body"] != idempotency.body:
        raise Conflict(
            f"Idempotency-Key {idempotency.key!r} was used with another body, for job {row['job_id']}", job=row["job_id"],
            key=idempotency.key, **{what: response[what]["id"] for what in ("run", "verification") if what in response},
        )
    return response

"""The audit log: every write that somebody asked for, in a chain for each tenant.

Whoever carries out a request calls `begin`. The first transaction of the request that writes then holds the entry too: what
is committed is on the log. A request that ends in another way (refused, failed, nothing to write) gets its entry by
`Request.end`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from mok_service.db import access as sql
from mok_service.db.session import Database, before_commit
from mok_service.provenance.auditlog import FIELDS, check_audit_log, entry_digest, genesis
from mok_service.provenance.digest import Digest
from mok_service.provenance.verify import Finding
from mok_service.runs.rows import check_limit
from mok_service.runs.types import time_text

_current: ContextVar[Request | None] = ContextVar("audited_request", default=None)


@dataclass
class Request:
    """A request that may write: who asked for what. `ids` grows while it's carried out; see `note`."""

    db: Database
    tenant: str
    actor: str                 # id of a key; or the user of a command on this machine
    role: str
    address: str | None        # of the client
    action: str                # "POST /v1/jobs", "mok apikey create"
    request: str               # the request's id, as in logs and errors
    success: int               # the outcome if nothing goes wrong, as an HTTP status
    ids: dict[str, str] = field(default_factory=dict)
    body: Digest | None = None
    written: int | None = None  # the outcome on the log
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def append(self, tx: Connection) -> None:
        """In a transaction that writes, before its commit: the entry, if there is none yet."""
        with self._lock:
            if self.written is None:
                self._write(tx, self.success)

    def end(self, outcome: int) -> None:
        """What really came of it: an entry if there is none yet, and another one if the outcome differs."""
        with self._lock:
            if self.written == outcome:
                return
            before = before_commit.set(None)
            try:
                with self.db.write() as tx:
                    self._write(tx, outcome)
            finally:
                before_commit.reset(before)

    def _write(self, tx: Connection, outcome: int) -> None:
        head = sql.lock_audit_head(tx, self.tenant, genesis(self.tenant))
        at = self.db.now(tx)
        values = {
            "tenant": self.tenant, "number": head["length"], "actor": self.actor, "role": self.role, "address": self.address,
            "action": self.action, "ids": dict(sorted(self.ids.items())), "body": self.body, "outcome": outcome,
            "request": self.request, "previous": head["digest"], "created_at": at,
        }
        sql.add_audit_entry(tx, {**values, "digest": entry_digest(_shown(values))})
        self.written = outcome


def begin(request: Request) -> None:
    """From here on this thread or task carries out the request."""
    before_commit.set(request.append)
    _current.set(request)


@contextmanager
def audited(request: Request) -> Iterator[None]:
    """Carries out a request of a command: the block."""
    tokens = before_commit.set(request.append), _current.set(request)
    try:
        yield
    finally:
        before_commit.reset(tokens[0])
        _current.reset(tokens[1])


def note(**ids: str) -> None:
    """Tells the present request, if there is one, what it has made or changed."""
    request = _current.get()
    if request is not None:
        request.ids.update(ids)


def succeeds_with(status: int) -> None:
    """Tells the present request, if there is one, which outcome it has if nothing goes wrong."""
    request = _current.get()
    if request is not None:
        request.success = status


# ---- Looking at it ---------------------------------------------------------------------------------------------------

def entries(db: Database, tenant: str = "local", after: int = -1, limit: int = 1000) -> list[dict[str, Any]]:
    """A tenant's entries after number `after`, in order; -1 begins with the first."""
    with db.read() as tx:
        return [_shown(row) for row in sql.audit_entries_after(tx, tenant, min(after, 2**31 - 1), check_limit(limit))]


def head(db: Database, tenant: str = "local") -> dict[str, Any]:
    """How long a tenant's log is, and the digest of its last entry."""
    with db.read() as tx:
        found = sql.audit_head(tx, tenant) or {"length": 0, "digest": genesis(tenant)}
    return {"tenant": tenant, "length": found["length"], "digest": str(found["digest"])}


def tenants(db: Database) -> list[str]:
    """The tenants that have a log."""
    with db.read() as tx:
        return sql.audit_tenants(tx)


def verify(db: Database, tenant: str = "local") -> Finding:
    """Checks a tenant's whole log, from one snapshot."""
    with db.read() as tx:
        known = sql.audit_head(tx, tenant) or {"length": 0, "digest": genesis(tenant)}
        shown = {"length": known["length"], "digest": str(known["digest"])}
        found = [_shown(row) for row in sql.audit_entries_after(tx, tenant, -1, sql.audit_length(tx, tenant))]
    return check_audit_log(tenant, shown, found)


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """The REST shape."""
    values: dict[str, Any] = {name: row[name] for name in FIELDS if name not in ("at", "body", "previous")}
    at: datetime = row["created_at"]
    values |= {"at": time_text(at), "body": None if row["body"] is None else str(row["body"]), "previous": str(row["previous"])}
    return values | ({"digest": str(row["digest"])} if "digest" in row else {})

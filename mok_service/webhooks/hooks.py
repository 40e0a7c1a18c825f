"""The webhooks of a tenant, and what has become of their deliveries."""

from __future__ import annotations

import ipaddress
import secrets
from base64 import b64encode
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from sqlalchemy import Connection

from mok_service import auditlog
from mok_service.db import queries, tables
from mok_service.db import webhooks as sql
from mok_service.db.ids import is_id, new_id
from mok_service.db.session import Database
from mok_service.errors import InvalidSpec, NotFound
from mok_service.net import choose
from mok_service.runs import rows
from mok_service.runs.outbox import WebhookEvent
from mok_service.runs.rows import Row
from mok_service.runs.types import Page, time_text
from mok_service.settings import Network
from mok_service.webhooks.signature import SECRET_PREFIX

URL_LENGTH_MAX: Final = 2000
WEBHOOKS_MAX: Final = 20  # of a tenant


@dataclass(frozen=True, slots=True)
class Webhook:
    """Where deliveries of these events go. Its secret was shown once."""

    id: str
    tenant: str
    url: str
    events: tuple[WebhookEvent, ...]
    created_at: datetime

    def as_dict(self) -> dict[str, Any]:
        """The REST shape."""
        return {"id": self.id, "tenant": self.tenant, "url": self.url, "events": list(self.events),
                "created_at": time_text(self.created_at)}


@dataclass(frozen=True, slots=True)
class Delivery:
    """Something that a webhook is told: pending, delivered, or given up with the reason."""

    id: str
    webhook_id: str
    type: WebhookEvent
    status: Literal["pending", "delivered", "given_up"]
    attempts: int
    message: str | None
    created_at: datetime
    next_at: datetime
    ended_at: datetime | None

    def as_dict(self) -> dict[str, Any]:
        """The REST shape."""
        pending = self.status == "pending"
        return {"id": self.id, "webhook": self.webhook_id, "type": self.type, "status": self.status, "attempts": self.attempts,
                "message": self.message, "created_at": time_text(self.created_at),
                "next_at": time_text(self.next_at) if pending else None, "ended_at": time_text(self.ended_at)}


def create_webhook(db: Database, *, url: str, events: Sequence[WebhookEvent], tenant: str = "local",
                   allowed: Sequence[Network] = (), now: datetime | None = None) -> tuple[Webhook, str]:
    """A new webhook, and its secret, which nobody can show again. Raises InvalidSpec or net.Refused for an unusable URL, and
    InvalidSpec when the tenant has as many as it may."""
    check_url(url, allowed)
    at = now if now is not None else db.now()
    secret = SECRET_PREFIX + b64encode(secrets.token_bytes(32)).decode()
    row = {"id": new_id("whk"), "tenant": tenant, "url": url, "events": sorted(set(events)), "secret": secret, "created_at": at,
           "deleted_at": None}
    auditlog.note(webhook=str(row["id"]))
    with db.write() as tx:
        if len(sql.webhooks_of(tx, tenant)) >= WEBHOOKS_MAX:
            raise InvalidSpec(f"{tenant} has {WEBHOOKS_MAX} webhooks; allowed: at most {WEBHOOKS_MAX}", allowed=WEBHOOKS_MAX)
        queries.add(tx, tables.webhooks, [row])
    return _webhook_of(row), secret


def check_url(url: str, allowed: Sequence[Network] = ()) -> None:
    """Raises InvalidSpec unless deliveries may be sent there: https, or http to an address in an allowed network. A name is
    looked up when something is sent, not here."""
    def refuse(problem: str) -> InvalidSpec:
        return InvalidSpec(f"url: {problem}; allowed: https://HOST/PATH of at most {URL_LENGTH_MAX} characters", field="url")

    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname or ""
    except ValueError:
        raise refuse("it can't be read") from None
    if len(url) > URL_LENGTH_MAX or not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise refuse("it is too long, or has characters that an address hasn't")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise refuse("it has a user, a password or a fragment")
    if parts.scheme not in ("http", "https") or not host or port == 0:
        raise refuse("it isn't an address of a web server")
    literal = None
    with suppress(ValueError):
        literal = ipaddress.ip_address(host)
    if parts.scheme == "http" and not (literal and any(literal in network for network in allowed)):
        raise refuse("http is not encrypted")
    if literal is not None:
        choose(host, [host], allowed)


def list_webhooks(db: Database, tenant: str = "local") -> list[Webhook]:
    """The tenant's webhooks, the oldest first."""
    with db.read() as tx:
        return [_webhook_of(row) for row in sql.webhooks_of(tx, tenant)]


def get_webhook(db: Database, webhook_id: str, tenant: str = "local") -> Webhook:
    """One webhook. Raises NotFound."""
    with db.read() as tx:
        return _webhook_of(_webhook(tx, webhook_id, tenant))


def delete_webhook(db: Database, webhook_id: str, tenant: str = "local", now: datetime | None = None) -> Webhook:
    """Ends a webhook: its secret goes, what is still in the outbox is given up; what it was. Raises NotFound."""
    at = now if now is not None else db.now()
    with db.write() as tx:
        found = _webhook_of(_webhook(tx, webhook_id, tenant))
        sql.update_webhook(tx, webhook_id, {"deleted_at": at, "secret": None})
        sql.give_up_pending(tx, webhook_id, at, "the webhook was deleted")
    return found


def deliveries(db: Database, webhook_id: str, tenant: str = "local", cursor: str | None = None,
               limit: int = 50) -> Page[Delivery]:
    """What a webhook was and is to be told, the newest first. Raises NotFound."""
    with db.read() as tx:
        _webhook(tx, webhook_id, tenant)
        found = sql.delivery_page(tx, webhook_id, rows.decode_cursor(cursor), rows.check_limit(limit))
    return rows.page_of(found, limit, _delivery_of)


def _webhook(tx: Connection, webhook_id: str, tenant: str) -> Row:
    row = sql.webhook(tx, webhook_id, tenant) if is_id(webhook_id, "whk") else None
    if row is None:
        raise NotFound(f"there is no webhook {webhook_id!r:.60}", webhook=webhook_id[:60])
    return row


def _webhook_of(row: Row) -> Webhook:
    return Webhook(row["id"], row["tenant"], row["url"], tuple(row["events"]), row["created_at"])


def _delivery_of(row: Row) -> Delivery:
    same = ("id", "webhook_id", "type", "status", "attempts", "message", "created_at", "next_at", "ended_at")
    return Delivery(**{name: row[name] for name in same})

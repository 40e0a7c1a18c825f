"""SQL of webhooks and of the outbox."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import Connection, func, select, update

from mok_service.db.queries import Key, Row, Values, all_rows, one_row, page
from mok_service.db.tables import deliveries, webhooks


def webhooks_of(tx: Connection, tenant: str) -> list[Row]:
    """Those that aren't deleted, the oldest first."""
    query = select(webhooks).where(webhooks.c.tenant == tenant, webhooks.c.deleted_at.is_(None))
    return all_rows(tx, query.order_by(webhooks.c.created_at, webhooks.c.id))


def webhook(tx: Connection, webhook_id: str, tenant: str) -> Row | None:
    t = webhooks
    return one_row(tx, select(t).where(t.c.id == webhook_id, t.c.tenant == tenant, t.c.deleted_at.is_(None)))


def update_webhook(tx: Connection, webhook_id: str, values: Values) -> None:
    tx.execute(update(webhooks).where(webhooks.c.id == webhook_id).values(**values))


def delivery_page(tx: Connection, webhook_id: str, after: Key | None, limit: int) -> list[Row]:
    """Up to limit + 1 deliveries, newest first."""
    return page(tx, select(deliveries).where(deliveries.c.webhook_id == webhook_id), deliveries, after, limit)


def give_up_pending(tx: Connection, webhook_id: str, now: datetime, message: str) -> None:
    t = deliveries
    statement = update(t).where(t.c.webhook_id == webhook_id, t.c.status == "pending")
    tx.execute(statement.values(status="given_up", message=message, ended_at=now))


def take_due(tx: Connection, now: datetime, until: datetime, limit: int) -> list[Row]:
    """Of each webhook the oldest pending delivery, where that is due, with the webhook's URL and secret. They aren't due again
    before `until`."""
    t = deliveries
    oldest = select(func.min(t.c.id)).where(t.c.status == "pending").group_by(t.c.webhook_id).having(func.min(t.c.next_at) <= now)
    due = select(t.c.id).where(t.c.id.in_(oldest), t.c.status == "pending", t.c.next_at <= now).order_by(t.c.next_at, t.c.id)
    ids = tx.execute(due.limit(limit).with_for_update(skip_locked=True)).scalars().all()
    if not ids:
        return []
    tx.execute(update(t).where(t.c.id.in_(ids)).values(next_at=until))
    query = select(t, webhooks.c.url, webhooks.c.secret).join(webhooks, webhooks.c.id == t.c.webhook_id)
    return all_rows(tx, query.where(t.c.id.in_(ids)).order_by(t.c.id))


def settle_delivery(tx: Connection, delivery_id: str, values: Values) -> None:
    """Writes the outcome of an attempt, unless the delivery was given up meanwhile."""
    t = deliveries
    tx.execute(update(t).where(t.c.id == delivery_id, t.c.status == "pending").values(**values))

"""API keys with roles, the audit log of writes, webhooks and their outbox."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

PENDING = "status = 'pending'"


def string(name: str, length: int = 40, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.String(length), nullable=nullable)


def integer(name: str, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.Integer(), autoincrement=False, nullable=nullable)


def text(name: str, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.Text(), nullable=nullable)


def time(name: str, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def upgrade() -> None:
    # A program of the version before may go on inserting keys: they are viewers, who may do least.
    op.add_column("api_keys", sa.Column("role", sa.String(16), nullable=False, server_default="viewer"))
    op.add_column("api_keys", sa.Column("created_by", sa.String(100), nullable=True))
    op.add_column("api_keys", sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True))
    _audit()
    _webhooks()


def downgrade() -> None:
    for table in ("deliveries", "webhooks", "audit_heads", "audit_entries"):
        op.drop_table(table)
    for column in ("last_used_at", "created_by", "role"):
        op.drop_column("api_keys", column)


def _audit() -> None:
    op.create_table(
        "audit_entries", string("tenant", 64), integer("number"), string("actor", 100), string("role", 16),
        string("address", 64, nullable=True), string("action", 200), text("ids"), string("body", 71, nullable=True),
        integer("outcome"), string("request", 64), string("previous", 71), string("digest", 71), time("created_at"),
        sa.PrimaryKeyConstraint("tenant", "number", name="pk_audit_entries"),
    )
    op.create_table(
        "audit_heads", string("tenant", 64), integer("length"), string("digest", 71),
        sa.PrimaryKeyConstraint("tenant", name="pk_audit_heads"),
    )


def _webhooks() -> None:
    op.create_table(
        "webhooks", string("id"), string("tenant", 64), text("url"), text("events"), text("secret", nullable=True),
        time("created_at"), time("deleted_at", nullable=True), sa.PrimaryKeyConstraint("id", name="pk_webhooks"),
    )
    op.create_index("ix_webhooks_tenant_created_at_id", "webhooks", ["tenant", "created_at", "id"])
    op.create_table(
        "deliveries", string("id"), string("tenant", 64), string("webhook_id"), string("type", 32), text("body"),
        string("status", 16), integer("attempts"), time("next_at"), text("message", nullable=True), time("created_at"),
        time("ended_at", nullable=True), sa.PrimaryKeyConstraint("id", name="pk_deliveries"),
        sa.ForeignKeyConstraint(["webhook_id"], ["webhooks.id"], name="fk_deliveries_webhook_id"),
    )
    op.create_index("ix_deliveries_webhook_id_created_at_id", "deliveries", ["webhook_id", "created_at", "id"])
    op.create_index("ix_deliveries_pending", "deliveries", ["next_at", "webhook_id", "id"], sqlite_where=sa.text(PENDING),
                    postgresql_where=sa.text(PENDING))

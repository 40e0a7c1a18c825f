"""API keys with roles, the audit log of writes, webhooks and their outbox."""

from __future__ import annotations

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass

"""Verdicts' attestations are found by digest."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_verification_attestations_digest", "verification_attestations", ["digest"])


def downgrade() -> None:
    op.drop_index("ix_verification_attestations_digest", "verification_attestations")

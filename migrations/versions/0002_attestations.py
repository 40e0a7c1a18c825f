"""Attestations, their append-only log, and the public keys that signed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

UNATTESTED = "ended_at IS NOT NULL AND log_index IS NULL"


def upgrade() -> None:
    op.add_column("runs", sa.Column("log_index", sa.Integer(), nullable=True))
    op.create_index("ix_runs_unattested", "runs", ["ended_at", "id"], sqlite_where=sa.text(UNATTESTED),
                    postgresql_where=sa.text(UNATTESTED))
    op.create_table(
        "signing_keys",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("pem", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_signing_keys"),
    )
    op.create_table(
        "log_entries",
        sa.Column("log_index", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("entry", sa.String(71), nullable=False),
        sa.Column("frontier", sa.Text(), nullable=False),
        sa.Column("head", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("log_index", name="pk_log_entries"),
    )
    op.create_table(
        "attestations",
        sa.Column("run_id", sa.String(40), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("envelope", sa.Text(), nullable=False),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("digest", sa.String(71), nullable=False),
        sa.Column("log_index", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name="pk_attestations"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name="fk_attestations_run_id"),
        sa.ForeignKeyConstraint(["key_id"], ["signing_keys.id"], name="fk_attestations_key_id"),
        sa.ForeignKeyConstraint(["log_index"], ["log_entries.log_index"], name="fk_attestations_log_index"),
        sa.UniqueConstraint("log_index", name="uq_attestations_log_index"),
    )


def downgrade() -> None:
    for table in ("attestations", "log_entries", "signing_keys"):
        op.drop_table(table)
    op.drop_index("ix_runs_unattested", "runs")
    op.drop_column("runs", "log_index")

"""What the queue needs: quotas, shares, and indexes that keep a claim as fast with many runs as with few."""

from __future__ import annotations

from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

QUEUED, HAS_DEADLINE, STORED = "status = 'queued'", "run_deadline_at IS NOT NULL", "deleted_at IS NULL"


def upgrade() -> None:
    quotas = op.create_table(
        "quotas",
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("weight", sa.Float(53), nullable=False),
        *(sa.Column(name, sa.Integer(), nullable=True) for name in ("devices_max", "runs_max", "queued_max")),
        sa.Column("checkpoint_bytes_max", sa.BigInteger(), nullable=True),
        sa.Column("jobs_a_day_max", sa.Integer(), nullable=True),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("tenant", name="pk_quotas"),
    )
    now = datetime.now(UTC)
    op.bulk_insert(quotas, [{"tenant": "local", "weight": 1.0, "updated_at": now}])
    op.create_table(
        "shares",
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("used", sa.Float(53), nullable=False),
        sa.Column("used_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("tenant", name="pk_shares"),
    )
    op.create_table(
        "queue_turns",
        sa.Column("priority", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("priority", name="pk_queue_turns"),
    )
    op.drop_index("ix_runs_queue", "runs")
    _index("ix_runs_queue", "runs", ["tenant", "device", "queue_rank", "created_at", "id", "status"], QUEUED)
    _index("ix_runs_queue_deadline", "runs", ["queue_deadline_at"], QUEUED)
    _index("ix_runs_run_deadline", "runs", ["run_deadline_at"], HAS_DEADLINE)
    _index("ix_checkpoints_stored", "checkpoints", ["tenant", "size"], STORED)


def downgrade() -> None:
    op.drop_index("ix_checkpoints_stored", "checkpoints")
    for name in ("ix_runs_run_deadline", "ix_runs_queue_deadline", "ix_runs_queue"):
        op.drop_index(name, "runs")
    _index("ix_runs_queue", "runs", ["queue_rank", "created_at", "id"], QUEUED)
    for table in ("queue_turns", "shares", "quotas"):
        op.drop_table(table)


def _index(name: str, table: str, columns: list[str], where: str) -> None:
    op.create_index(name, table, columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))

"""Verifications that take time: audits, reruns, bisections; and the attestations of their verdicts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

TO_ATTEST = "verdict IS NOT NULL AND level <> 'check' AND log_index IS NULL"
VERIFICATIONS = sa.table("verifications", *(sa.column(name) for name in (
    "id", "tenant", "run_id", "compares_with", "executed_by", "level", "verdict", "message", "created_at", "ended_at")))
RUNS = sa.table("runs", *(sa.column(name) for name in ("id", "tenant", "reproduces", "verdict", "ended_at", "created_at")))


def upgrade() -> None:
    with op.batch_alter_table("verifications") as batch:
        batch.add_column(sa.Column("executed_by", sa.String(40), nullable=True))
        batch.add_column(sa.Column("against", sa.String(40), nullable=True))
        batch.add_column(sa.Column("plan", sa.Text(), nullable=True))
        batch.add_column(sa.Column("progress", sa.Text(), nullable=True))
        batch.add_column(sa.Column("report", sa.Text(), nullable=True))
        batch.add_column(sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True))
        batch.add_column(sa.Column("log_index", sa.Integer(), nullable=True))
        batch.alter_column("verdict", existing_type=sa.String(16), nullable=True)
        batch.alter_column("message", existing_type=sa.Text(), nullable=True)
    _name_the_verified_run()
    op.drop_index("ix_verifications_compares_with_created_at_id", "verifications")
    with op.batch_alter_table("verifications") as batch:
        batch.drop_constraint("fk_verifications_compares_with", type_="foreignkey")
        batch.drop_column("compares_with")
        batch.create_foreign_key("fk_verifications_executed_by", "runs", ["executed_by"], ["id"])
        batch.create_foreign_key("fk_verifications_against", "runs", ["against"], ["id"])
        batch.create_unique_constraint("uq_verifications_executed_by", ["executed_by"])
    op.create_index("ix_verifications_against", "verifications", ["against"])
    op.create_index("ix_verifications_unattested", "verifications", ["ended_at", "id"], sqlite_where=sa.text(TO_ATTEST),
                    postgresql_where=sa.text(TO_ATTEST))
    op.create_table(
        "verification_attestations",
        sa.Column("verification_id", sa.String(40), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("envelope", sa.Text(), nullable=False),
        sa.Column("key_id", sa.String(64), nullable=False),
        sa.Column("digest", sa.String(71), nullable=False),
        sa.Column("log_index", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("verification_id", name="pk_verification_attestations"),
        sa.ForeignKeyConstraint(["verification_id"], ["verifications.id"], name="fk_verification_attestations_verification_id"),
        sa.ForeignKeyConstraint(["key_id"], ["signing_keys.id"], name="fk_verification_attestations_key_id"),
        sa.ForeignKeyConstraint(["log_index"], ["log_entries.log_index"], name="fk_verification_attestations_log_index"),
        sa.UniqueConstraint("log_index", name="uq_verification_attestations_log_index"),
    )


def _name_the_verified_run() -> None:
    """A rerun's verdict stood on the run that did it, naming its original: now it stands on the original, naming who did it."""
    v, r = VERIFICATIONS, RUNS
    op.execute(v.update().values(ended_at=v.c.created_at))
    op.execute(v.update().where(v.c.level == "rerun").values(run_id=v.c.compares_with, executed_by=v.c.run_id))
    going = sa.select(
        sa.literal("ver_") + sa.func.substr(r.c.id, 5), r.c.tenant, r.c.reproduces, r.c.id, sa.literal("rerun"), r.c.created_at,
    ).where(r.c.reproduces.is_not(None), r.c.verdict.is_(None), r.c.ended_at.is_(None))
    op.execute(v.insert().from_select(["id", "tenant", "run_id", "executed_by", "level", "created_at"], going))


def downgrade() -> None:
    op.drop_table("verification_attestations")
    op.drop_index("ix_verifications_unattested", "verifications")
    op.execute(VERIFICATIONS.delete().where(VERIFICATIONS.c.verdict.is_(None)))
    with op.batch_alter_table("verifications") as batch:
        batch.add_column(sa.Column("compares_with", sa.String(40), nullable=True))
    v = VERIFICATIONS
    op.execute(v.update().where(v.c.executed_by.is_not(None)).values(run_id=v.c.executed_by, compares_with=v.c.run_id))
    op.drop_index("ix_verifications_against", "verifications")
    with op.batch_alter_table("verifications") as batch:
        batch.drop_constraint("uq_verifications_executed_by", type_="unique")
        batch.drop_constraint("fk_verifications_executed_by", type_="foreignkey")
        batch.drop_constraint("fk_verifications_against", type_="foreignkey")
        for name in ("executed_by", "against", "plan", "progress", "report", "ended_at", "log_index"):
            batch.drop_column(name)
        batch.alter_column("verdict", existing_type=sa.String(16), nullable=False)
        batch.alter_column("message", existing_type=sa.Text(), nullable=False)
        batch.create_foreign_key("fk_verifications_compares_with", "runs", ["compares_with"], ["id"])
    op.create_index("ix_verifications_compares_with_created_at_id", "verifications", ["compares_with", "created_at", "id"])

"""Jobs, runs, attempts, step records, checkpoints, verifications, events, logs, nodes, idempotency keys, API keys."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TABLES = ("jobs", "runs", "attempts", "step_records", "checkpoints", "verifications", "events", "logs", "nodes",
          "idempotency_keys", "api_keys")


def string(name: str, length: int = 40, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.String(length), nullable=nullable)


def digest(name: str, nullable: bool = True) -> sa.Column[Any]:
    return sa.Column(name, sa.String(71), nullable=nullable)


def integer(name: str, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.Integer(), autoincrement=False, nullable=nullable)


def big(name: str, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.BigInteger(), nullable=nullable)


def double(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.Float(53), nullable=False)


def text(name: str, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.Text(), nullable=nullable)


def time(name: str, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def primary(table: str, *columns: str) -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint(*columns, name=f"pk_{table}")


def foreign(table: str, column: str, target: str, ondelete: str | None = None) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint([column], [f"{target}.id"], name=f"fk_{table}_{column}", ondelete=ondelete)


def index(table: str, *columns: str) -> None:
    op.create_index(f"ix_{table}_{'_'.join(columns)}", table, list(columns))


def partial_index(name: str, columns: list[str], where: str) -> None:
    op.create_index(name, "runs", columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))


def upgrade() -> None:
    _jobs()
    _runs()
    _attempts()
    _step_records()
    _checkpoints()
    _verifications()
    _events_and_logs()
    _nodes_and_keys()


def downgrade() -> None:
    for table in reversed(TABLES):
        op.drop_table(table)


def _jobs() -> None:
    op.create_table(
        "jobs", string("id"), string("tenant", 64), string("name", 100), big("seed"), integer("steps"),
        digest("training_digest", nullable=False), text("submitted"), text("training"), text("execution"),
        text("manifest", nullable=True), digest("manifest_digest"), time("created_at"), primary("jobs", "id"),
    )
    index("jobs", "tenant", "created_at", "id")
    index("jobs", "tenant", "name")
    index("jobs", "training_digest")
    index("jobs", "manifest_digest")


def _runs() -> None:
    op.create_table(
        "runs", string("id"), string("tenant", 64), string("job_id"), string("kind", 16), string("reproduces", nullable=True),
        string("status", 16), string("desired_state", 16), string("stop_reason", 32, nullable=True),
        text("message", nullable=True), string("verdict", 16, nullable=True), text("execution"), string("device", 16),
        integer("devices"), integer("queue_rank"), integer("steps"), integer("attempt"), integer("failures"),
        integer("step", nullable=True), digest("head"), digest("weights"), integer("event_count"), integer("log_count"),
        string("lease_token", 64, nullable=True), string("lease_worker", 200, nullable=True),
        string("lease_boot", 64, nullable=True), time("lease_expires_at", nullable=True),
        time("created_at"), time("updated_at"), time("started_at", nullable=True), time("ended_at", nullable=True),
        time("retry_at", nullable=True), time("queue_deadline_at", nullable=True), time("run_deadline_at", nullable=True),
        primary("runs", "id"), foreign("runs", "job_id", "jobs"), foreign("runs", "reproduces", "runs"),
    )
    index("runs", "tenant", "created_at", "id")
    index("runs", "tenant", "status", "created_at", "id")
    index("runs", "job_id", "created_at", "id")
    index("runs", "weights")
    index("runs", "head")
    partial_index("ix_runs_queue", ["queue_rank", "created_at", "id"], "status = 'queued'")
    partial_index("ix_runs_lease", ["lease_expires_at"], "lease_token IS NOT NULL")


def _attempts() -> None:
    op.create_table(
        "attempts", string("run_id"), integer("attempt"), string("id"), string("tenant", 64), string("worker", 200),
        string("boot_id", 64), time("claimed_at"), time("started_at", nullable=True), time("running_at", nullable=True),
        time("ended_at", nullable=True), string("end_reason", 32, nullable=True), text("message", nullable=True),
        integer("from_step", nullable=True), digest("from_head"), integer("last_step", nullable=True),
        text("environment", nullable=True), text("placement", nullable=True),
        primary("attempts", "run_id", "attempt"), foreign("attempts", "run_id", "runs"),
        sa.UniqueConstraint("id", name="uq_attempts_id"),
    )


def _step_records() -> None:
    op.create_table(
        "step_records", string("run_id"), integer("step"), string("tenant", 64), digest("previous", nullable=False),
        digest("head", nullable=False), string("loss_bits", 8, nullable=True), string("grad_norm_bits", 8, nullable=True),
        big("tokens", nullable=True), digest("batch"), digest("expert_load"), digest("weights"), digest("optimizer"),
        digest("cursor"), integer("attempt"), double("seconds"), double("learning_rate"), text("metrics"), time("created_at"),
        primary("step_records", "run_id", "step"), foreign("step_records", "run_id", "runs"),
    )


def _checkpoints() -> None:
    op.create_table(
        "checkpoints", string("run_id"), integer("step"), string("tenant", 64), integer("attempt"), text("folder"), text("files"),
        big("size"), digest("weights", nullable=False), digest("optimizer", nullable=False), digest("cursor", nullable=False),
        digest("head", nullable=False), time("created_at"), time("deleted_at", nullable=True),
        primary("checkpoints", "run_id", "step"), foreign("checkpoints", "run_id", "runs"),
    )
    index("checkpoints", "weights")


def _verifications() -> None:
    op.create_table(
        "verifications", string("id"), string("tenant", 64), string("run_id"), string("compares_with", nullable=True),
        string("level", 16), string("verdict", 16), text("field", nullable=True), integer("step", nullable=True),
        text("expected", nullable=True), text("got", nullable=True), text("message"), time("created_at"),
        primary("verifications", "id"), foreign("verifications", "run_id", "runs"),
        foreign("verifications", "compares_with", "runs"),
    )
    index("verifications", "run_id", "created_at", "id")
    index("verifications", "compares_with", "created_at", "id")


def _events_and_logs() -> None:
    op.create_table(
        "events", string("run_id"), integer("number"), string("tenant", 64), string("type", 32), text("payload"),
        time("created_at"), primary("events", "run_id", "number"), foreign("events", "run_id", "runs"),
    )
    op.create_table(
        "logs", string("run_id"), integer("number"), string("tenant", 64), integer("attempt"), integer("sequence"),
        string("level", 16), integer("step", nullable=True), text("message"), time("created_at"),
        primary("logs", "run_id", "number"), foreign("logs", "run_id", "runs"),
        sa.UniqueConstraint("run_id", "attempt", "sequence", name="uq_logs_run_id_attempt_sequence"),
    )


def _nodes_and_keys() -> None:
    op.create_table(
        "nodes", string("name", 200), string("worker", 200), text("capacity"), text("labels"), time("heartbeat_at"),
        primary("nodes", "name"),
    )
    op.create_table(
        "idempotency_keys", string("tenant", 64), string("route", 200), string("key", 255), digest("body", nullable=False),
        string("job_id"), text("response"), time("created_at"), primary("idempotency_keys", "tenant", "route", "key"),
        foreign("idempotency_keys", "job_id", "jobs", ondelete="CASCADE"),
    )
    index("idempotency_keys", "job_id")
    op.create_table(
        "api_keys", string("id"), string("tenant", 64), string("name", 100), string("prefix", 16),
        digest("secret", nullable=False), text("scopes"), time("created_at"),
        time("expires_at", nullable=True), time("revoked_at", nullable=True),
        primary("api_keys", "id"), sa.UniqueConstraint("prefix", name="uq_api_keys_prefix"),
    )
    index("api_keys", "tenant", "created_at", "id")

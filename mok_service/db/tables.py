"""The tables. Every owned row names its tenant; times are UTC with microseconds; documents are JSON text.

JSON text rather than a JSON type: it keeps integers up to 2^63 - 1 exactly in both databases, and gives back the order of
keys that was stored.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.types import TypeDecorator

from mok_service.provenance.digest import Digest

metadata: Final = MetaData(naming_convention={
    "ix": "ix_%(table_name)s_%(column_0_N_name)s", "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s", "pk": "pk_%(table_name)s",
})


class UtcTime(TypeDecorator[datetime]):
    """A time-zone-aware time in UTC. SQLite keeps no zone: it is taken off and put back here."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        assert value.tzinfo is not None, f"a time without a zone: {value!r}"
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Json(TypeDecorator[Any]):
    """A document as JSON text, ASCII only: NUL and lone surrogates, which PostgreSQL's text can't hold, are escaped."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else json.dumps(value, separators=(",", ":"), allow_nan=False)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


class DigestText(TypeDecorator[Digest]):
    """A digest as it prints: `sha256:...`."""

    impl = String(71)
    cache_ok = True

    def process_bind_param(self, value: Digest | None, dialect: Dialect) -> str | None:
        return None if value is None else str(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Digest | None:
        return None if value is None else Digest.parse(value)


class Sentence(TypeDecorator[str]):
    """Text from outside (messages, log lines): what the databases can't store is replaced by U+FFFD."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None:
            return None
        return value.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def _id(name: str = "id", **more: Any) -> Column[str]:
    return Column(name, String(40), primary_key=True, **more)


def _run(**more: Any) -> Column[str]:
    return Column("run_id", String(40), ForeignKey("runs.id"), nullable=False, **more)


def _tenant() -> Column[str]:
    return Column("tenant", String(64), nullable=False)


def _time(name: str, nullable: bool = False) -> Column[datetime]:
    return Column(name, UtcTime, nullable=nullable)


def _digest(name: str, nullable: bool = True) -> Column[Digest]:
    return Column(name, DigestText, nullable=nullable)


jobs: Final = Table(
    "jobs", metadata,
    _id(), _tenant(),
    Column("name", String(100), nullable=False),
    Column("seed", BigInteger, nullable=False),
    Column("steps", Integer, nullable=False),
    _digest("training_digest", nullable=False),
    Column("submitted", Json, nullable=False),   # {"training": ..., "execution": ...} as submitted
    Column("training", Json, nullable=False),    # resolved
    Column("execution", Json, nullable=False),   # resolved; what a run gets when it has none of its own
    Column("manifest", Json),                    # written once, by the first attempt
    _digest("manifest_digest"),
    _time("created_at"),
    Index(None, "tenant", "created_at", "id"),
    Index(None, "tenant", "name"),
    Index(None, "training_digest"),
    Index(None, "manifest_digest"),
)

runs: Final = Table(
    "runs", metadata,
    _id(), _tenant(),
    Column("job_id", String(40), ForeignKey("jobs.id"), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("reproduces", String(40), ForeignKey("runs.id")),
    Column("status", String(16), nullable=False),
    Column("desired_state", String(16), nullable=False),
    Column("stop_reason", String(32)),
    Column("message", Sentence),
    Column("verdict", String(16)),               # of a reproduction
    Column("execution", Json, nullable=False),
    # Of the execution spec, for the queue. Lower ranks go first: minus the priority, so that one index gives the order.
    Column("device", String(16), nullable=False), Column("devices", Integer, nullable=False),
    Column("queue_rank", Integer, nullable=False),
    Column("steps", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("step", Integer),                     # last one stored
    _digest("head"), _digest("weights"),
    Column("event_count", Integer, nullable=False), Column("log_count", Integer, nullable=False),
    Column("lease_token", String(64)),
    Column("lease_worker", String(200)),
    Column("lease_boot", String(64)),
    _time("lease_expires_at", nullable=True),
    _time("created_at"), _time("updated_at"), _time("started_at", nullable=True), _time("ended_at", nullable=True),
    _time("retry_at", nullable=True), _time("queue_deadline_at", nullable=True), _time("run_deadline_at", nullable=True),
    Column("log_index", Integer),                # of its attestation; set after it has ended
    Index(None, "tenant", "created_at", "id"),
    Index(None, "tenant", "status", "created_at", "id"),
    Index(None, "job_id", "created_at", "id"),
    Index(None, "weights"), Index(None, "head"),
    Index("ix_runs_queue", "queue_rank", "created_at", "id",
          sqlite_where=text("status = 'queued'"), postgresql_where=text("status = 'queued'")),
    Index("ix_runs_lease", "lease_expires_at",
          sqlite_where=text("lease_token IS NOT NULL"), postgresql_where=text("lease_token IS NOT NULL")),
    Index("ix_runs_unattested", "ended_at", "id",
          sqlite_where=text("ended_at IS NOT NULL AND log_index IS NULL"),
          postgresql_where=text("ended_at IS NOT NULL AND log_index IS NULL")),
)

attempts: Final = Table(
    "attempts", metadata,
    _run(primary_key=True),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("id", String(40), nullable=False), _tenant(),
    Column("worker", String(200), nullable=False),
    Column("boot_id", String(64), nullable=False),
    _time("claimed_at"), _time("started_at", nullable=True), _time("running_at", nullable=True), _time("ended_at", nullable=True),
    Column("end_reason", String(32)),
    Column("message", Sentence),
    Column("from_step", Integer), _digest("from_head"),
    Column("last_step", Integer),
    Column("environment", Json), Column("placement", Json),
    UniqueConstraint("id"),
)

step_records: Final = Table(
    "step_records", metadata,
    _run(primary_key=True),
    Column("step", Integer, primary_key=True, autoincrement=False),
    _tenant(),
    # The hashed body, and its digest.
    _digest("previous", nullable=False), _digest("head", nullable=False),
    Column("loss_bits", String(8)), Column("grad_norm_bits", String(8)), Column("tokens", BigInteger),
    _digest("batch"), _digest("expert_load"), _digest("weights"), _digest("optimizer"), _digest("cursor"),
    # Unhashed.
    Column("attempt", Integer, nullable=False),
    Column("seconds", Float(53), nullable=False), Column("learning_rate", Float(53), nullable=False),
    Column("metrics", Json, nullable=False),
    _time("created_at"),
)

checkpoints: Final = Table(
    "checkpoints", metadata,
    _run(primary_key=True),
    Column("step", Integer, primary_key=True, autoincrement=False),
    _tenant(),
    Column("attempt", Integer, nullable=False),
    Column("folder", Text, nullable=False),
    Column("files", Json, nullable=False),
    Column("size", BigInteger, nullable=False),
    _digest("weights", nullable=False), _digest("optimizer", nullable=False), _digest("cursor", nullable=False),
    _digest("head", nullable=False),
    _time("created_at"), _time("deleted_at", nullable=True),
    Index(None, "weights"),
)

verifications: Final = Table(
    "verifications", metadata,
    _id(), _tenant(), _run(),
    Column("compares_with", String(40), ForeignKey("runs.id")),
    Column("level", String(16), nullable=False),
    Column("verdict", String(16), nullable=False),
    Column("field", Text), Column("step", Integer), Column("expected", Sentence), Column("got", Sentence),
    Column("message", Sentence, nullable=False),
    _time("created_at"),
    Index(None, "run_id", "created_at", "id"),
    Index(None, "compares_with", "created_at", "id"),
)

events: Final = Table(
    "events", metadata,
    _run(primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    _tenant(),
    Column("type", String(32), nullable=False),
    Column("payload", Json, nullable=False),
    _time("created_at"),
)

logs: Final = Table(
    "logs", metadata,
    _run(primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    _tenant(),
    Column("attempt", Integer, nullable=False),
    Column("sequence", Integer, nullable=False),  # the line's number in its attempt
    Column("level", String(16), nullable=False),
    Column("step", Integer),
    Column("message", Sentence, nullable=False),
    _time("created_at"),
    UniqueConstraint("run_id", "attempt", "sequence"),
)

attestations: Final = Table(
    "attestations", metadata,
    _run(primary_key=True), _tenant(),
    Column("envelope", Json, nullable=False),
    Column("key_id", String(64), ForeignKey("signing_keys.id"), nullable=False),
    _digest("digest", nullable=False),           # of the envelope's canonical bytes
    Column("log_index", Integer, ForeignKey("log_entries.log_index"), nullable=False),
    _time("created_at"),
    UniqueConstraint("log_index"),
)

# The append-only log of all attestations, a Merkle tree. The whole service has one; nobody owns it.
log_entries: Final = Table(
    "log_entries", metadata,
    Column("log_index", Integer, primary_key=True, autoincrement=False),
    _digest("entry", nullable=False),            # the attestation's digest
    Column("frontier", Json, nullable=False),    # of the tree with this entry: hashes, as hex digits
    Column("head", Json, nullable=False),        # of the tree with this entry: a signed envelope
    _time("created_at"),
)

# Public keys that have signed here.
signing_keys: Final = Table(
    "signing_keys", metadata,
    Column("id", String(64), primary_key=True),
    Column("pem", Text, nullable=False),
    _time("created_at"),
)

# What the cluster has, as a scheduler reports it. Nobody owns a node.
nodes: Final = Table(
    "nodes", metadata,
    Column("name", String(200), primary_key=True),
    Column("worker", String(200), nullable=False),
    Column("capacity", Json, nullable=False), Column("labels", Json, nullable=False),
    _time("heartbeat_at"),
)

idempotency_keys: Final = Table(
    "idempotency_keys", metadata,
    Column("tenant", String(64), primary_key=True),
    Column("route", String(200), primary_key=True),
    Column("key", String(255), primary_key=True),
    _digest("body", nullable=False),
    Column("job_id", String(40), ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
    Column("response", Json, nullable=False),     # as first answered
    _time("created_at"),
    Index(None, "job_id"),
)

api_keys: Final = Table(
    "api_keys", metadata,
    _id(), _tenant(),
    Column("name", String(100), nullable=False),
    Column("prefix", String(16), nullable=False),
    _digest("secret", nullable=False),            # the key's digest; the key itself is shown once and not stored
    Column("scopes", Json, nullable=False),
    _time("created_at"), _time("expires_at", nullable=True), _time("revoked_at", nullable=True),
    UniqueConstraint("prefix"),
    Index(None, "tenant", "created_at", "id"),
)

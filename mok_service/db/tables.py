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

# The kinds are lifecycle.UNCHAINED: they end without an attestation of their own, and would stay in the index for ever.
RUN_TO_ATTEST: Final = "ended_at IS NOT NULL AND log_index IS NULL AND kind NOT IN ('audit', 'bisect')"
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
    # Of the job, for the filters of lists: one index then gives both the filter and the order. They never change.
    Column("name", String(100)), Column("seed", BigInteger),
    Column("model", String(40)),                 # the preset whose shape it has
    Column("init_run", String(40)),              # of init_from: the run whose checkpoint it names
    _digest("init_weights"),                     # of init_from: their digest, where it is known at submit
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
    *(Index(None, "tenant", column, "created_at", "id") for column in ("kind", "name", "seed", "model")),
    Index(None, "job_id", "created_at", "id"),
    # The head of the chain changes at every step, so it has no index: it is the head of a step record, which has one.
    Index(None, "weights"),
    *(Index(f"ix_runs_{column}", column, sqlite_where=text(f"{column} IS NOT NULL"),
            postgresql_where=text(f"{column} IS NOT NULL")) for column in ("reproduces", "init_run", "init_weights")),
    # SQLite takes a partial index only for a condition that holds its words: `IS_QUEUED` and its like in db/queue.py.
    *(Index(f"ix_runs_{name}", *columns, sqlite_where=text(where), postgresql_where=text(where)) for name, columns, where in (
        ("queue", ("tenant", "device", "queue_rank", "created_at", "id", "status"), "status = 'queued'"),
        ("queue_deadline", ("queue_deadline_at",), "status = 'queued'"),
        ("run_deadline", ("run_deadline_at",), "run_deadline_at IS NOT NULL"),
    )),
    Index("ix_runs_lease", "lease_expires_at",
          sqlite_where=text("lease_token IS NOT NULL"), postgresql_where=text("lease_token IS NOT NULL")),
    Index("ix_runs_unattested", "ended_at", "id", sqlite_where=text(RUN_TO_ATTEST), postgresql_where=text(RUN_TO_ATTEST)),
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
    Column("node", String(200)),  # that the claim chose; None: of a scheduler that chose none
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
    # 16 hex digits find the rows, and the whole digest is compared in what they find: decision 8 says why.
    *(Index(f"ix_step_records_{column}", text(f"substr({column}, 8, 16)")) for column in ("head", "weights", "optimizer")),
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
    Index(None, "weights"), Index(None, "optimizer"),
    Index("ix_checkpoints_stored", "tenant", "size",
          sqlite_where=text("deleted_at IS NULL"), postgresql_where=text("deleted_at IS NULL")),
)

# Digests that stand inside documents: files of checkpoints and native libraries of attempts. Filled with the documents.
digest_uses: Final = Table(
    "digest_uses", metadata,
    _tenant(),
    Column("digest", DigestText, primary_key=True),
    _run(primary_key=True),
    Column("role", String(32), primary_key=True),  # checkpoint-file, native-library
    Column("place", Integer, primary_key=True, autoincrement=False),  # step of the checkpoint; number of the attempt
    Column("name", Text, primary_key=True),
    Index(None, "run_id", "role"),
)

# The files of data manifests, once for each manifest: many jobs share one.
manifest_files: Final = Table(
    "manifest_files", metadata,
    Column("tenant", String(64), primary_key=True),
    Column("manifest_digest", DigestText, primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    _digest("digest", nullable=False),
    Column("name", Text, nullable=False),
    Index(None, "tenant", "digest"),
)

VERDICT_TO_ATTEST: Final = "verdict IS NOT NULL AND level <> 'check' AND log_index IS NULL"
verifications: Final = Table(
    "verifications", metadata,
    _id(), _tenant(), _run(),                    # the run that is verified
    Column("executed_by", String(40), ForeignKey("runs.id")),  # the run that computes it again; none for a check
    Column("against", String(40), ForeignKey("runs.id")),      # of a bisect of two runs: the other one
    Column("level", String(16), nullable=False),
    Column("plan", Json),                        # what is computed again; written once, when it is asked for
    Column("progress", Json),                    # of a bisect, which has no step records: what it is at
    Column("verdict", String(16)),               # none before it ends, and none if it is cancelled
    Column("field", Text), Column("step", Integer), Column("expected", Sentence), Column("got", Sentence),
    Column("message", Sentence),
    Column("report", Json),                      # beside a good verdict: what it covers; of a bisect: what it found
    _time("created_at"), _time("ended_at", nullable=True),
    Column("log_index", Integer),                # of its attestation; set after it has ended
    Index(None, "run_id", "created_at", "id"),
    Index(None, "against"),
    UniqueConstraint("executed_by"),
    Index("ix_verifications_unattested", "ended_at", "id",
          sqlite_where=text(VERDICT_TO_ATTEST), postgresql_where=text(VERDICT_TO_ATTEST)),
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
    Index(None, "digest"),
)

verification_attestations: Final = Table(
    "verification_attestations", metadata,
    Column("verification_id", String(40), ForeignKey("verifications.id"), primary_key=True), _tenant(),
    Column("envelope", Json, nullable=False),
    Column("key_id", String(64), ForeignKey("signing_keys.id"), nullable=False),
    _digest("digest", nullable=False),           # of the envelope's canonical bytes
    Column("log_index", Integer, ForeignKey("log_entries.log_index"), nullable=False),
    _time("created_at"),
    UniqueConstraint("log_index"),
    Index(None, "digest"),
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

# What a tenant may have at most, and its share beside others. None: no limit; no row: no limits, and weight 1.
quotas: Final = Table(
    "quotas", metadata,
    Column("tenant", String(64), primary_key=True),
    Column("weight", Float(53), nullable=False),
    Column("devices_max", Integer), Column("runs_max", Integer), Column("queued_max", Integer),
    Column("checkpoint_bytes_max", BigInteger), Column("jobs_a_day_max", Integer),
    _time("updated_at"),
)

# What a tenant's ended attempts used: device-seconds, decayed until used_at (runs/queue.py).
shares: Final = Table(
    "shares", metadata,
    Column("tenant", String(64), primary_key=True),
    Column("used", Float(53), nullable=False),
    _time("used_at"),
)

# When a run of a priority last went first. Nobody owns a priority.
queue_turns: Final = Table(
    "queue_turns", metadata,
    Column("priority", Integer, primary_key=True, autoincrement=False),
    _time("at"),
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
    Column("scopes", Json, nullable=False),       # permissions that it is restricted to; none: all of its role
    Column("role", String(16), nullable=False, server_default="viewer"),
    Column("created_by", String(100)),            # who: a key's id, or the user of the command
    _time("created_at"), _time("expires_at", nullable=True), _time("revoked_at", nullable=True),
    _time("last_used_at", nullable=True),         # to a few minutes
    UniqueConstraint("prefix"),
    Index(None, "tenant", "created_at", "id"),
)

# Every write that somebody asked for. Numbers have no gaps in a tenant, and each entry has the digest of the one before.
audit_entries: Final = Table(
    "audit_entries", metadata,
    Column("tenant", String(64), primary_key=True), Column("number", Integer, primary_key=True, autoincrement=False),
    Column("actor", String(100), nullable=False), Column("role", String(16), nullable=False),
    Column("address", String(64)),
    Column("action", String(200), nullable=False),
    Column("ids", Json, nullable=False),
    _digest("body"),                              # of the request
    Column("outcome", Integer, nullable=False),
    Column("request", String(64), nullable=False),
    _digest("previous", nullable=False), _digest("digest", nullable=False),
    _time("created_at"),
)

# The last entry of each tenant: whoever appends holds its row.
audit_heads: Final = Table(
    "audit_heads", metadata,
    Column("tenant", String(64), primary_key=True),
    Column("length", Integer, nullable=False), _digest("digest", nullable=False),
)

webhooks: Final = Table(
    "webhooks", metadata,
    _id(), _tenant(),
    Column("url", Text, nullable=False), Column("events", Json, nullable=False),
    Column("secret", Text),                       # what deliveries are signed with; goes with the webhook
    _time("created_at"), _time("deleted_at", nullable=True),
    Index(None, "tenant", "created_at", "id"),
)

# The outbox: written in the transaction of the event, emptied by the scheduler's process.
deliveries: Final = Table(
    "deliveries", metadata,
    _id(), _tenant(),
    Column("webhook_id", String(40), ForeignKey("webhooks.id"), nullable=False),
    Column("type", String(32), nullable=False),
    Column("body", Text, nullable=False),         # as it is sent: JSON, ASCII
    Column("status", String(16), nullable=False), Column("attempts", Integer, nullable=False),
    _time("next_at"),
    Column("message", Text),                      # why the last attempt failed
    _time("created_at"), _time("ended_at", nullable=True),
    Index(None, "webhook_id", "created_at", "id"),
    Index("ix_deliveries_pending", "next_at", "webhook_id", "id",
          sqlite_where=text("status = 'pending'"), postgresql_where=text("status = 'pending'")),
)

"""Looking at runs: each function is one snapshot. Another tenant's run is NotFound, like one that doesn't exist."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection

from mok_service.db import queries
from mok_service.db.ids import is_id
from mok_service.db.session import Database
from mok_service.errors import InvalidSpec, NotFound
from mok_service.lifecycle import STATUSES, RunStatus
from mok_service.provenance.digest import Digest
from mok_service.provenance.manifest import DataManifest
from mok_service.provenance.record import Parts, assemble
from mok_service.runs import rows
from mok_service.runs.rows import Row
from mok_service.runs.types import (
    Attempt,
    Event,
    Node,
    Page,
    Run,
    StoredCheckpoint,
    StoredLog,
    StoredStep,
    Verification,
    time_text,
)
from mok_service.spec import TrainingSpec, training_document


def get_run(db: Database, run_id: str, tenant: str = "local") -> Run:
    """One run. Raises NotFound."""
    with db.read() as tx:
        return rows.run_of(_run(tx, run_id, tenant))


def list_runs(db: Database, tenant: str = "local", *, status: str | None = None, job: str | None = None,
              digest: str | None = None, cursor: str | None = None, limit: int = 50) -> Page[Run]:
    """The newest first. `digest` finds runs by their final weights, head of the chain, a checkpoint's weights, or the training
    spec or data manifest of their job. Raises InvalidSpec for an unknown status, a malformed digest, cursor or limit."""
    if status is not None and status not in STATUSES:
        raise InvalidSpec(f"status: {status!r:.40} isn't a status; allowed: {', '.join(STATUSES)}", field="status",
                          value=status[:40])
    if job is not None and not is_id(job, "job"):
        return Page((), None)
    after, wanted = rows.decode_cursor(cursor), parse_digest(digest)
    with db.read() as tx:
        found = queries.run_page(tx, tenant, after, rows.check_limit(limit), status, job, wanted)
    return rows.page_of(found, limit, rows.run_of)


def parse_digest(text: str | None) -> Digest | None:
    """The digest that a filter names. Raises InvalidSpec."""
    try:
        return None if text is None else Digest.parse(text)
    except ValueError as error:
        raise InvalidSpec(f"digest: {error}", field="digest", value=str(text)[:100]) from None


def steps(db: Database, run_id: str, after: int = -1, limit: int = 1000, tenant: str = "local") -> list[StoredStep]:
    """Step records after step `after`, in order; -1 begins with record 0."""
    with db.read() as tx:
        _run(tx, run_id, tenant)
        return [rows.step_of(row) for row in queries.steps_after(tx, run_id, _number(after), rows.check_limit(limit))]


def events(db: Database, run_id: str, after: int = 0, limit: int = 1000, tenant: str = "local") -> list[Event]:
    """Events after number `after`, in order, without gaps; 0 begins with the first."""
    with db.read() as tx:
        _run(tx, run_id, tenant)
        return [rows.event_of(row) for row in queries.events_after(tx, run_id, _number(after), rows.check_limit(limit))]


def logs(db: Database, run_id: str, after: int = 0, limit: int = 1000, tenant: str = "local") -> list[StoredLog]:
    """Log lines after number `after`, in order; 0 begins with the first."""
    with db.read() as tx:
        _run(tx, run_id, tenant)
        return [rows.log_of(row) for row in queries.logs_after(tx, run_id, _number(after), rows.check_limit(limit))]


def _number(after: int) -> int:
    """Numbers are 32 bits in the database."""
    return max(-1, min(after, 2**31 - 1))


def checkpoints(db: Database, run_id: str, tenant: str = "local") -> list[StoredCheckpoint]:
    """All checkpoints on record, by step."""
    with db.read() as tx:
        _run(tx, run_id, tenant)
        return [rows.checkpoint_of(row) for row in queries.checkpoints_of(tx, run_id)]


def attempts(db: Database, run_id: str, tenant: str = "local") -> list[Attempt]:
    """All attempts, the first one first."""
    with db.read() as tx:
        _run(tx, run_id, tenant)
        return [rows.attempt_of(row) for row in queries.attempts_of(tx, run_id)]


def verifications(db: Database, run_id: str, tenant: str = "local") -> list[Verification]:
    """Verdicts on this run, and on runs that were compared with it, the oldest first."""
    with db.read() as tx:
        _run(tx, run_id, tenant)
        return [rows.verification_of(row) for row in queries.verifications_of(tx, run_id)]


def get_verification(db: Database, verification_id: str, tenant: str = "local") -> Verification:
    """One verdict. Raises NotFound."""
    with db.read() as tx:
        row = queries.verification(tx, verification_id, tenant) if is_id(verification_id, "ver") else None
    if row is None:
        raise NotFound(f"there is no verification {verification_id!r:.60}", verification=verification_id[:60])
    return rows.verification_of(row)


def nodes(db: Database) -> list[Node]:
    """The machines, as schedulers last saw them, by name."""
    with db.read() as tx:
        return [rows.node_of(row) for row in queries.all_nodes(tx)]


def count_by_status(db: Database) -> dict[RunStatus, int]:
    """How many runs of all tenants there are in each status."""
    with db.read() as tx:
        counts = queries.run_counts(tx)
    return {status: counts.get(status, 0) for status in STATUSES}


def provenance(db: Database, run_id: str, tenant: str = "local") -> dict[str, Any]:
    """The record of a run (provenance/record.py), from one snapshot."""
    with db.read() as tx:
        run = _run(tx, run_id, tenant)
        job = queries.job(tx, run["job_id"])
        assert job is not None
        stored = [rows.step_of(row) for row in queries.steps_after(tx, run_id, -1, None)]
        tried = queries.attempts_of(tx, run_id)
        # The job has its manifest from whichever run first read the data: this run has it once it has read them itself.
        manifest = job["manifest"] if any(attempt["running_at"] for attempt in tried) else None
        return assemble(Parts(
            identity=_identity(run), submitted=job["submitted"], training=job["training"],
            training_document=training_document(TrainingSpec.model_validate(job["training"])), execution=run["execution"],
            manifest=None if manifest is None else DataManifest.from_document(manifest),
            records=[step.record for step in stored], notes=[{"attempt": s.attempt, "at": time_text(s.at)} for s in stored],
            checkpoints=_dicts([rows.checkpoint_of(row) for row in queries.checkpoints_of(tx, run_id)]),
            attempts=_dicts([rows.attempt_of(row) for row in tried]),
            verifications=_dicts([rows.verification_of(row) for row in queries.verifications_of(tx, run_id)]),
        ))


def _dicts(values: Sequence[StoredCheckpoint | Attempt | Verification]) -> list[dict[str, Any]]:
    return [value.as_dict() for value in values]


def _identity(row: Row) -> dict[str, Any]:
    weights: Digest | None = row["weights"]
    same = ("tenant", "kind", "reproduces", "status", "stop_reason", "message", "verdict")
    times: dict[str, datetime | None] = {name: row[name] for name in ("created_at", "started_at", "ended_at")}
    return {"run": row["id"], "job": row["job_id"], **{name: row[name] for name in same},
            "weights": None if weights is None else str(weights), **{name: time_text(at) for name, at in times.items()}}


def _run(tx: Connection, run_id: str, tenant: str) -> Row:
    row = queries.run(tx, run_id, tenant) if is_id(run_id, "run") else None
    if row is None:
        raise NotFound(f"there is no run {run_id!r:.60}", run=run_id[:60])
    return row

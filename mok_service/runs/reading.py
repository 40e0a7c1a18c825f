"""Looking at runs: each function is one snapshot. Another tenant's run is NotFound, like one that doesn't exist."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection

from mok_service.db import lineage, queries
from mok_service.db.ids import is_id
from mok_service.db.session import Database
from mok_service.errors import InvalidSpec, NotFound
from mok_service.lifecycle import STATUSES
from mok_service.provenance.audit import Plan
from mok_service.provenance.bisection import BisectPlan
from mok_service.provenance.digest import Digest
from mok_service.provenance.manifest import DataManifest
from mok_service.provenance.record import Parts, assemble, shown_step
from mok_service.runs import rows
from mok_service.runs.comparing import plan_of
from mok_service.runs.rows import Row
from mok_service.runs.types import (
    RUN_KINDS,
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
from mok_service.spec import PRESETS, SEED_MAX, TrainingSpec, training_digest, training_document

_BARE: Final = re.compile("[0-9a-f]{64}")


def get_run(db: Database, run_id: str, tenant: str = "local") -> Run:
    """One run. Raises NotFound."""
    with db.read() as tx:
        return rows.run_of(run_row(tx, run_id, tenant))


def list_runs(db: Database, tenant: str = "local", *, status: str | None = None, job: str | None = None,
              digest: str | None = None, kind: str | None = None, name: str | None = None, model: str | None = None,
              seed: int | None = None, parent: str | None = None, since: datetime | None = None, until: datetime | None = None,
              cursor: str | None = None, limit: int = 50) -> Page[Run]:
    """The newest first. All filters must hold.

    `digest` finds runs by their final weights, the head or the state of a step, a checkpoint's weights, the weights they
    started from, or their job's training spec or data manifest. `model` is a preset, found by its sizes; `name` the job's.
    `parent` is a run that was reproduced, or whose weights another one started from. Made at `since` or later, before `until`
    (with a zone). Raises InvalidSpec for an unknown status, kind or model, a seed out of range, a malformed digest or time,
    cursor or limit.
    """
    for field, value, allowed in (("status", status, STATUSES), ("kind", kind, RUN_KINDS), ("model", model, tuple(PRESETS))):
        if value is not None and value not in allowed:
            raise InvalidSpec(f"{field}: {value!r:.40} is unknown; allowed: {', '.join(allowed)}", field=field, value=value[:40])
    if seed is not None and not 0 <= seed <= SEED_MAX:
        raise InvalidSpec(f"seed: {seed} isn't allowed; allowed: 0 to {SEED_MAX}", field="seed", value=seed)
    for field, at in (("since", since), ("until", until)):
        if at is not None and at.tzinfo is None:
            raise InvalidSpec(f"{field}: {at.isoformat()} has no zone; allowed: a time such as 2026-12-01T10:00:00Z", field=field)
    after, wanted = rows.decode_cursor(cursor), parse_digest(digest)
    strange = (job is not None and not is_id(job, "job")) or (parent is not None and not is_id(parent, "run"))
    if strange or (name is not None and not name.isprintable()):
        return Page((), None)  # nothing has such an id or name, and PostgreSQL refuses to look for some
    chosen = lineage.RunFilter(status, job, wanted, kind, name, model, seed, parent, since, until)
    with db.read() as tx:
        found = lineage.run_page(tx, tenant, after, rows.check_limit(limit), chosen)
    return rows.page_of(found, limit, rows.run_of)


def parse_digest(text: str | None) -> Digest | None:
    """The digest that a filter names; 64 bare hex digits are a sha256. Raises InvalidSpec."""
    try:
        return None if text is None else Digest.parse(f"sha256:{text}" if _BARE.fullmatch(text) else text)
    except ValueError as error:
        raise InvalidSpec(f"digest: {error}", field="digest", value=str(text)[:100]) from None


def steps(db: Database, run_id: str, after: int = -1, limit: int = 1000, tenant: str = "local") -> list[StoredStep]:
    """Step records after step `after`, in order; -1 begins with record 0."""
    with db.read() as tx:
        run_row(tx, run_id, tenant)
        return [rows.step_of(row) for row in queries.steps_after(tx, run_id, _number(after), rows.check_limit(limit))]


def events(db: Database, run_id: str, after: int = 0, limit: int = 1000, tenant: str = "local") -> list[Event]:
    """Events after number `after`, in order, without gaps; 0 begins with the first."""
    with db.read() as tx:
        run_row(tx, run_id, tenant)
        return [rows.event_of(row) for row in queries.events_after(tx, run_id, _number(after), rows.check_limit(limit))]


def logs(db: Database, run_id: str, after: int = 0, limit: int = 1000, tenant: str = "local") -> list[StoredLog]:
    """Log lines after number `after`, in order; 0 begins with the first."""
    with db.read() as tx:
        run_row(tx, run_id, tenant)
        return [rows.log_of(row) for row in queries.logs_after(tx, run_id, _number(after), rows.check_limit(limit))]


def _number(after: int) -> int:
    """Numbers are 32 bits in the database."""
    return max(-1, min(after, 2**31 - 1))


def checkpoints(db: Database, run_id: str, tenant: str = "local") -> list[StoredCheckpoint]:
    """All checkpoints on record, by step."""
    with db.read() as tx:
        run_row(tx, run_id, tenant)
        return [rows.checkpoint_of(row) for row in queries.checkpoints_of(tx, run_id)]


def attempts(db: Database, run_id: str, tenant: str = "local") -> list[Attempt]:
    """All attempts, the first one first."""
    with db.read() as tx:
        run_row(tx, run_id, tenant)
        return [rows.attempt_of(row) for row in queries.attempts_of(tx, run_id)]


def verifications(db: Database, run_id: str, tenant: str = "local") -> list[Verification]:
    """Verdicts on this run, of bisects also where it's the other one, and that of which it is the executor; the oldest first."""
    with db.read() as tx:
        run_row(tx, run_id, tenant)
        return [rows.verification_of(row) for row in queries.verifications_of(tx, run_id)]


def get_verification(db: Database, verification_id: str, tenant: str = "local") -> Verification:
    """One verdict. Raises NotFound."""
    with db.read() as tx:
        row = queries.verification(tx, verification_id, tenant) if is_id(verification_id, "ver") else None
    if row is None:
        raise NotFound(f"there is no verification {verification_id!r:.60}", verification=verification_id[:60])
    return rows.verification_of(row)


def plan_of_audit(db: Database, run: Run) -> Plan | None:
    """What an audit is to replay; None for a run that trains."""
    with db.read() as tx:
        return plan_of(tx, run.id, run.kind)


def plan_of_bisect(db: Database, run: Run) -> BisectPlan | None:
    """Which executions a bisect compares; None for any other run."""
    if run.kind != "bisect":
        return None
    with db.read() as tx:
        row = queries.verification_by(tx, run.id)
    assert row is not None, "a bisect carries out a verification"
    return BisectPlan.from_document(row["plan"])


def nodes(db: Database) -> list[Node]:
    """The machines, as schedulers last saw them, by name."""
    with db.read() as tx:
        return [rows.node_of(row) for row in queries.all_nodes(tx)]


def provenance(db: Database, run_id: str, tenant: str = "local") -> dict[str, Any]:
    """The record of a run (provenance/record.py), from one snapshot."""
    with db.read() as tx:
        run = run_row(tx, run_id, tenant)
        job = queries.job(tx, run["job_id"])
        assert job is not None
        stored = [rows.step_of(row) for row in queries.steps_after(tx, run_id, -1, None)]
        tried = queries.attempts_of(tx, run_id)
        return assemble(Parts(
            identity=_identity(run), submitted=job["submitted"], training=job["training"],
            training_document=training_document(TrainingSpec.model_validate(job["training"])), execution=run["execution"],
            manifest=_manifest(tx, run_id, job),
            records=[step.record for step in stored], notes=[{"attempt": s.attempt, "at": time_text(s.at)} for s in stored],
            checkpoints=_dicts([rows.checkpoint_of(row) for row in queries.checkpoints_of(tx, run_id)]),
            attempts=_dicts([rows.attempt_of(row) for row in tried]),
            verifications=_dicts([rows.verification_of(row) for row in queries.verifications_of(tx, run_id)]),
        ))


def record_to_bisect(db: Database, run_id: str, tenant: str = "local") -> dict[str, Any]:
    """What a bisect needs of the record of a run (training/bisect.py, `side_of`): these parts of `provenance`, as they are there,
    without what attempts and verifications say."""
    with db.read() as tx:
        run = run_row(tx, run_id, tenant)
        job = queries.job(tx, run["job_id"])
        assert job is not None
        training, manifest = job["training"], _manifest(tx, run_id, job)
        return {
            "identity": {"status": run["status"], "stop_reason": run["stop_reason"]},
            "spec": {"training": training, "training_digest": training_digest(TrainingSpec.model_validate(training))},
            "arithmetic": {"name": training["arithmetic"]},
            "data": None if manifest is None else {"manifest": manifest.document()},
            "chain": {"records": [shown_step(rows.record_of(row)) for row in queries.steps_after(tx, run_id, -1, None)]},
            "checkpoints": _dicts([rows.checkpoint_of(row) for row in queries.checkpoints_of(tx, run_id)]),
        }


def _manifest(tx: Connection, run_id: str, job: Row) -> DataManifest | None:
    """The job has its manifest from whichever run first read the data: a run has it once it has read them itself."""
    if job["manifest"] is None or not queries.has_read_data(tx, run_id):
        return None
    return DataManifest.from_document(job["manifest"])


def _dicts(values: Sequence[StoredCheckpoint | Attempt | Verification]) -> list[dict[str, Any]]:
    return [value.as_dict() for value in values]


def _identity(row: Row) -> dict[str, Any]:
    weights: Digest | None = row["weights"]
    same = ("tenant", "kind", "reproduces", "status", "stop_reason", "message", "verdict")
    times: dict[str, datetime | None] = {name: row[name] for name in ("created_at", "started_at", "ended_at")}
    return {"run": row["id"], "job": row["job_id"], **{name: row[name] for name in same},
            "weights": None if weights is None else str(weights), **{name: time_text(at) for name, at in times.items()}}


def run_row(tx: Connection, run_id: str, tenant: str) -> Row:
    """The row of a run. Raises NotFound."""
    row = queries.run(tx, run_id, tenant) if is_id(run_id, "run") else None
    if row is None:
        raise rows.no_such_run(run_id)
    return row

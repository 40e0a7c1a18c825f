"""The use cases of jobs: submit one, look at them, run one again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Self

from sqlalchemy import Connection

from mok_service import auditlog
from mok_service.db import queries, tables
from mok_service.db.ids import is_id, new_id
from mok_service.db.session import Database
from mok_service.errors import Conflict, NotFound, Unrunnable
from mok_service.idempotency import Answer, Idempotency, answered, once
from mok_service.lifecycle import FINAL, UNCHAINED
from mok_service.provenance.audit import Plan
from mok_service.provenance.bisection import BisectPlan
from mok_service.provenance.digest import Digest
from mok_service.provenance.manifest import DataManifest
from mok_service.runs import rows
from mok_service.runs.clusters import refuse_what_never_fits
from mok_service.runs.quotas import refuse_over_quota
from mok_service.runs.reading import parse_digest
from mok_service.runs.rows import Row, run_of
from mok_service.runs.types import Page, Run, RunKind, time_from_text, time_text
from mok_service.spec import (
    ExecutionSpec,
    JobSpec,
    Machine,
    TrainingSpec,
    check_runnable,
    parse_job,
    preset_of,
    resolve,
    training_digest,
)


@dataclass(frozen=True, slots=True)
class Job:
    """What was asked: an immutable, fully resolved training spec, and the execution spec of its first run."""

    id: str
    tenant: str
    training: TrainingSpec           # resolved
    training_digest: Digest
    execution: ExecutionSpec         # resolved
    submitted: Mapping[str, Any]     # the spec as submitted: {"training": ..., "execution": ...}
    manifest: DataManifest | None    # written once, by the first attempt
    created_at: datetime

    @property
    def spec(self) -> JobSpec:
        """Training and execution together."""
        return JobSpec(training=self.training, execution=self.execution)

    def as_dict(self) -> dict[str, Any]:
        """The REST shape."""
        return {
            "id": self.id, "tenant": self.tenant, "name": self.training.name, "digest": str(self.training_digest),
            "seed": self.training.seed, "steps": self.training.steps, "training": self.training.model_dump(mode="json"),
            "execution": self.execution.model_dump(mode="json"), "submitted": dict(self.submitted),
            "manifest": None if self.manifest is None else self.manifest.document(),
            "manifest_digest": None if self.manifest is None else str(self.manifest.digest()),
            "created_at": time_text(self.created_at),
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """The inverse of `as_dict`."""
        at = time_from_text(value["created_at"])
        assert at is not None, "a job has a time"
        return cls(
            value["id"], value["tenant"], TrainingSpec.model_validate(value["training"]), Digest.parse(value["digest"]),
            ExecutionSpec.model_validate(value["execution"]), value["submitted"],
            None if value["manifest"] is None else DataManifest.from_document(value["manifest"]), at,
        )


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job and its first run. `created` is False when an Idempotency-Key was seen before: both are then as first answered."""

    job: Job
    run: Run
    created: bool


def submit(db: Database, spec: JobSpec, *, tenant: str = "local", idempotency: Idempotency | None = None,
           machine: Machine | None = None, now: datetime | None = None) -> Submitted:
    """Stores a job and queues its first run, in one transaction.

    Every default is resolved and a seed drawn if there is none; `init_from` a run's checkpoint gets that checkpoint's digest.
    Raises Unrunnable when `machine`, or the cluster as schedulers reported it, can't run it; Conflict when the
    Idempotency-Key was used with another body; QuotaExceeded and QuotaForbids by the tenant's quota.
    """
    seen = answered(db, tenant, idempotency)
    if seen is not None:
        return _submitted_before(seen)
    at = now if now is not None else db.now()
    resolved = resolve(_with_initial_weights(db, spec, tenant))
    if machine is not None:
        check_runnable(resolved, machine)
    job = Job(new_id("job"), tenant, resolved.training, Digest.parse(training_digest(resolved.training)), resolved.execution,
              spec.model_dump(mode="json"), None, at)

    def store(tx: Connection) -> Answer[Submitted]:
        refuse_what_never_fits(tx, resolved.execution, at)
        refuse_over_quota(tx, tenant, resolved.execution, at, new_job=True)
        queries.add(tx, tables.jobs, [_job_row(job)])
        run = queue_run(tx, job, resolved.execution, "original", None, at)
        return Answer(Submitted(job, run, created=True), job.id, {"job": job.as_dict(), "run": run.as_dict()})

    return once(db, tenant, idempotency, store, _submitted_before, at)


def get_job(db: Database, job_id: str, tenant: str = "local") -> Job:
    """One job. Raises NotFound, also for another tenant's."""
    with db.read() as tx:
        return find_job(tx, job_id, tenant)


def find_job(tx: Connection, job_id: str, tenant: str) -> Job:
    """The same, in a transaction."""
    row = queries.job(tx, job_id, tenant) if is_id(job_id, "job") else None
    if row is None:
        raise NotFound(f"there is no job {job_id!r:.60}", job=job_id[:60])
    return _job_of(row)


def list_jobs(db: Database, tenant: str = "local", cursor: str | None = None, limit: int = 50, name: str | None = None,
              digest: str | None = None) -> Page[Job]:
    """The newest first. `digest` finds jobs by their training spec or data manifest. Raises InvalidSpec for a malformed digest,
    cursor or limit."""
    after, wanted = rows.decode_cursor(cursor), parse_digest(digest)
    if name is not None and not name.isprintable():
        return Page((), None)  # no job has such a name, and PostgreSQL refuses to look for some
    with db.read() as tx:
        found = queries.job_page(tx, tenant, after, rows.check_limit(limit), name, wanted)
    return rows.page_of(found, limit, _job_of)


def create_run(db: Database, job_id: str, *, execution: ExecutionSpec | None = None, reproduces: str | None = None,
               tenant: str = "local", idempotency: Idempotency | None = None, machine: Machine | None = None,
               now: datetime | None = None) -> Run:
    """Queues another run of a job: a reproduction, which is compared step by step with an earlier run.

    That is `reproduces`; or else the job's first run that succeeded, or the first that ended and left records. Where every
    run ended and none left any, there is nothing to compare with, and the new run is an original again. `execution` replaces
    the job's. Raises NotFound for an unknown job or run; Conflict when the run to reproduce hasn't ended or left no records;
    InvalidSpec or Unrunnable for an execution spec that doesn't go with the job.
    """
    seen = answered(db, tenant, idempotency)
    if seen is not None:
        return _run_before(seen)
    at = now if now is not None else db.now()

    def store(tx: Connection) -> Answer[Run]:
        job = find_job(tx, job_id, tenant)
        resolved = _execution(job, execution)
        if machine is not None:
            check_runnable(JobSpec(training=job.training, execution=resolved), machine)
        refuse_what_never_fits(tx, resolved, at)
        refuse_over_quota(tx, tenant, resolved, at, new_job=False)
        original = _run_to_reproduce(tx, job, reproduces)
        run = queue_run(tx, job, resolved, "original" if original is None else "reproduction", original, at)
        return Answer(run, job.id, {"run": run.as_dict()})

    return once(db, tenant, idempotency, store, _run_before, at)


# ---- Parts -----------------------------------------------------------------------------------------------------------

def _submitted_before(response: Mapping[str, Any]) -> Submitted:
    return Submitted(Job.from_dict(response["job"]), Run.from_dict(response["run"]), created=False)


def _run_before(response: Mapping[str, Any]) -> Run:
    return Run.from_dict(response["run"])


def _with_initial_weights(db: Database, spec: JobSpec, tenant: str) -> JobSpec:
    """The spec with the digest of the checkpoint that `init_from` names, when that is a checkpoint of a run."""
    start = spec.training.init_from
    if start is None or "@" not in start.source or not start.source.startswith("run_"):
        return spec
    run_id, step = start.source.split("@")
    with db.read() as tx:
        known = is_id(run_id, "run") and queries.run(tx, run_id, tenant) is not None
        checkpoint = queries.checkpoint(tx, run_id, int(step)) if known else None
    if checkpoint is None or checkpoint["deleted_at"] is not None:
        raise Unrunnable(f"training.init_from.source: there is no checkpoint {start.source}", field="training.init_from.source",
                         value=start.source)
    weights = str(checkpoint["weights"])
    if start.weights not in (None, weights):
        raise Unrunnable(f"training.init_from.weights: {start.source} has the weights {weights}, not {start.weights}",
                         field="training.init_from.weights", value=start.weights, allowed=weights)
    values = spec.model_dump()
    values["training"]["init_from"]["weights"] = weights
    return JobSpec.model_validate(values)


def _execution(job: Job, execution: ExecutionSpec | None) -> ExecutionSpec:
    """The execution spec of another run, resolved. Raises InvalidSpec when it doesn't go with the training spec."""
    if execution is None:
        return job.execution
    together = {"training": job.training.model_dump(mode="json"), "execution": execution.model_dump(mode="json")}
    return resolve(parse_job(together)).execution


def _run_to_reproduce(tx: Connection, job: Job, wanted: str | None) -> Row | None:
    of_job = [run for run in queries.runs_of_job(tx, job.id) if run["kind"] not in UNCHAINED]  # those have no whole chain
    if wanted is not None:
        found = next((run for run in of_job if run["id"] == wanted), None)
        if found is None:
            raise NotFound(f"job {job.id} has no run {wanted!r:.60}", job=job.id, run=wanted[:60])
        if found["status"] not in FINAL:
            raise Conflict(f"run {wanted} is {found['status']}: it can be reproduced once it has ended", run=wanted,
                           status=found["status"])
        if found["step"] is None:
            raise Conflict(f"run {wanted} left no step record: there is nothing to compare with", run=wanted,
                           status=found["status"])
        return found
    ended: list[Callable[[Row], bool]] = [lambda run: run["status"] == "succeeded",
                                          lambda run: run["status"] in FINAL and run["step"] is not None]
    for is_wanted in ended:
        for run in of_job:
            if is_wanted(run):
                return run
    going = next((run for run in of_job if run["status"] not in FINAL), None)
    if going is not None:
        raise Conflict(f"run {going['id']} is {going['status']}: it can be reproduced once it has ended", run=going["id"],
                       status=going["status"])
    return None


def queue_run(tx: Connection, job: Job, execution: ExecutionSpec, kind: RunKind, original: Row | None, now: datetime,
              plan: Plan | BisectPlan | None = None) -> Run:
    """Inserts a run, its first event and, where it verifies another one, that verification."""
    row = {
        "id": new_id("run"), "tenant": job.tenant, "job_id": job.id, "kind": kind,
        "reproduces": None if original is None else original["id"], "status": "queued", "desired_state": "run",
        "stop_reason": None, "message": None, "verdict": None, "execution": execution.model_dump(mode="json"),
        "device": execution.device, "devices": execution.count, "queue_rank": -execution.priority,
        "steps": plan.end if isinstance(plan, Plan) else job.training.steps,
        **_filters(job.training), "attempt": 0, "failures": 0,
        "step": None, "head": None, "weights": None, "event_count": 1, "log_count": 0, "lease_worker": None, "created_at": now,
        "updated_at": now, "started_at": None, "ended_at": None, "retry_at": None, "run_deadline_at": None,
        "queue_deadline_at": now + timedelta(seconds=execution.queue_deadline_seconds),
    }
    auditlog.note(job=job.id, run=str(row["id"]))
    queries.add(tx, tables.runs, [row])
    queries.add(tx, tables.events, [{
        "run_id": row["id"], "number": 1, "tenant": job.tenant, "type": "run.status", "created_at": now,
        "payload": {"status": "queued", "from": None, "attempt": 0, "desired_state": "run", "stop_reason": None, "message": None,
                    "verdict": None},
    }])
    if original is not None:
        queries.add(tx, tables.verifications, [{
            "id": new_id("ver"), "tenant": job.tenant, "run_id": original["id"], "executed_by": row["id"],
            "against": plan.second.run if isinstance(plan, BisectPlan) else None,
            "level": "rerun" if kind == "reproduction" else kind, "plan": None if plan is None else plan.document(),
            "created_at": now,
        }])
    return run_of(row)


def _filters(training: TrainingSpec) -> dict[str, Any]:
    """What lists of runs filter by, of a resolved training spec."""
    start = training.init_from
    run, at, _ = ("", "", "") if start is None else start.source.partition("@")
    weights = None if start is None or start.weights is None else Digest.parse(start.weights)
    return {"name": training.name, "seed": training.seed, "model": preset_of(training.model.model_dump()),
            "init_run": run if at and run.startswith("run_") else None, "init_weights": weights}


def _job_row(job: Job) -> dict[str, Any]:
    return {
        "id": job.id, "tenant": job.tenant, "name": job.training.name, "seed": job.training.seed, "steps": job.training.steps,
        "training_digest": job.training_digest, "submitted": job.submitted, "training": job.training.model_dump(mode="json"),
        "execution": job.execution.model_dump(mode="json"), "created_at": job.created_at,
    }


def _job_of(row: Row) -> Job:
    return Job(
        row["id"], row["tenant"], TrainingSpec.model_validate(row["training"]), row["training_digest"],
        ExecutionSpec.model_validate(row["execution"]), row["submitted"],
        None if row["manifest"] is None else DataManifest.from_document(row["manifest"]), row["created_at"],
    )

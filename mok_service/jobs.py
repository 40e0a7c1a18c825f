"""The use cases of jobs: submit one, look at them, run one again, verify a run of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final, Generic, Literal, Self, TypeVar

from sqlalchemy import Connection

from mok_service import auditlog
from mok_service.db import queries, tables
from mok_service.db.ids import is_id, new_id
from mok_service.db.session import Database
from mok_service.errors import Conflict, InvalidSpec, NotFound, QuotaExceeded, Unrunnable
from mok_service.lifecycle import FINAL, UNCHAINED
from mok_service.provenance.audit import Plan, draw, segments_of
from mok_service.provenance.bisection import BisectPlan, PlannedSide
from mok_service.provenance.compare import changes
from mok_service.provenance.digest import Digest
from mok_service.provenance.manifest import DataManifest
from mok_service.provenance.measure import Read
from mok_service.provenance.verify import check as check_record
from mok_service.runs import rows
from mok_service.runs.clusters import refuse_what_never_fits
from mok_service.runs.judging import judge
from mok_service.runs.locked import LockedRun
from mok_service.runs.quotas import refuse_over_quota
from mok_service.runs.reading import get_verification, parse_digest, provenance, run_row
from mok_service.runs.rows import Row, run_of
from mok_service.runs.types import Page, Run, RunKind, Verification, time_from_text, time_text
from mok_service.runs.wishes import cancel
from mok_service.spec import (
    ExecutionSpec,
    JobSpec,
    Machine,
    TrainingSpec,
    check_runnable,
    draw_seed,
    override_execution,
    parse_job,
    preset_of,
    resolve,
    training_digest,
)

KEY_LENGTH_MAX: Final = 255
ROUTE_LENGTH_MAX: Final = 200
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Idempotency:
    """An Idempotency-Key: `route` is method and path ("POST /v1/jobs"), `body` the digest of the request's body.

    Raises InvalidSpec for a key that isn't 1 to 255 printable ASCII characters.
    """

    route: str
    key: str
    body: Digest

    def __post_init__(self) -> None:
        assert 0 < len(self.route) <= ROUTE_LENGTH_MAX, self.route
        if not (0 < len(self.key) <= KEY_LENGTH_MAX and self.key.isascii() and self.key.isprintable()):
            raise InvalidSpec(f"Idempotency-Key: {self.key!r:.60} isn't allowed; allowed: 1 to {KEY_LENGTH_MAX} printable ASCII "
                              "characters", field="Idempotency-Key", value=self.key[:60])


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
    seen = _answered(db, tenant, idempotency)
    if seen is not None:
        return _submitted_before(seen)
    at = now if now is not None else db.now()
    resolved = resolve(_with_initial_weights(db, spec, tenant))
    if machine is not None:
        check_runnable(resolved, machine)
    job = Job(new_id("job"), tenant, resolved.training, Digest.parse(training_digest(resolved.training)), resolved.execution,
              spec.model_dump(mode="json"), None, at)

    def store(tx: Connection) -> _Answer[Submitted]:
        refuse_what_never_fits(tx, resolved.execution, at)
        refuse_over_quota(tx, tenant, resolved.execution, at, new_job=True)
        queries.add(tx, tables.jobs, [_job_row(job)])
        run = _queue_run(tx, job, resolved.execution, "original", None, at)
        return _Answer(Submitted(job, run, created=True), job.id, {"job": job.as_dict(), "run": run.as_dict()})

    return _once(db, tenant, idempotency, store, _submitted_before, at)


def get_job(db: Database, job_id: str, tenant: str = "local") -> Job:
    """One job. Raises NotFound, also for another tenant's."""
    with db.read() as tx:
        return _job_of(_job(tx, job_id, tenant))


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
    seen = _answered(db, tenant, idempotency)
    if seen is not None:
        return _run_before(seen)
    at = now if now is not None else db.now()

    def store(tx: Connection) -> _Answer[Run]:
        job = _job_of(_job(tx, job_id, tenant))
        resolved = _execution(job, execution)
        if machine is not None:
            check_runnable(JobSpec(training=job.training, execution=resolved), machine)
        refuse_what_never_fits(tx, resolved, at)
        refuse_over_quota(tx, tenant, resolved, at, new_job=False)
        original = _run_to_reproduce(tx, job, reproduces)
        run = _queue_run(tx, job, resolved, "original" if original is None else "reproduction", original, at)
        return _Answer(run, job.id, {"run": run.as_dict()})

    return _once(db, tenant, idempotency, store, _run_before, at)


def verify(db: Database, run_id: str, level: Literal["audit", "rerun"], *, segments: int | None = None, seed: int | None = None,
           execution: Mapping[str, Any] | None = None, tenant: str = "local", idempotency: Idempotency | None = None,
           now: datetime | None = None) -> Verification:
    """Queues a run that computes a run which has ended again: drawn segments of it (audit), or all of it (rerun).

    `segments` (None: up to four) are drawn by `seed` (None: drawn here). `execution` replaces single keys of the verified run's
    own; without a device, a CPU does it where the cluster has no other. A record that contradicts itself is TAMPERED at once, and
    nothing runs. Raises NotFound for an unknown run; Conflict for one that hasn't ended, left nothing to compare with, or is an
    audit itself; InvalidSpec for more segments than there are; Unrunnable as `create_run` does.
    """
    seen = _answered(db, tenant, idempotency)
    if seen is not None:
        return get_verification(db, _verified_before(seen), tenant)
    at, finding = now if now is not None else db.now(), check_record(provenance(db, run_id, tenant), {})

    def store(tx: Connection) -> _Answer[str]:
        row = _run_to_verify(tx, run_id, tenant)
        plan = None if level == "rerun" else _draw(tx, row, segments, draw_seed() if seed is None else seed)
        if finding.verdict == "TAMPERED":
            planned = None if plan is None else plan.document()
            return _verified(_at_once(tx, row, at, level=level, plan=planned, **finding.as_dict()), row["job_id"])
        job = _job_of(_job(tx, row["job_id"], tenant))
        of_run = JobSpec(training=job.training, execution=ExecutionSpec.model_validate(row["execution"]))
        resolved = _where_it_fits(tx, of_run, execution or {}, at)
        refuse_over_quota(tx, tenant, resolved, at, new_job=False)
        run = _queue_run(tx, job, resolved, "audit" if level == "audit" else "reproduction", row, at, plan)
        return _verified(_verification_by(tx, run.id), job.id)

    return get_verification(db, _once(db, tenant, idempotency, store, _verified_before, at), tenant)


def bisect(db: Database, run_id: str, against: str | None = None, *, execution: Mapping[str, Any] | None = None,
           against_execution: Mapping[str, Any] | None = None, tenant: str = "local", idempotency: Idempotency | None = None,
           now: datetime | None = None) -> Verification:
    """Queues a run that finds where two runs of one job come apart; or (`against` None) a run and a replay of it.

    `execution` and `against_execution` replace single keys of the execution specs by which the two sides are computed again: the
    first side's also those of the run that does it. Without a device, a CPU does it where the cluster has no other. A record of
    the first that contradicts itself is TAMPERED at once, and nothing runs. Raises NotFound for an unknown run; Conflict for one
    that hasn't ended, left no step record, or carries out a verification itself, and for a second one whose record contradicts
    itself; InvalidSpec for runs of different jobs (naming the first field) or a run against itself; Unrunnable as `create_run`.
    """
    seen = _answered(db, tenant, idempotency)
    if seen is not None:
        return get_verification(db, _verified_before(seen), tenant)
    if against == run_id:
        raise InvalidSpec(f"against: {against!r:.60} is the run itself; allowed: another run of its job, or null for a replay",
                          field="against", value=against[:60])
    at, finding = now if now is not None else db.now(), check_record(provenance(db, run_id, tenant), {})
    if against is not None and (theirs := check_record(provenance(db, against, tenant), {})).verdict == "TAMPERED":
        raise Conflict(f"the record of run {against} contradicts itself: {theirs.message}", run=against)

    def store(tx: Connection) -> _Answer[str]:
        compared = [_run_to_verify(tx, one, tenant) for one in (run_id, against) if one is not None]
        plan, job, resolved = _plan_bisect(tx, compared, [execution or {}, against_execution or {}], tenant, at)
        if finding.verdict == "TAMPERED":
            made = _at_once(tx, compared[0], at, level="bisect", against=against, plan=plan.document(), **finding.as_dict())
        else:
            refuse_over_quota(tx, tenant, resolved, at, new_job=False)
            made = _verification_by(tx, _queue_run(tx, job, resolved, "bisect", compared[0], at, plan).id)
        return _verified(made, job.id)

    return get_verification(db, _once(db, tenant, idempotency, store, _verified_before, at), tenant)


def check(db: Database, run_id: str, read: Read, *, tenant: str = "local",
          idempotency: Idempotency | None = None) -> Verification:
    """Verifies a run at level check, now; see `runs.judge`."""
    seen = _answered(db, tenant, idempotency)
    if seen is not None:
        return get_verification(db, _verified_before(seen), tenant)
    with db.read() as tx:
        job_id = _run_to_look_at(tx, run_id, tenant)["job_id"]
    made = judge(db, run_id, read, tenant)
    kept = _once(db, tenant, idempotency, lambda tx: _verified(made.id, job_id), _verified_before, made.at)
    return made if kept == made.id else get_verification(db, kept, tenant)


def cancel_verification(db: Database, verification_id: str, tenant: str = "local", now: datetime | None = None) -> Verification:
    """Ends a verification without a verdict: the run that carries it out is cancelled. Again changes nothing.

    Raises NotFound, and Conflict for one that has ended.
    """
    found = get_verification(db, verification_id, tenant)
    if found.executed_by is None or found.verdict is not None:
        raise Conflict(f"verification {found.id} can't be cancelled: it is {found.status}", verification=found.id,
                       status=found.status)
    cancel(db, found.executed_by, tenant, now)
    return get_verification(db, verification_id, tenant)


# ---- One answer for a key --------------------------------------------------------------------------------------------

class _SeenBefore(Exception):
    """Rolls back a request whose Idempotency-Key another request has stored in the meantime."""


@dataclass(frozen=True, slots=True)
class _Answer(Generic[T]):
    """What a request made, and what is answered to the same one again."""

    made: T
    job_id: str
    response: dict[str, Any]


def _once(db: Database, tenant: str, idempotency: Idempotency | None, work: Callable[[Connection], _Answer[T]],
          before: Callable[[dict[str, Any]], T], at: datetime) -> T:
    """What `work` makes in one transaction, with its answer kept under the key; or, where another request with the key was faster
    and `work` is rolled back, what `before` makes of that one's answer."""
    try:
        with db.write() as tx:
            answer = work(tx)
            if idempotency is not None and not queries.insert_unless_there(tx, tables.idempotency_keys, {
                "tenant": tenant, "route": idempotency.route, "key": idempotency.key, "body": idempotency.body,
                "job_id": answer.job_id, "response": answer.response, "created_at": at,
            }):
                raise _SeenBefore
    except (_SeenBefore, QuotaExceeded):
        seen = _answered(db, tenant, idempotency)  # whoever was faster has committed, and has perhaps taken the last place
        if seen is None:
            raise
        return before(seen)
    return answer.made


def _answered(db: Database, tenant: str, idempotency: Idempotency | None) -> dict[str, Any] | None:
    """What was answered to an earlier request with this key. Raises Conflict when that had another body."""
    if idempotency is None:
        return None
    with db.read() as tx:
        row = queries.idempotency_key(tx, tenant, idempotency.route, idempotency.key)
    if row is None:
        return None
    response: dict[str, Any] = row["response"]
    if row["body"] != idempotency.body:
        raise Conflict(
            f"Idempotency-Key {idempotency.key!r} was used with another body, for job {row['job_id']}", job=row["job_id"],
            key=idempotency.key, **{what: response[what]["id"] for what in ("run", "verification") if what in response},
        )
    return response


def _submitted_before(response: Mapping[str, Any]) -> Submitted:
    return Submitted(Job.from_dict(response["job"]), Run.from_dict(response["run"]), created=False)


def _run_before(response: Mapping[str, Any]) -> Run:
    return Run.from_dict(response["run"])


def _verified(verification_id: str, job_id: str) -> _Answer[str]:
    return _Answer(verification_id, job_id, {"verification": {"id": verification_id}})


def _verified_before(response: Mapping[str, Any]) -> str:
    return str(response["verification"]["id"])


# ---- Parts -----------------------------------------------------------------------------------------------------------

def _at_once(tx: Connection, row: Row, now: datetime, **values: Any) -> str:
    """A verification that needs no run to come to its verdict; its id."""
    found = queries.lock_run(tx, row["id"])
    assert found is not None, "runs are never deleted"
    run = LockedRun(tx, found)
    made = run.add_verification(now, **values)
    run.save()
    return made


def _where_it_fits(tx: Connection, of_run: JobSpec, keys: Mapping[str, Any], now: datetime) -> ExecutionSpec:
    """The execution spec of a verification: the verified run's own, with these keys; on a CPU where nobody asks for another
    device and the cluster has none. Raises Unrunnable."""
    resolved = override_execution(of_run, keys).execution
    try:
        refuse_what_never_fits(tx, resolved, now)
    except Unrunnable:
        if "device" in keys or resolved.device == "cpu":
            raise
        resolved = override_execution(of_run, {**keys, "device": "cpu"}).execution
        refuse_what_never_fits(tx, resolved, now)
    return resolved


def _plan_bisect(tx: Connection, compared: Sequence[Row], keys: Sequence[Mapping[str, Any]], tenant: str,
                 now: datetime) -> tuple[BisectPlan, Job, ExecutionSpec]:
    """The plan of a bisect of these runs (one: and a replay of it), the first one's job, and the spec of the run that does it."""
    jobs = [_job_of(_job(tx, row["job_id"], tenant)) for row in compared]
    differing = changes("training", *(job.training.model_dump(mode="json") for job in (jobs[0], jobs[-1])))
    if differing:
        change = differing[0]
        raise InvalidSpec(
            f"against: {change.field} is {change.first!r} in the first run and {change.second!r} in the second; allowed: two "
            "runs of one job", field="against", value=compared[-1]["id"],
            errors=[{"field": change.field, "value": change.second, "problem": "differs", "allowed": change.first}],
        )
    specs = []
    for row, job, replaced in zip((compared[0], compared[-1]), (jobs[0], jobs[-1]), keys, strict=True):
        own = ExecutionSpec.model_validate(row["execution"])
        specs.append(_where_it_fits(tx, JobSpec(training=job.training, execution=own), replaced, now))
    replay = len(compared) == 1
    sides = [PlannedSide(row["id"], str(row["head"]), spec.device, spec.threads, spec.micro_batches)
             for row, spec in zip((compared[0], compared[-1]), specs, strict=True)]
    second = replace(sides[1], run=None, head=None) if replay else sides[1]
    plan = BisectPlan(sides[0], second, min(row["step"] for row in compared))
    device = "cuda" if "cuda" in (specs[0].device, specs[1].device) else "cpu"
    resolved = override_execution(JobSpec(training=jobs[0].training, execution=specs[0]), {"device": device}).execution
    return plan, jobs[0], resolved


def _verification_by(tx: Connection, run_id: str) -> str:
    row = queries.verification_by(tx, run_id)
    assert row is not None, "it was queued with its verification"
    return str(row["id"])


def _run_to_look_at(tx: Connection, run_id: str, tenant: str) -> Row:
    row = run_row(tx, run_id, tenant)
    if row["kind"] in UNCHAINED:
        what = "an audit" if row["kind"] == "audit" else "a bisect"
        raise Conflict(f"run {run_id} is {what} of {row['reproduces']}: verify that one", run=run_id, verifies=row["reproduces"])
    return row


def _run_to_verify(tx: Connection, run_id: str, tenant: str) -> Row:
    row = _run_to_look_at(tx, run_id, tenant)
    if row["status"] not in FINAL:
        raise Conflict(f"run {run_id} is {row['status']}: it can be computed again once it has ended", run=run_id,
                       status=row["status"])
    if row["step"] is None:
        raise Conflict(f"run {run_id} left no step record: there is nothing to compare with", run=run_id, status=row["status"])
    return row


def _draw(tx: Connection, row: Row, segments: int | None, seed: int) -> Plan:
    there = [c["step"] for c in queries.checkpoints_of(tx, row["id"]) if c["deleted_at"] is None]
    if not segments_of(there):
        raise Conflict(f"run {row['id']} has no checkpoint, so there is no segment to audit; a rerun needs none", run=row["id"])
    return draw(seed, str(row["head"]), row["step"], there, segments)


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


def _queue_run(tx: Connection, job: Job, execution: ExecutionSpec, kind: RunKind, original: Row | None, now: datetime,
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


def _job(tx: Connection, job_id: str, tenant: str) -> Row:
    row = queries.job(tx, job_id, tenant) if is_id(job_id, "job") else None
    if row is None:
        raise NotFound(f"there is no job {job_id!r:.60}", job=job_id[:60])
    return row

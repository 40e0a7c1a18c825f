"""The use cases of verifications: ask for an audit, a rerun or a bisect of a run, check it now, cancel what is under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection

from mok_service.db import queries
from mok_service.db.session import Database
from mok_service.errors import Conflict, InvalidSpec, Unrunnable
from mok_service.idempotency import Answer, Idempotency, answered, once
from mok_service.jobs import Job, find_job, queue_run
from mok_service.lifecycle import FINAL, UNCHAINED
from mok_service.provenance.audit import Plan, draw, segments_of
from mok_service.provenance.bisection import BisectPlan, PlannedSide
from mok_service.provenance.compare import changes
from mok_service.provenance.measure import Read
from mok_service.provenance.verify import check as check_record
from mok_service.runs.clusters import refuse_what_never_fits
from mok_service.runs.judging import judge
from mok_service.runs.locked import LockedRun
from mok_service.runs.quotas import refuse_over_quota
from mok_service.runs.reading import get_verification, provenance, run_row
from mok_service.runs.rows import Row
from mok_service.runs.types import Verification
from mok_service.runs.wishes import cancel
from mok_service.spec import ExecutionSpec, JobSpec, draw_seed, override_execution


def verify(db: Database, run_id: str, level: Literal["audit", "rerun"], *, segments: int | None = None, seed: int | None = None,
           execution: Mapping[str, Any] | None = None, tenant: str = "local", idempotency: Idempotency | None = None,
           now: datetime | None = None) -> Verification:
    """Queues a run that computes a run which has ended again: drawn segments of it (audit), or all of it (rerun).

    `segments` (None: up to four) are drawn by `seed` (None: drawn here). `execution` replaces single keys of the verified run's
    own; without a device, a CPU does it where the cluster has no other. A record that contradicts itself is TAMPERED at once, and
    nothing runs. Raises NotFound for an unknown run; Conflict for one that hasn't ended, left nothing to compare with, or is an
    audit itself; InvalidSpec for more segments than there are; Unrunnable as `jobs.create_run` does.
    """
    seen = answered(db, tenant, idempotency)
    if seen is not None:
        return get_verification(db, _verified_before(seen), tenant)
    at, finding = now if now is not None else db.now(), check_record(provenance(db, run_id, tenant), {})

    def store(tx: Connection) -> Answer[str]:
        row = _run_to_verify(tx, run_id, tenant)
        plan = None if level == "rerun" else _draw(tx, row, segments, draw_seed() if seed is None else seed)
        if finding.verdict == "TAMPERED":
            planned = None if plan is None else plan.document()
            return _verified(_at_once(tx, row, at, level=level, plan=planned, **finding.as_dict()), row["job_id"])
        job = find_job(tx, row["job_id"], tenant)
        of_run = JobSpec(training=job.training, execution=ExecutionSpec.model_validate(row["execution"]))
        resolved = _where_it_fits(tx, of_run, execution or {}, at)
        refuse_over_quota(tx, tenant, resolved, at, new_job=False)
        run = queue_run(tx, job, resolved, "audit" if level == "audit" else "reproduction", row, at, plan)
        return _verified(_verification_by(tx, run.id), job.id)

    return get_verification(db, once(db, tenant, idempotency, store, _verified_before, at), tenant)


def bisect(db: Database, run_id: str, against: str | None = None, *, execution: Mapping[str, Any] | None = None,
           against_execution: Mapping[str, Any] | None = None, tenant: str = "local", idempotency: Idempotency | None = None,
           now: datetime | None = None) -> Verification:
    """Queues a run that finds where two runs of one job come apart; or (`against` None) a run and a replay of it.

    `execution` and `against_execution` replace single keys of the execution specs by which the two sides are computed again: the
    first side's also those of the run that does it. Without a device, a CPU does it where the cluster has no other. A record of
    the first that contradicts itself is TAMPERED at once, and nothing runs. Raises NotFound for an unknown run; Conflict for one
    that hasn't ended, left no step record, or carries out a verification itself, and for a second one whose record contradicts
    itself; InvalidSpec for runs of different jobs (naming the first field) or a run against itself; Unrunnable as
    `jobs.create_run`.
    """
    seen = answered(db, tenant, idempotency)
    if seen is not None:
        return get_verification(db, _verified_before(seen), tenant)
    if against == run_id:
        raise InvalidSpec(f"against: {against!r:.60} is the run itself; allowed: another run of its job, or null for a replay",
                          field="against", value=against[:60])
    at, finding = now if now is not None else db.now(), check_record(provenance(db, run_id, tenant), {})
    if against is not None and (theirs := check_record(provenance(db, against, tenant), {})).verdict == "TAMPERED":
        raise Conflict(f"the record of run {against} contradicts itself: {theirs.message}", run=against)

    def store(tx: Connection) -> Answer[str]:
        compared = [_run_to_verify(tx, one, tenant) for one in (run_id, against) if one is not None]
        plan, job, resolved = _plan_bisect(tx, compared, [execution or {}, against_execution or {}], tenant, at)
        if finding.verdict == "TAMPERED":
            made = _at_once(tx, compared[0], at, level="bisect", against=against, plan=plan.document(), **finding.as_dict())
        else:
            refuse_over_quota(tx, tenant, resolved, at, new_job=False)
            made = _verification_by(tx, queue_run(tx, job, resolved, "bisect", compared[0], at, plan).id)
        return _verified(made, job.id)

    return get_verification(db, once(db, tenant, idempotency, store, _verified_before, at), tenant)


def check(db: Database, run_id: str, read: Read, *, tenant: str = "local",
          idempotency: Idempotency | None = None) -> Verification:
    """Verifies a run at level check, now; see `runs.judge`."""
    seen = answered(db, tenant, idempotency)
    if seen is not None:
        return get_verification(db, _verified_before(seen), tenant)
    with db.read() as tx:
        job_id = _run_to_look_at(tx, run_id, tenant)["job_id"]
    made = judge(db, run_id, read, tenant)
    kept = once(db, tenant, idempotency, lambda tx: _verified(made.id, job_id), _verified_before, made.at)
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


# ---- Parts -----------------------------------------------------------------------------------------------------------

def _verified(verification_id: str, job_id: str) -> Answer[str]:
    return Answer(verification_id, job_id, {"verification": {"id": verification_id}})


def _verified_before(response: Mapping[str, Any]) -> str:
    return str(response["verification"]["id"])


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
    jobs = [find_job(tx, row["job_id"], tenant) for row in compared]
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

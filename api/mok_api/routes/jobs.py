"""Jobs: submit one, look at them, run one again."""

from __future__ import annotations

from fastapi import APIRouter, Request

from mok_api.access import Tenant
from mok_api.answer import Json
from mok_api.body import IdempotencyKey, JsonText, idempotency, parse
from mok_api.docs import created, json_body, refusals
from mok_api.parameters import Configured, Cursor, Db, JobId, Name, OfDigest, PageLimit
from mok_api.schemas import runs as schemas
from mok_api.writing import together
from mok_service import jobs, runs
from mok_service.db.session import Database
from mok_service.preview import largest_machine, preview
from mok_service.settings import Settings
from mok_service.spec import ExecutionSpec, JobSpec, Machine, check_runnable, load_job, override_execution
from mok_service.urls import refuse_unless_allowed

router = APIRouter(tags=["jobs"])


@router.post("/v1/jobs", status_code=201, response_model=schemas.Submitted,
             openapi_extra=json_body("JobSpec", schemas.JOB_EXAMPLE),
             responses=created("Location names the job.") | refusals(409, 413, 415))
@together
def submit_job(request: Request, db: Db, settings: Configured, tenant: Tenant, body: JsonText,
               idempotency_key: IdempotencyKey = None) -> Json:
    """Submit a training job. Its first run is queued; the answer has the resolved spec with every default and the seed."""
    spec = _allowed(load_job(body, "json"), settings)
    key = idempotency(request, idempotency_key, body)
    done = jobs.submit(db, spec, tenant=tenant, idempotency=key, machine=_machine(db, spec))
    answer = {"job": done.job.as_dict(), "run": done.run.as_dict(), "created": done.created}
    return Json(answer, 201, headers={"Location": f"/v1/jobs/{done.job.id}"})


@router.post("/v1/jobs/validate", response_model=schemas.Validated, openapi_extra=json_body("JobSpec", schemas.JOB_EXAMPLE),
             responses=refusals(413, 415))
def validate_job(db: Db, settings: Configured, body: JsonText) -> Json:
    """What submitting this spec would do: the resolved spec, its digest if it has a seed, and what it costs. Refuses what
    couldn't run here, with the reason."""
    spec = _allowed(load_job(body, "json"), settings)
    machine = _machine(db, spec)
    if machine is not None:
        check_runnable(spec, machine)
    return Json(preview(spec))


def _allowed(spec: JobSpec, settings: Settings) -> JobSpec:
    """The spec itself; raises Unrunnable for data at a URL that the service doesn't allow."""
    refuse_unless_allowed((file.url for file in spec.training.data.urls), settings.data_urls)
    return spec


@router.get("/v1/jobs", response_model=schemas.JobPage)
def list_jobs(db: Db, tenant: Tenant, name: Name = None, digest: OfDigest = None,
              cursor: Cursor = None, limit: PageLimit = 50) -> Json:
    """Jobs, newest first."""
    page = jobs.list_jobs(db, tenant, name=name, digest=digest, cursor=cursor, limit=limit)
    return Json({"items": [job.as_dict() for job in page.items], "next_cursor": page.next_cursor})


@router.get("/v1/jobs/{job}", response_model=schemas.Job, responses=refusals(404))
def get_job(db: Db, tenant: Tenant, job: JobId) -> Json:
    """One job."""
    return Json(jobs.get_job(db, job, tenant).as_dict())


@router.post("/v1/jobs/{job}/runs", status_code=201, response_model=schemas.Run,
             openapi_extra=json_body("NewRun", schemas.NEW_RUN_EXAMPLE),
             responses=created("Location names the run.") | refusals(404, 409, 413, 415))
@together
def create_run(request: Request, db: Db, tenant: Tenant, job: JobId, body: JsonText,
               idempotency_key: IdempotencyKey = None) -> Json:
    """Run the job again: a reproduction, compared step by step with an earlier run as its records come in."""
    wish = parse(body, schemas.NewRun)
    run = jobs.create_run(db, job, tenant=tenant, execution=_execution(db, tenant, job, wish), reproduces=wish.reproduces,
                          idempotency=idempotency(request, idempotency_key, body))
    return Json(run.as_dict(), 201, headers={"Location": f"/v1/runs/{run.id}"})


def _machine(db: Database, spec: JobSpec) -> Machine | None:
    return largest_machine(runs.nodes(db), spec.execution.device, db.now())


def _execution(db: Database, tenant: str, job_id: str, wish: schemas.NewRun) -> ExecutionSpec | None:
    """The job's execution spec with the keys that the wish gives; None for none."""
    if wish.execution is None:
        return None
    job = jobs.get_job(db, job_id, tenant)
    return override_execution(job.spec, wish.execution.model_dump(exclude_unset=True)).execution

"""Runs: look at them, follow them, steer them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Header, Request
from starlette.responses import Response

from mok_api.access import Tenant, Who
from mok_api.answer import Json
from mok_api.body import Nothing
from mok_api.docs import event_stream, refusals
from mok_api.events import Streams, wants_stream
from mok_api.parameters import (
    AfterNumber,
    AfterStep,
    Cursor,
    Db,
    ItemLimit,
    JobName,
    Kind,
    OfDigest,
    OfJob,
    OfModel,
    PageLimit,
    Parent,
    RunId,
    Seed,
    Since,
    Status,
    Until,
)
from mok_api.schemas import runs as schemas
from mok_api.schemas.log import Attestation
from mok_api.schemas.verifications import VerificationItems
from mok_service import runs

router = APIRouter(tags=["runs"])


class _Shown(Protocol):
    def as_dict(self) -> dict[str, Any]: ...


@router.get("/v1/runs", response_model=schemas.RunPage)
def list_runs(db: Db, tenant: Tenant, status: Status = None, job: OfJob = None, digest: OfDigest = None, kind: Kind = None,
              name: JobName = None, model: OfModel = None, seed: Seed = None, parent: Parent = None, since: Since = None,
              until: Until = None, cursor: Cursor = None, limit: PageLimit = 50) -> Json:
    """Runs, newest first; all filters must hold. `digest` finds runs by weights, optimizer state or step record, by the
    weights they started from, and by training spec or data."""
    page = runs.list_runs(db, tenant, status=status, job=job, digest=digest, kind=kind, name=name, model=model, seed=seed,
                          parent=parent, since=since, until=until, cursor=cursor, limit=limit)
    return Json({"items": runs.with_standing(db, page.items), "next_cursor": page.next_cursor})


@router.get("/v1/runs/{run}", response_model=schemas.Run, responses=refusals(404))
def get_run(db: Db, tenant: Tenant, run: RunId) -> Json:
    """One run; while it is queued, with its place in the queue and what it waits for."""
    return Json(runs.with_standing(db, [runs.get_run(db, run, tenant)])[0])


@router.post("/v1/runs/{run}/cancel", response_model=schemas.Run, responses=refusals(404, 409, 413, 415))
def cancel_run(db: Db, tenant: Tenant, run: RunId, _: Nothing) -> Json:
    """End the run. What it recorded stays. A run that is already being cancelled stays so."""
    return Json(runs.cancel(db, run, tenant).as_dict())


@router.post("/v1/runs/{run}/pause", response_model=schemas.Run, responses=refusals(404, 409, 413, 415))
def pause_run(db: Db, tenant: Tenant, run: RunId, _: Nothing) -> Json:
    """Stop the run after a checkpoint and free its devices, until it's resumed."""
    return Json(runs.pause(db, run, tenant).as_dict())


@router.post("/v1/runs/{run}/resume", response_model=schemas.Run, responses=refusals(404, 409, 413, 415))
def resume_run(db: Db, tenant: Tenant, run: RunId, _: Nothing) -> Json:
    """Queue a paused run again. It goes on from its checkpoint with the same bits."""
    return Json(runs.resume(db, run, tenant).as_dict())


@router.get("/v1/runs/{run}/steps", response_model=schemas.StepItems, responses=refusals(404))
def list_steps(db: Db, tenant: Tenant, run: RunId, after: AfterStep = -1, limit: ItemLimit = 1000) -> Json:
    """The run's step records, in order. A loss or norm that isn't finite is null beside its bits."""
    found = runs.steps(db, run, after, limit, tenant)
    return _items(found, found[-1].record.step if found else after)


@router.get("/v1/runs/{run}/logs", response_model=schemas.LogItems, responses=refusals(404))
def list_logs(db: Db, tenant: Tenant, run: RunId, after: AfterNumber = 0, limit: ItemLimit = 1000) -> Json:
    """What the run's attempts logged, in order."""
    found = runs.logs(db, run, after, limit, tenant)
    return _items(found, found[-1].number if found else after)


@router.get("/v1/runs/{run}/events", response_model=schemas.EventItems, responses=event_stream() | refusals(404, 503))
def list_events(request: Request, db: Db, who: Who, run: RunId, after: AfterNumber = 0, limit: ItemLimit = 1000,
                last_event_id: Annotated[int | None, Header(ge=0, le=2**63 - 1, description="Go on after this event.")] = None,
                ) -> Response:
    """What happens to the run. With `Accept: text/event-stream` a stream that ends, with the event `end`, when the run has
    ended and all is told; else the events so far. Event ids are numbers without gaps."""
    after = after if last_event_id is None else last_event_id
    if wants_stream(request):
        streams: Streams = request.app.state.streams
        return streams.answer(who, run, after)
    found = runs.events(db, run, after, limit, who.tenant)
    return _items(found, found[-1].number if found else after)


@router.get("/v1/runs/{run}/checkpoints", response_model=schemas.CheckpointItems, responses=refusals(404))
def list_checkpoints(db: Db, tenant: Tenant, run: RunId) -> Json:
    """The run's checkpoints, in order of steps."""
    return Json({"items": _shown(runs.checkpoints(db, run, tenant))})


@router.get("/v1/runs/{run}/attempts", response_model=schemas.AttemptItems, responses=refusals(404))
def list_attempts(db: Db, tenant: Tenant, run: RunId) -> Json:
    """The run's attempts on hardware, in order, with the environment that each worker reported."""
    return Json({"items": _shown(runs.attempts(db, run, tenant))})


@router.get("/v1/runs/{run}/verifications", response_model=VerificationItems, responses=refusals(404))
def list_verifications(db: Db, tenant: Tenant, run: RunId) -> Json:
    """The verdicts on the run."""
    return Json({"items": _shown(runs.verifications(db, run, tenant))})


@router.get("/v1/runs/{run}/provenance", response_model=schemas.Record, responses=refusals(404))
def get_provenance(db: Db, tenant: Tenant, run: RunId) -> Json:
    """The run's whole record: what was asked, what ran it where, every step's digests, and the verdicts."""
    return Json(runs.provenance(db, run, tenant))


@router.get("/v1/runs/{run}/attestation", response_model=Attestation, responses=refusals(404))
def get_attestation(db: Db, tenant: Tenant, run: RunId) -> Json:
    """What the service signed about the run after it had ended, and where its log has it."""
    return Json(runs.get_attestation(db, run, tenant).as_dict())


def _shown(values: Iterable[_Shown]) -> list[dict[str, Any]]:
    return [value.as_dict() for value in values]


def _items(found: Sequence[_Shown], next_after: int) -> Json:
    return Json({"items": _shown(found), "next_after": next_after})

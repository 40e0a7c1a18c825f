"""What operators look at: nodes, health, metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse

from mok_api.answer import Json
from mok_api.docs import Responses
from mok_api.errors import NotReady
from mok_api.events import Streams
from mok_api.metrics import Labels, Metrics, labelled, metric
from mok_api.parameters import Configured, Db
from mok_api.schemas import operations as schemas
from mok_service import runs, statistics
from mok_service.db.session import check_schema

router = APIRouter(tags=["operations"])

_METRICS: Responses = {200: {
    "description": "Prometheus text.",
    "content": {"text/plain": {"schema": {"type": "string"}, "example": 'mok_runs{status="running"} 1\n'}},
}}


@router.get("/v1/nodes", response_model=schemas.NodeItems)
def list_nodes(db: Db) -> Json:
    """The machines that schedulers have reported."""
    return Json({"items": [node.as_dict() for node in runs.nodes(db)]})


@router.get("/healthz", response_model=schemas.Health)
def health() -> Json:
    """Whether this process answers."""
    return Json({"status": "ok"})


@router.get("/readyz", response_model=schemas.Health)
def ready(db: Db, settings: Configured) -> Json:
    """Whether the service can do its work: the database answers and has this version's schema, and a scheduler has shown a sign
    of life within a lease. Else 503, with what is wrong."""
    check_schema(db)
    age = statistics.heartbeat_age(db)
    if age is None or age > settings.lease_seconds:
        seen = "never" if age is None else f"{age:.0f} s ago"
        raise NotReady(f"no scheduler has shown a sign of life within {settings.lease_seconds:g} s; the last one: {seen}",
                       scheduler=seen)
    return Json({"status": "ready"})


@router.get("/metrics", response_class=PlainTextResponse, responses=_METRICS)
def metrics(request: Request, db: Db) -> PlainTextResponse:
    """For Prometheus: what this process has counted (requests, their latency, database errors, event streams), and what the
    database says of the whole service (runs, queue, attempts, steps, outbox, what isn't signed yet)."""
    streams: Streams = request.app.state.streams
    counted: Metrics = request.app.state.metrics
    text = counted.text() + metric("mok_event_streams", "gauge", "Open event streams of this process.", {(): streams.open})
    return PlainTextResponse(text + _of_the_service(statistics.read(db)), media_type="text/plain; version=0.0.4")


def _of_the_service(now: statistics.Statistics) -> str:
    waits = {"queue": ("Queued runs", now.queue), "outbox": ("Deliveries to webhooks that are to be sent", now.outbox),
             "unsigned_runs": ("Runs that have ended and aren't attested", now.unsigned)}
    text = metric("mok_runs", "gauge", "Runs by status.", labelled("status", now.runs))
    for name, (what, waiting) in waits.items():
        text += metric(f"mok_{name}", "gauge", f"{what}.", {(): waiting.count})
        text += metric(f"mok_{name}_oldest_seconds", "gauge", f"{what}: how long the oldest has waited.", {(): waiting.seconds})
    text += metric("mok_attempts_ended_total", "counter", "Attempts that have ended, by how.", labelled("end", now.attempts))
    text += metric("mok_steps_total", "counter", "Optimizer steps on record.", {(): now.steps})
    text += metric("mok_deliveries_given_up_total", "counter", "Deliveries to webhooks that were given up.", {(): now.given_up})
    text += metric("mok_nodes", "gauge", "Machines that schedulers have reported.", {(): now.nodes})
    age: dict[Labels, float] = {} if now.heartbeat_seconds is None else {(): now.heartbeat_seconds}
    return text + metric("mok_scheduler_heartbeat_age_seconds", "gauge", "Since a scheduler's last sign of life.", age)

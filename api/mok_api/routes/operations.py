"""What operators look at: nodes, health, metrics."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse

from mok_api import schemas
from mok_api.answer import Json
from mok_api.docs import Responses, refusals
from mok_api.events import Streams
from mok_api.parameters import Db
from mok_service import runs
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


@router.get("/readyz", response_model=schemas.Health, responses=refusals(503))
def ready(db: Db) -> Json:
    """Whether the database answers and has this version's schema."""
    check_schema(db)
    return Json({"status": "ready"})


@router.get("/metrics", response_class=PlainTextResponse, responses=_METRICS)
def metrics(request: Request, db: Db) -> PlainTextResponse:
    """Runs by status, schedulers' nodes and open event streams, for Prometheus."""
    streams: Streams = request.app.state.streams
    counts = [(f'{{status="{status}"}}', count) for status, count in runs.count_by_status(db).items()]
    text = _gauge("mok_runs", "Runs by status.", counts)
    text += _gauge("mok_nodes", "Machines that schedulers have reported.", [("", len(runs.nodes(db)))])
    text += _gauge("mok_event_streams", "Open event streams of this process.", [("", streams.open)])
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _gauge(name: str, meaning: str, values: Iterable[tuple[str, int]]) -> str:
    lines = [f"# HELP {name} {meaning}", f"# TYPE {name} gauge", *(f"{name}{labels} {value}" for labels, value in values)]
    return "\n".join(lines) + "\n"

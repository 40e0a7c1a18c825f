"""The FastAPI application: REST under /v1, the web page at /."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import Depends, FastAPI

from mok_api import access, errors, page
from mok_api.access import Door, authorize
from mok_api.docs import errors_are_json, refusals, request_schemas
from mok_api.events import Streams
from mok_api.guard import Guard
from mok_api.http import BoundedHttp
from mok_api.metrics import Metrics
from mok_api.observe import Observer
from mok_api.parameters import known_parameters
from mok_api.routes import access as keys
from mok_api.routes import audit, checkpoints, digests, jobs, lineage, log, operations, runs, verifications, webhooks
from mok_api.writing import Writing
from mok_service.db.session import Database
from mok_service.settings import Settings

ROUTERS = tuple(module.router for module in (jobs, runs, checkpoints, verifications, digests, lineage, log, keys, webhooks,
                                                 audit, operations, page))
DESCRIPTION = """Training jobs for Mixture-of-Experts models whose results are the same bits everywhere, with a record that
anyone can check. A job is what was asked; a run is one execution of it; every step leaves a record. Ids are opaque; times are
UTC; integers are exact; lists are newest first and paged by `cursor`. Errors have one form: `{"error": {"code", "message",
"detail"}}`."""


def create_app(db: Database, settings: Settings) -> FastAPI:
    """The application on an upgraded database. Before its server is told to stop, set `app.state.streams.stopping`.
    A uvicorn server takes `app.state.http` as its protocol."""
    app = FastAPI(
        title="MoK service", version=_version(), description=DESCRIPTION, docs_url=None, redoc_url=None,
        redirect_slashes=False, lifespan=_lifespan, dependencies=[Depends(authorize), Depends(known_parameters)],
        responses=refusals(401, 403, 414, 421, 422, 429, 431, 503),
    )
    app.state.db, app.state.settings, app.state.metrics = db, settings, Metrics()
    app.state.streams = Streams(db, settings.event_streams_max, settings.event_streams_tenant_max, settings.event_seconds)
    app.state.door, app.state.writing = Door(settings), Writing(db)
    app.state.http = BoundedHttp
    for router in ROUTERS:
        access.check_every_route(router.routes)
        app.include_router(router)
    errors.install(app)
    app.add_middleware(Guard, hosts=settings.hosts())
    app.add_middleware(Observer, settings=settings, metrics=app.state.metrics)
    _complete_description(app)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    app.state.streams.stopping.set()


def _complete_description(app: FastAPI) -> None:
    """Add the schemas of the bodies that routes read by themselves, and who may call what."""
    generate = app.openapi

    @cache
    def openapi() -> dict[str, Any]:
        described = generate()
        described["components"]["schemas"] = request_schemas() | described["components"]["schemas"]
        errors_are_json(described)
        access.describe(described)
        return described

    app.openapi = openapi  # type: ignore[method-assign]


def _version() -> str:
    try:
        return version("mok-service")
    except PackageNotFoundError:  # run from a checkout that isn't installed
        return "0"

"""A service for each test: SQLite, unless the test asks for both kinds of database."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

import httpx
import pytest
from fastapi.routing import APIRoute
from pydantic import TypeAdapter
from starlette.routing import Match

from mok_api.app import ROUTERS
from mok_api.schemas.base import ErrorAnswer
from mok_service.db.session import Database
from mok_service.settings import Settings
from tests.services import Service, Worker, running_api


@pytest.fixture
def kind() -> str:
    """Most of these tests are about HTTP, not about the database."""
    return "sqlite"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path / "data", event_seconds=0.2)


@pytest.fixture
def service(url: str, settings: Settings) -> Iterator[Service]:
    db = Database(url)
    with running_api(db, settings) as running:
        yield running
    db.close()


@contextmanager
def shared_service(migrated: Path, factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One for all tests of a module, which don't mind each other's runs."""
    folder = factory.mktemp("shared")
    shutil.copy(migrated, folder / "mok.db")
    db = Database(f"sqlite:///{folder}/mok.db")
    with running_api(db, Settings(data_dir=folder)) as running:
        yield running
    db.close()


@pytest.fixture
def api(service: Service) -> Iterator[httpx.Client]:
    """A client that holds every JSON answer against what the route's description says of it."""
    def is_described(answer: httpx.Response) -> None:
        if answer.headers.get("content-type") == "application/json":
            answer.read()
            hold_against_description(answer)

    with httpx.Client(base_url=service.url, timeout=30.0, verify=False, event_hooks={"response": [is_described]}) as client:
        yield client


def routes() -> list[APIRoute]:
    """Every route of the service."""
    return [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]


def hold_against_description(answer: httpx.Response) -> None:
    """Fails unless the answer has a documented status and exactly the documented fields."""
    if answer.is_error:
        ErrorAnswer.model_validate_json(answer.content)
    scope = {"type": "http", "method": answer.request.method, "path": unquote(answer.request.url.path)}
    for route in routes():
        if route.matches(scope)[0] == Match.FULL:
            documented = {int(status) for status in route.responses} | {route.status_code or 200}
            documented |= {401, 403, 414, 421, 422, 429, 431, 503}  # every route: by guard, door and known_parameters
            assert answer.status_code in documented, f"{route.path} doesn't document {answer.status_code}: {answer.text}"
            if answer.is_success:
                TypeAdapter(route.response_model).validate_json(answer.content, strict=False)


@pytest.fixture
def worker(service: Service) -> Worker:
    return Worker(service.db, service.settings)

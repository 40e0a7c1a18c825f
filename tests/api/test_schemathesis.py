"""Requests made up from the OpenAPI description: none breaks the service, and every answer is as described."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import checks

from mok_service.db.session import Database
from mok_service.settings import Settings
from tests.api.conftest import routes
from tests.api.keys import new_key
from tests.services import SPEC, Worker, running_api

EXAMPLES = 8  # of each operation
OPERATIONS = sorted((method, route.path) for route in routes() if route.include_in_schema for method in route.methods)


class World:
    """A service with a run, the description, and a key if it asks for keys."""

    def __init__(self, url: str, key: str | None, run: str, job: str) -> None:
        self.headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.url, self.ids = url, {"run": run, "job": job, "step": "1", "name": "model.safetensors"}
        described = httpx.get(f"{url}/openapi.json").json()
        self.schema = schemathesis.openapi.from_dict(described)
        self.schema.config.update(base_url=url)


@pytest.fixture(scope="module", params=["local", "keys"])
def world(request: pytest.FixtureRequest, migrated_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    shutil.copy(migrated_file, folder / "mok.db")
    db, keyed = Database(f"sqlite:///{folder}/mok.db"), request.param == "keys"
    configured = Settings(data_dir=folder, require_keys=keyed, requests_per_second=10_000, requests_burst=10_000,
                          event_seconds=0.1)
    with running_api(db, configured) as service:
        key = new_key(db, "operator", "local") if keyed else None
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        made = httpx.post(f"{service.url}/v1/jobs", json=SPEC, headers=headers).json()
        Worker(db, configured).work()
        yield World(service.url, key, made["run"]["id"], made["job"]["id"])
    db.close()


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_made_up_requests_break_nothing(world: World, method: str, path: str) -> None:
    operation = world.schema[path][method]
    expected = [checks.not_a_server_error, checks.status_code_conformance, checks.response_schema_conformance,
                checks.content_type_conformance]

    @seed(20261202)
    @settings(max_examples=EXAMPLES, deadline=None, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def ask(case: Any) -> None:
        for name in case.path_parameters or {}:
            if name in world.ids:  # one that is there: made-up ones are only ever not found
                case.path_parameters[name] = world.ids[name]
        answer = case.call(headers={**world.headers, "Accept": "application/json"})
        if path == "/readyz" and answer.status_code == 503:
            return
        case.validate_response(answer, checks=expected)

    ask()

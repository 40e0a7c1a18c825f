"""Data at URLs over REST: only those that the service allows, and no secret comes back."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from mok_service.db.session import Database
from mok_service.settings import load_settings
from tests.services import running_api, spec

URL = "https://data.example/d/a.txt"


@pytest.mark.parametrize("route", ["/v1/jobs", "/v1/jobs/validate"])
def test_a_url_that_the_service_does_not_allow_is_refused_at_submit(api: httpx.Client, route: str) -> None:
    answer = api.post(route, json=spec(data={"source": "files", "urls": [URL]}))
    error = answer.json()["error"]
    assert answer.status_code == 422 and error["code"] == "unrunnable" and URL in error["message"]
    assert "MOK_DATA_URLS" in error["message"]
    answer = api.post(route, json=spec(data={"source": "files", "urls": ["https://data.example/a?sig=hunter2"]}))
    assert answer.status_code == 422 and "query string" in answer.text and "hunter2" not in answer.text


def test_an_allowed_url_is_kept_with_its_digest(db: Database, tmp_path: Path) -> None:
    file = {"url": URL, "sha256": "0" * 64, "size": 3}
    settings = load_settings(data_dir=tmp_path, data_urls=("https://data.example/d",))
    with running_api(db, settings) as service, httpx.Client(base_url=service.url) as api:
        body = spec(seed=7, data={"source": "files", "urls": [file]})
        shown = api.post("/v1/jobs/validate", json=body).json()
        job = api.post("/v1/jobs", json=body).json()["job"]
        assert job["training"]["data"]["urls"] == [file] == shown["spec"]["training"]["data"]["urls"]
        assert job["digest"] == shown["training_digest"]
        record = api.get(f"/v1/runs/{api.get('/v1/runs').json()['items'][0]['id']}/provenance").json()
        assert record["spec"]["training_document"]["data"]["urls"] == [file]

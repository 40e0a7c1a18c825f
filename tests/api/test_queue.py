"""The queue over HTTP: a queued run's place, and quotas as errors that say what is full."""

from __future__ import annotations

import httpx

from mok_service import runs
from mok_service.runs import Node
from tests.services import SPEC, Service, Worker


def test_a_queued_run_shows_its_place_until_it_is_claimed(api: httpx.Client, service: Service, worker: Worker) -> None:
    runs.report_nodes(service.db, "w", [Node("n", {"cpu": 1}, {"cpus": "2"}, "w")], worker.now())
    first, second = (api.post("/v1/jobs", json=SPEC).json()["run"]["id"] for _ in range(2))
    place = api.get(f"/v1/runs/{first}").json()["queue"]
    assert (place["position"], place["of"], place["why_waiting"]) == (1, 2, "it starts at the scheduler's next round")
    assert place["estimated_start"] is not None
    assert worker.claim().run_id == first
    assert api.get(f"/v1/runs/{first}").json()["queue"] is None
    listed = {run["id"]: run["queue"] for run in api.get("/v1/runs").json()["items"]}
    assert listed[first] is None and listed[second]["position"] == 1
    assert listed[second]["why_waiting"] == "all CPUs of a machine wanted, 0 free; how long the active runs take isn't known yet"


def test_a_full_quota_is_429_and_a_hopeless_request_403(api: httpx.Client, service: Service) -> None:
    runs.set_quota(service.db, "local", {"queued_max": 1})
    made = api.post("/v1/jobs", json=SPEC)
    refused = api.post("/v1/jobs", json=SPEC)
    assert (made.status_code, refused.status_code) == (201, 429)
    error = refused.json()["error"]
    assert (error["code"], error["detail"]) == ("quota_exceeded", {"limit": "queued_max", "value": 1, "used": 1})
    assert error["message"] == "tenant local has 1 of 1 runs waiting (queued or paused)"
    assert api.post(f"/v1/jobs/{made.json()['job']['id']}/runs", json={}).status_code in (409, 429)
    runs.set_quota(service.db, "local", {"runs_max": 0})
    assert api.post("/v1/jobs", json=SPEC).status_code == 403

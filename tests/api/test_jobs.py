"""Submitting and listing jobs over REST."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from mok_service import jobs, runs
from mok_service.db.session import Database
from mok_service.runs.types import Node
from mok_service.settings import Settings
from mok_service.spec import parse_job
from tests.databases import KINDS
from tests.services import SPEC, Service, Worker, running_api, spec


def submit(api: httpx.Client, body: Any = SPEC, **headers: str) -> dict[str, Any]:
    answer = api.post("/v1/jobs", json=body, headers=headers)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def test_a_submitted_job_is_resolved_and_its_run_queued(api: httpx.Client) -> None:
    answer = api.post("/v1/jobs", json=SPEC)
    body = answer.json()
    job, run = body["job"], body["run"]
    assert answer.headers["Location"] == f"/v1/jobs/{job['id']}"
    assert job["training"]["optimizer"]["lr"] == 3e-4 and job["training"]["batch"]["group_sequences"] > 0
    assert (run["status"], run["kind"], run["step"], run["job"]) == ("queued", "original", None, job["id"])
    assert api.get(f"/v1/jobs/{job['id']}").json() == job
    shown = api.get(f"/v1/runs/{run['id']}").json()
    assert shown.pop("queue")["position"] == 1 and shown == run


@pytest.mark.parametrize("seed", [0, 2**53 + 1, 2**63 - 1])
def test_a_seed_is_exact(api: httpx.Client, seed: int) -> None:
    """Case 21."""
    job = submit(api, spec(seed=seed))["job"]
    assert job["seed"] == job["training"]["seed"] == job["submitted"]["training"]["seed"] == seed
    answer = api.get(f"/v1/jobs/{job['id']}")
    assert answer.json() == job and f'"seed":{seed},' in answer.text


@pytest.mark.parametrize("seed", ["9223372036854775808", "-1", '"7"', "7.0", "true", "1e400", "NaN", "-Infinity", "1" * 5000])
def test_anything_else_is_no_seed(api: httpx.Client, seed: str) -> None:
    """Case 21."""
    body = '{"training": {"name": "x", "seed": SEED}}'.replace("SEED", seed)
    answer = api.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert "training.seed" in [fault["field"] for fault in error["detail"]["errors"]]
    assert "9223372036854775807" in error["message"]


def test_a_seed_is_drawn_when_there_is_none(api: httpx.Client) -> None:
    """Case 8."""
    first, second = (submit(api, spec(seed=None))["job"] for _ in range(2))
    assert first["seed"] != second["seed"] and 0 <= first["seed"] < 2**63
    assert api.get(f"/v1/jobs/{first['id']}").json()["seed"] == first["seed"]


@pytest.mark.parametrize(("where", "key", "nearest"), [
    ((), "trainin", "training"), (("training",), "learning_rate", "training.optimizer.lr"),
    (("training", "optimizer"), "learning_rate", "lr"), (("training", "model"), "expert", "experts"),
    (("execution",), "thread", "threads"),
])
def test_an_unknown_key_is_named_with_the_nearest(api: httpx.Client, where: tuple[str, ...], key: str, nearest: str) -> None:
    """Case 22."""
    body: dict[str, Any] = {"training": {**SPEC["training"], "optimizer": {}, "model": {"preset": "tiny"}}, "execution": {}}
    place = body
    for part in where:
        place = place[part]
    place[key] = 1
    answer = api.post("/v1/jobs", json=body)
    assert answer.status_code == 422
    fault = next(f for f in answer.json()["error"]["detail"]["errors"] if f["field"] == ".".join((*where, key)))
    assert (fault["problem"], fault["nearest"]) == ("is no known key", nearest)


def test_more_devices_than_there_are_is_refused_with_the_reason(api: httpx.Client, service: Service) -> None:
    """Case 23, where a scheduler has said what there is; else the run waits, and can be cancelled."""
    waiting = submit(api, {**SPEC, "execution": {"device": "cuda"}})["run"]
    labels = {"cpus": "2", "memory_bytes": str(2**34)}
    runs.report_nodes(service.db, "test", [Node("h", {"cpu": 1, "cuda": 0}, labels)], service.db.now())
    for path in ("/v1/jobs", "/v1/jobs/validate"):
        answer = api.post(path, json={**SPEC, "execution": {"device": "cuda"}})
        assert answer.status_code == 422 and answer.json()["error"]["code"] == "unrunnable"
        assert "cuda" in answer.json()["error"]["message"]
    assert api.post(f"/v1/runs/{waiting['id']}/cancel").json()["status"] == "cancelled"


def test_too_little_memory_is_refused_with_the_reason(api: httpx.Client, service: Service) -> None:
    labels = {"cpus": "2", "memory_bytes": str(2**30)}
    runs.report_nodes(service.db, "test", [Node("h", {"cpu": 1, "cuda": 0}, labels)], service.db.now())
    answer = api.post("/v1/jobs", json=spec(model={"preset": "qwen3-30b-a3b"}))
    assert answer.status_code == 422 and "memory" in answer.json()["error"]["message"]
    assert api.get("/v1/jobs").json()["items"] == []


def test_validating_shows_the_resolved_spec_and_its_cost_and_stores_nothing(api: httpx.Client) -> None:
    answer = api.post("/v1/jobs/validate", json=SPEC)
    body = answer.json()
    assert answer.status_code == 200 and body["estimate"]["parameters_total"] > body["estimate"]["parameters_active"] > 0
    assert body["spec"]["training"]["batch"]["group_sequences"] > 0
    assert api.get("/v1/jobs").json()["items"] == []
    assert body["training_digest"] == submit(api)["job"]["digest"]
    unseeded = api.post("/v1/jobs/validate", json=spec(seed=None)).json()
    assert unseeded["training_digest"] is None and unseeded["spec"]["training"]["seed"] is None


class TestIdempotency:
    @pytest.fixture(params=KINDS)
    def kind(self, request: pytest.FixtureRequest) -> str:
        name: str = request.param
        return name

    def test_twenty_retries_at_once_make_one_job(self, url: str, settings: Settings, service: Service) -> None:
        """Case 12, also across a restart."""
        def post(_: int) -> dict[str, Any]:
            with httpx.Client(base_url=service.url, timeout=60.0) as client:
                return submit(client, spec(seed=None), **{"Idempotency-Key": "one"})

        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(post, range(20)))
        assert [a["created"] for a in answers].count(True) == 1
        assert len({a["job"]["id"] for a in answers}) == len({a["run"]["id"] for a in answers}) == 1
        assert len({a["job"]["seed"] for a in answers}) == 1
        db = Database(url)
        with running_api(db, settings) as again, httpx.Client(base_url=again.url) as client:
            repeated = submit(client, spec(seed=None), **{"Idempotency-Key": "one"})
            assert repeated["job"] == answers[0]["job"] and repeated["run"]["id"] == answers[0]["run"]["id"]
            assert len(client.get("/v1/jobs").json()["items"]) == len(client.get("/v1/runs").json()["items"]) == 1
        db.close()

    def test_another_body_under_the_key_is_refused_and_names_the_job(self, api: httpx.Client) -> None:
        """Case 13."""
        first = submit(api, **{"Idempotency-Key": "one"})
        answer = api.post("/v1/jobs", json=spec(steps=4), headers={"Idempotency-Key": "one"})
        assert answer.status_code == 409 and first["job"]["id"] in answer.json()["error"]["message"]
        assert submit(api, spec(steps=4), **{"Idempotency-Key": "two"})["job"]["id"] != first["job"]["id"]

    def test_a_rerun_under_a_key_is_made_once(self, api: httpx.Client, worker: Worker) -> None:
        job = submit(api)["job"]
        worker.work()
        made = [api.post(f"/v1/jobs/{job['id']}/runs", json={}, headers={"Idempotency-Key": "one"}) for _ in range(2)]
        assert [answer.status_code for answer in made] == [201, 201]
        assert made[0].json() == made[1].json() and made[0].json()["kind"] == "reproduction"

    @pytest.mark.parametrize("what", ["jobs", "runs"])
    def test_205_paged_by_20_come_once_each(self, api: httpx.Client, service: Service, what: str) -> None:
        """Case 24: with one timestamp, while rows come and change."""
        at, job = service.db.now(), parse_job(SPEC)
        made = [jobs.submit(service.db, job, now=at) for _ in range(205)]
        seen: list[str] = []
        cursor: dict[str, str] = {}
        while True:
            page = api.get(f"/v1/{what}", params={"limit": 20, **cursor}).json()
            seen += [item["id"] for item in page["items"]]
            if page["next_cursor"] is None:
                break
            cursor = {"cursor": page["next_cursor"]}
            jobs.submit(service.db, job)
            runs.cancel(service.db, made[len(seen)].run.id)
        assert len(seen) == 205
        assert set(seen) == {m.job.id if what == "jobs" else m.run.id for m in made}

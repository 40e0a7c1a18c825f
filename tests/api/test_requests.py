"""Bad requests: never a 500, always one format, and nothing changes."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mok_service.client import Client
from mok_service.errors import InvalidSpec
from tests.api.conftest import shared_service
from tests.services import SPEC, Service

JSON = {"Content-Type": "application/json"}
POSTS = ("/v1/jobs", "/v1/jobs/validate", "/v1/jobs/job_0198c0de5e1f7000800000000000c0de/runs", "/v1/verifications")
BODIES: dict[str, bytes] = {
    "empty": b"", "not json": b"{", "a list": b"[]", "null": b"null", "a number": b"1e400", "nan": b"NaN",
    "duplicate keys": b'{"training": {}, "training": {}}', "not utf-8": b'{"training": "\xff"}',
    "utf-16": '{"a": 1}'.encode("utf-16"),
    "deep": b"[" * 100_000, "deep object": b'{"a":' * 5000, "long integer": b'{"training": ' + b"9" * 100_000 + b"}",
    "lone surrogate": b'{"training": {"name": "\\ud800"}}', "nul": b'{"training": {"name": "a\\u0000b"}}',
    "infinite lr": b'{"training": {"optimizer": {"lr": Infinity}}}', "huge lr": b'{"training": {"optimizer": {"lr": 1e400}}}',
    "nan in a list": b'{"training": {"data": {"source": "files", "paths": [NaN]}}}', "unknown": b'{"\\ud800": 1, "\\u0000": 2}',
}


@pytest.fixture(scope="module")
def service(migrated_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with shared_service(migrated_file, tmp_path_factory) as running:
        yield running


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_a_bad_body_is_refused(api: httpx.Client, path: str, body: bytes) -> None:
    answer = api.post(path, content=body, headers=JSON)
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("path", POSTS)
def test_a_body_of_two_mebibytes_is_refused(api: httpx.Client, path: str) -> None:
    try:
        answer = api.post(path, content=b" " * (2 << 20), headers=JSON)
    except httpx.WriteError:  # the answer came, and the connection was closed, before all was sent
        return
    assert answer.status_code == 413


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("media_type", [
    None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
    "application/json; charset=utf-16", "application/jsonp", "text/json", "",
])
def test_only_json_is_read(api: httpx.Client, path: str, media_type: str | None) -> None:
    """A page of another site can send the others without being asked."""
    headers = {} if media_type is None else {"Content-Type": media_type}
    answer = api.post(path, content=b"{}", headers=headers)
    assert answer.status_code == 415 and answer.json()["error"]["code"] == "wrong_media_type"


def test_json_in_utf_8_by_name_is_read(api: httpx.Client) -> None:
    for media_type in ("application/json; charset=utf-8", "Application/JSON;charset=UTF-8", 'application/json; charset="utf-8"'):
        answer = api.post("/v1/jobs", json=SPEC, headers={"Content-Type": media_type})
        assert answer.status_code == 201


@pytest.mark.parametrize("path", [
    "/v1/runs?limit=0", "/v1/runs?limit=201", "/v1/runs?limit=x", "/v1/runs?limit=1e400", "/v1/runs?limit=" + "9" * 5000,
    "/v1/runs?status=no", "/v1/runs?cursor=x", "/v1/runs?cursor=%00", "/v1/runs?cursor=" + "a" * 501, "/v1/runs?digest=sha256:x",
    "/v1/runs?digest=%ff", "/v1/jobs?name=%00", "/v1/jobs?name=a%0ab", "/v1/jobs?nam=x", "/v1/jobs?name=a&name=b",
    "/v1/runs?job=%00", "/v1/jobs?cursor=MjAyNg", "/v1/digests/x", "/v1/digests/sha256:%00",
])
def test_a_bad_parameter_is_refused(api: httpx.Client, path: str) -> None:
    answer = api.get(path)
    assert answer.status_code == 422, answer.text


@pytest.mark.parametrize("path", [
    "/v1/runs/x", "/v1/runs/%00", "/v1/runs/run_%ff", "/v1/jobs/run_0198c0de5e1f7000800000000000c0de", "/v1/runs/" + "a" * 5000,
    "/v1/verifications/%00", "/v1/jobs/..%2f", "/nothing", "/v1/", "/v1/runs/", "/v1/jobs/%F0%9F%9A%80",
    *(f"/v1/runs/run_0198c0de5e1f7000800000000000c0de/{what}" for what in (
        "steps", "logs", "events", "checkpoints", "attempts", "verifications", "provenance", "checkpoints/1/files/x")),
])
def test_what_is_not_there_is_not_found(api: httpx.Client, path: str) -> None:
    assert api.get(path).status_code == 404


@pytest.mark.parametrize("number", ["-2", "x", "1.5", str(2**63), "NaN"])
@pytest.mark.parametrize("what", ["steps", "logs", "events"])
def test_a_place_that_is_no_number_is_refused(api: httpx.Client, what: str, number: str) -> None:
    run = api.post("/v1/jobs", json=SPEC).json()["run"]["id"]
    assert api.get(f"/v1/runs/{run}/{what}?after={number}").status_code == 422
    assert api.get(f"/v1/runs/{run}/{what}?after={2**63 - 1}").json()["items"] == []
    if what == "events":
        assert api.get(f"/v1/runs/{run}/events", headers={"Last-Event-ID": number}).status_code == 422


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "POST"])
def test_a_method_that_a_route_does_not_have_is_refused_in_the_one_format(api: httpx.Client, method: str) -> None:
    answer = api.request(method, "/v1/runs")
    assert answer.status_code == 405 and answer.json()["error"]["code"] == "method_not_allowed"
    assert answer.headers["Allow"] == "GET"


@pytest.mark.parametrize("key", ["", "a" * 256, "é"])
def test_an_idempotency_key_that_cannot_be_one_is_refused(api: httpx.Client, key: str) -> None:
    answer = api.post("/v1/jobs", json=SPEC, headers=[(b"Idempotency-Key", key.encode())])  # type: ignore[list-item]
    assert answer.status_code == 422 and "Idempotency-Key" in answer.json()["error"]["message"]


def test_steering_takes_no_body(api: httpx.Client) -> None:
    run = api.post("/v1/jobs", json=SPEC).json()["run"]["id"]
    assert api.post(f"/v1/runs/{run}/cancel", content=b'{"force": true}', headers=JSON).status_code == 422
    assert api.post(f"/v1/runs/{run}/cancel", content=b"x=1", headers={"Content-Type": "text/plain"}).status_code == 415
    assert api.get(f"/v1/runs/{run}").json()["desired_state"] == "run"
    assert api.post(f"/v1/runs/{run}/cancel").json()["status"] == "cancelled"


def test_a_new_run_with_an_unknown_key_names_the_nearest(api: httpx.Client) -> None:
    """Case 22, for the other bodies."""
    job = api.post("/v1/jobs", json=SPEC).json()["job"]["id"]
    answer = api.post(f"/v1/jobs/{job}/runs", json={"execution": {"thread": 2}, "reproduce": None})
    faults = {fault["field"]: fault["nearest"] for fault in answer.json()["error"]["detail"]["errors"]}
    assert answer.status_code == 422 and faults == {"execution.thread": "threads", "reproduce": "reproduces"}


class TestOtherSites:
    """A page of another site must not be able to use a service on this machine."""

    @pytest.mark.parametrize("host", [
        "evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "[::2]", "",
    ])
    def test_a_foreign_host_is_refused(self, api: httpx.Client, host: str) -> None:
        for method, path in (("GET", "/v1/runs"), ("POST", "/v1/jobs"), ("GET", "/"), ("GET", "/healthz")):
            answer = api.request(method, path, headers={"Host": host})
            assert answer.status_code == 421 and answer.json()["error"]["code"] == "wrong_host"

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:1", "LOCALHOST:8080", "localhost", "[::1]:8080"])
    def test_our_own_names_are_answered(self, api: httpx.Client, host: str) -> None:
        assert api.get("/healthz", headers={"Host": host}).status_code == 200

    @pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "http://[", "https://evil.example:443"])
    def test_a_foreign_page_changes_nothing(self, api: httpx.Client, origin: str) -> None:
        run = api.post("/v1/jobs", json=SPEC).json()["run"]["id"]
        answer = api.post(f"/v1/runs/{run}/cancel", headers={"Origin": origin})
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "cross_origin"
        assert api.get(f"/v1/runs/{run}").json()["status"] == "queued"

    def test_our_own_page_may(self, api: httpx.Client, service: Service) -> None:
        run = api.post("/v1/jobs", json=SPEC).json()["run"]["id"]
        assert api.post(f"/v1/runs/{run}/cancel", headers={"Origin": service.url}).status_code == 200

    def test_no_answer_may_be_read_elsewhere(self, api: httpx.Client) -> None:
        answer = api.get("/v1/runs", headers={"Origin": "http://evil.example"})
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert answer.headers["X-Content-Type-Options"] == "nosniff" and answer.headers["Cache-Control"] == "no-store"


def test_bytes_that_are_no_request_do_not_stop_the_service(service: Service, api: httpx.Client) -> None:
    for request in (b"GET\r\n\r\n", b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n"):
        connection = http.client.HTTPConnection(*service.address, timeout=10)
        connection.connect()
        connection.sock.sendall(request)
        assert b"500" not in connection.sock.recv(1000).split(b"\r\n")[0]
        connection.close()
    assert api.get("/healthz").json() == {"status": "ok"}


def test_our_own_fault_is_a_500_that_tells_nothing(service: Service, api: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr("mok_service.runs.nodes", broken)
    answer = httpx.get(f"{service.url}/v1/nodes")
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal" and "secret" not in answer.text


def test_the_client_raises_what_the_service_refused(service: Service) -> None:
    with Client(service.url) as client, pytest.raises(InvalidSpec) as refused:
        client.submit('{"training": {"lr": 1}}')
    assert {"field": "training.lr", "nearest": "training.optimizer.lr"}.items() <= refused.value.detail["errors"][-1].items()

"""What operators see: readiness, metrics, the log, traces; and what nobody may see: secrets."""

from __future__ import annotations

import json
import logging
import re
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy import text

from mok_service import auditlog, logs, runs, tracing, webhooks
from mok_service.db.session import Database
from mok_service.retention import REMOVED, Retention
from mok_service.runs.types import LogLine, Node
from mok_service.settings import Settings
from mok_service.webhooks import Outbox
from tests.api.keys import Keyed
from tests.databases import Clock
from tests.service import play
from tests.services import SPEC, Service, Worker, running_api

# ---- Readiness -------------------------------------------------------------------------------------------------------

def test_ready_means_that_work_gets_done(api: httpx.Client, service: Service) -> None:
    answer = api.get("/readyz")
    assert answer.status_code == 503 and "no scheduler" in answer.json()["error"]["message"]
    now = service.db.now()
    runs.report_nodes(service.db, "w", [Node("h", {"cpu": 1})], now - timedelta(seconds=service.settings.lease_seconds + 5))
    assert api.get("/readyz").json()["error"]["detail"]["scheduler"].endswith("s ago")
    runs.report_nodes(service.db, "w", [Node("h", {"cpu": 1})], now)
    assert api.get("/readyz").json() == {"status": "ready"}
    with service.db.write() as tx:
        tx.execute(text("UPDATE alembic_version SET version_num = '0001'"))
    answer = api.get("/readyz")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "schema_mismatch"
    assert api.get("/healthz").status_code == 200


def test_a_database_that_is_away_is_a_503_in_the_one_format(url: str, tmp_path: Path) -> None:
    db = Database("postgresql://u:hunter2@127.0.0.1:1/none")
    with running_api(db, Settings(data_dir=tmp_path)) as service:
        for path in ("/readyz", "/v1/runs", "/metrics"):
            answer = httpx.get(service.url + path, timeout=30)
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "database_unavailable"
            assert "hunter2" not in answer.text and answer.headers["Retry-After"] == "5"
        assert service.app.state.metrics.database_errors == 3
    db.close()


# ---- Metrics ---------------------------------------------------------------------------------------------------------

def test_metrics_tell_how_the_service_is(api: httpx.Client, service: Service, worker: Worker) -> None:
    webhooks.create_webhook(service.db, url="https://example.org/", events=["run.ended"])
    for _ in range(2):
        api.post("/v1/jobs", json=SPEC)
    worker.work()
    api.get("/v1/runs/run_x")
    told = dict(re.findall(r"^(\w+(?:\{.*\})?) ([0-9.e+-]+)$", api.get("/metrics").text, re.MULTILINE))
    expected = {
        'mok_runs{status="queued"}': 1, 'mok_runs{status="succeeded"}': 1, "mok_queue": 1, "mok_outbox": 1,
        "mok_unsigned_runs": 1, 'mok_attempts_ended_total{end="finished"}': 1, "mok_steps_total": 3, "mok_nodes": 0,
        "mok_event_streams": 0,
        'mok_http_requests_total{method="POST",route="/v1/jobs",status="201"}': 2, "mok_database_errors_total": 0,
        'mok_http_requests_total{method="GET",route="/v1/runs/{run}",status="404"}': 1, "mok_deliveries_given_up_total": 0,
        'mok_http_request_seconds_count{method="POST",route="/v1/jobs"}': 2,
        'mok_http_request_seconds_bucket{method="POST",route="/v1/jobs",le="+Inf"}': 2,
    }
    assert {name: float(told[name]) for name in expected} == expected
    assert float(told["mok_queue_oldest_seconds"]) >= 0
    worker.sign()
    assert "mok_unsigned_runs 0\n" in api.get("/metrics").text


def test_metrics_are_well_formed(api: httpx.Client) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    families = {family.name: family.type for family in text_string_to_metric_families(api.get("/metrics").text)}
    assert families["mok_http_request_seconds"] == "histogram" and families["mok_steps"] == "counter" and len(families) > 15


# ---- The log ---------------------------------------------------------------------------------------------------------

def test_every_answer_has_the_id_that_errors_and_the_log_have(service: Service, caplog: pytest.LogCaptureFixture,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the reason")

    monkeypatch.setattr("mok_service.runs.nodes", broken)
    caplog.handler.setFormatter(logs.JsonFormatter())
    answer = httpx.get(f"{service.url}/v1/nodes", headers={"X-Request-ID": "chosen-by-a-stranger"})
    name = answer.headers["X-Request-ID"]
    assert answer.json()["error"]["request"] == name and name.startswith("req_")
    line = next(json.loads(line) for line in caplog.text.splitlines() if "failed" in line)
    assert line["request"] == name and "the reason" in line["exception"] and line["level"] == "error"


@pytest.mark.parametrize("secret", ["mok_0123456789ab_" + "Ab-_" * 10 + "xyz", "whsec_" + "Ab+/" * 10, "hunter2"])
@pytest.mark.parametrize("formatter", [logs.JsonFormatter(), logs.TextFormatter(logs.TEXT_FORMAT)])
def test_what_looks_like_a_secret_is_not_logged(formatter: logging.Formatter, secret: str) -> None:
    shown = f"postgresql://user:{secret}@host/name" if secret == "hunter2" else f"Authorization: Bearer {secret} x"
    try:
        raise ValueError(shown)
    except ValueError as error:
        trace = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("mok", logging.ERROR, "f", 1, "of %s", (shown,), trace)
    assert secret not in formatter.format(record) and "***" in formatter.format(record)


def test_spans_carry_ids_and_no_secrets(api: httpx.Client, service: Service) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.use(provider)
    try:
        run = api.post("/v1/jobs", json=SPEC, headers={"Idempotency-Key": "hunter2"}).json()["run"]["id"]
        api.get(f"/v1/runs/{run}?x=hunter2", headers={"Authorization": "Bearer hunter2"})
        api.get(f"/v1/runs/{run}")
    finally:
        tracing.use(None)
    spans = [(span.name, dict(span.attributes or {})) for span in exporter.get_finished_spans()]
    assert ("GET /v1/runs/{run}", run, 200) in [(n, a.get("mok.run"), a["http.response.status_code"]) for n, a in spans]
    assert "hunter2" not in str(spans)


def test_without_an_endpoint_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    tracing.start("x")
    with tracing.span("x") as span:
        assert span is None


# ---- Secrets ---------------------------------------------------------------------------------------------------------

def test_planted_secrets_come_out_nowhere(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Keys, webhooks' secrets and the signing key: in no answer, no log, no metric, no record, and not in the audit log."""
    caplog.set_level(logging.DEBUG)
    db, settings = Database(url), Settings(data_dir=tmp_path, require_keys=True)
    with running_api(db, settings) as service:
        keyed, worker = Keyed(service), Worker(db, settings)
        key = keyed.key("operator", "t")
        made = keyed.ask("POST", "/v1/api-keys", key, json={"name": "n", "role": "admin"}).json()
        hook = keyed.ask("POST", "/v1/webhooks", key, json={"url": "https://example.org/", "events": ["run.ended"]}).json()
        run = keyed.ask("POST", "/v1/jobs", key, json=SPEC).json()["run"]["id"]
        keyed.ask("POST", f"/v1/runs/{run}/cancel", key)
        worker.sign()
        outbox = Outbox(db, settings, httpx.MockTransport(lambda _: httpx.Response(500)))
        outbox.tick(db.now())
        secrets = [key.split("_", 2)[2], made["key"].split("_", 2)[2], hook["secret"].removeprefix("whsec_")]
        pem = settings.key_file().read_text().splitlines()[1]
        paths = ["/v1/api-keys", f"/v1/api-keys/{made['id']}", "/v1/webhooks", f"/v1/webhooks/{hook['id']}", "/v1/audit",
                 "/metrics", f"/v1/webhooks/{hook['id']}/deliveries", f"/v1/runs/{run}/provenance", f"/v1/runs/{run}/attestation",
                 f"/v1/runs/{run}/events", "/v1/keys", "/v1/log/entries", "/openapi.json", "/", "/v1/runs/x", "/v1/nodes"]
        told = "".join(keyed.ask("GET", path, key).text for path in paths)
        told += keyed.ask("GET", "/v1/runs", made["key"] + "x").text + str(auditlog.entries(db, "t")) + caplog.text
        assert len(told) > 10_000
        for secret in (*secrets, pem):
            assert secret not in told
    db.close()


# ---- Retention -------------------------------------------------------------------------------------------------------

class TestRetention:
    @pytest.fixture(params=["sqlite", "postgresql"])
    def kind(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def run(self, db: Database, clock: Clock) -> str:
        """With 250 lines, and cancelled."""
        run = play.submit(db)
        lease = runs.claim(db, clock.tick(), "w", play.NO_ROOM_LIMIT)
        assert lease is not None
        runs.mark_starting(db, lease, clock.tick())
        runs.mark_running(db, lease, clock.tick(), play.ENVIRONMENT, play.PLACEMENT, play.MANIFEST)
        runs.append(db, lease, [], [LogLine(n, clock.now, "info", f"line {n}") for n in range(250)], [], clock.tick())
        runs.cancel(db, lease.run_id, now=clock.tick())
        runs.finish(db, lease, runs.Outcome("cancelled", "user_cancelled"), clock.tick())
        assert run is not None
        return lease.run_id

    def keeper(self, db: Database, tmp_path: Path, **more: Any) -> Retention:
        return Retention(db, Settings(data_dir=tmp_path, **more))

    def check(self, db: Database, run: str, first: int, note: str) -> None:
        lines = runs.logs(db, run)
        assert [line.number for line in lines] == list(range(first, 251)) and note in lines[0].line.message
        assert [line.line.message for line in lines[1:]] == [f"line {n - 1}" for n in range(first + 1, 251)]
        told = runs.events(db, run)
        assert [event.number for event in told] == list(range(1, len(told) + 1)), "events have no gaps"
        messages = [event.payload["message"] for event in told if event.type == "log"]
        assert messages == [REMOVED] * first + [f"line {n}" for n in range(first, 250)]

    def test_the_newest_lines_stay_and_a_note_says_what_went(self, db: Database, clock: Clock, run: str, tmp_path: Path) -> None:
        keeper = self.keeper(db, tmp_path, log_lines_max=100)
        assert keeper.tick(clock.tick()) == 149
        self.check(db, run, 150, "the newest 100 are kept")
        assert keeper.tick(clock.tick()) == 0

    def test_after_its_time_only_a_note_is_left(self, db: Database, clock: Clock, run: str, tmp_path: Path) -> None:
        keeper = self.keeper(db, tmp_path, log_days=1.0)
        assert keeper.tick(clock.tick(86_000)) == 0
        assert keeper.tick(clock.tick(1000)) == 249
        self.check(db, run, 250, "their time was over")
        assert keeper.tick(clock.tick(86_400)) == 0

    def test_by_default_nothing_goes(self, db: Database, clock: Clock, run: str, tmp_path: Path) -> None:
        assert self.keeper(db, tmp_path).tick(clock.tick(10**9)) == 0 and len(runs.logs(db, run)) == 250


# ---- Event streams of many -------------------------------------------------------------------------------------------

def test_a_tenants_streams_are_limited_and_leave_nothing(url: str, tmp_path: Path) -> None:
    db = Database(url)
    with running_api(db, Settings(data_dir=tmp_path, require_keys=True, event_streams_tenant_max=2)) as service:
        keyed = Keyed(service)
        ours, theirs = keyed.key("member", "a"), keyed.key("member", "b")
        run = {key: keyed.ask("POST", "/v1/jobs", key, json=SPEC).json()["run"]["id"] for key in (ours, theirs)}

        def stream(key: str) -> Any:
            headers = {"Authorization": f"Bearer {key}", "Accept": "text/event-stream"}
            return httpx.stream("GET", f"{service.url}/v1/runs/{run[key]}/events", headers=headers, timeout=30)

        with stream(ours) as one, stream(ours) as two, stream(ours) as three, stream(theirs) as other:
            begun = [next(answer.iter_lines()) for answer in (one, two, other)]
            assert begun == ["retry: 1000"] * 3
            assert three.status_code == 503 and three.read() and three.json()["error"]["code"] == "busy"
        deadline = threading.Event()
        while service.app.state.streams.by_tenant:
            assert not deadline.wait(0.01)
    db.close()

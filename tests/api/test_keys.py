"""API keys: nothing without one, nothing of another tenant, nothing beyond the role; case 26."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from sqlalchemy import select

from mok_api.access import ROUTES, check_every_route, client_address
from mok_api.limits import BUCKETS_MAX, Buckets
from mok_service import access, auditlog, jobs, webhooks
from mok_service.access import OF_ROLE, PERMISSIONS
from mok_service.client import Client
from mok_service.db.session import Database
from mok_service.db.tables import api_keys
from mok_service.errors import Forbidden, InvalidSpec, NotFound, Unauthenticated
from mok_service.settings import Settings
from tests.api.conftest import routes
from tests.api.keys import Keyed, admin
from tests.databases import Clock
from tests.services import SPEC, Worker, running_api

ZERO = "0198c0de5e1f7000800000000000c0de"
IDS = {"job": f"job_{ZERO}", "run": f"run_{ZERO}", "verification": f"ver_{ZERO}", "key": f"key_{ZERO}", "webhook": f"whk_{ZERO}",
       "digest": "sha256:" + "0" * 64, "step": "1", "name": "model.safetensors"}
BODIES: dict[str, Any] = {"/v1/jobs": SPEC, "/v1/jobs/validate": SPEC, "/v1/api-keys": {"name": "x", "role": "viewer"},
                          "/v1/webhooks": {"url": "https://example.org/", "events": ["run.ended"]}}


@pytest.fixture(scope="module")
def keyed(migrated_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("keyed")
    (folder / "mok.db").write_bytes(migrated_file.read_bytes())
    db = Database(f"sqlite:///{folder}/mok.db")
    with running_api(db, Settings(data_dir=folder, require_keys=True, requests_per_second=10_000, requests_burst=10_000,
                                  failed_keys_per_minute=1000, event_seconds=0.1)) as service:
        yield Keyed(service)
    db.close()


def described(keyed: Keyed) -> list[tuple[str, str, dict[str, Any]]]:
    """(method, path, operation) of openapi.json, which needs no key."""
    paths = keyed.ask("GET", "/openapi.json").json()["paths"]
    return [(method.upper(), path, operation) for path, item in paths.items() for method, operation in item.items()]


def filled(path: str, ids: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: ids[match[1]], path)


# ---- Nothing without a key -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("header", [None, "", "Bearer", "Basic eDp5", "Bearer mok_0123456789ab_" + "A" * 43,
                                    "Bearer x", "bearer mok_", "mok_x", "Bearer " + "a" * 600])
def test_no_route_answers_without_a_good_key(keyed: Keyed, header: str | None) -> None:
    closed = 0
    for method, path, operation in described(keyed):
        public = path in ("/healthz", "/readyz")
        assert operation["security"] == ([] if public else [{"key": []}])
        answer = keyed.ask(method, filled(path, IDS), headers={} if header is None else {"Authorization": header},
                           json=BODIES.get(path))
        if not public:
            closed += 1
            assert answer.status_code == 401, (method, path, answer.text)
            assert answer.json()["error"]["code"] == "unauthenticated" and answer.headers["WWW-Authenticate"] == "Bearer"
    assert closed == len(routes()) - 3


def test_the_table_has_every_route_and_nothing_else() -> None:
    assert set(ROUTES) == {(method, route.path) for route in routes() for method in route.methods}


def test_a_route_that_nobody_decided_about_stops_the_start() -> None:
    router = APIRouter()
    router.add_api_route("/v1/new", lambda: None, methods=["POST"])
    with pytest.raises(RuntimeError, match="POST /v1/new"):
        check_every_route(router.routes)


@pytest.mark.parametrize(("host", "more", "needed"), [
    ("127.0.0.1", {}, False), ("localhost", {}, False), ("::1", {}, False), ("127.1.2.3", {}, False), ("0.0.0.0", {}, True),
    ("::", {}, True), ("192.168.1.7", {}, True), ("example.org", {}, True), ("127.0.0.1.example.org", {}, True),
    ("127.0.0.1", {"require_keys": True}, True), ("127.0.0.1", {"trusted_proxies": "10.0.0.0/8"}, True),
])
def test_only_loopback_needs_no_key_and_elsewhere_one_must_be_there(db: Database, tmp_path: Path, host: str, needed: bool,
                                                                    more: dict[str, Any]) -> None:
    settings = Settings(data_dir=tmp_path, host=host, **more)
    assert access.keys_required(settings) == needed
    if needed:
        with pytest.raises(InvalidSpec, match="mok apikey create"):
            access.refuse_without_keys(db, settings)
        made, _ = access.create_key(db, admin("local"), name="x", role="viewer")
        access.refuse_without_keys(db, settings)
        access.revoke_key(db, admin("local"), made.id)
        with pytest.raises(InvalidSpec):
            access.refuse_without_keys(db, settings)
    else:
        access.refuse_without_keys(db, settings)


# ---- Nothing of another tenant ---------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def theirs(keyed: Keyed) -> dict[str, str]:
    """The ids of everything that another tenant has."""
    service, key = keyed.service, keyed.key("admin", "theirs")
    made = keyed.ask("POST", "/v1/jobs", key, json=SPEC, headers={"Idempotency-Key": "one"}).json()
    worker = Worker(service.db, service.settings)
    lease = worker.claim()
    assert lease.tenant == "theirs" and lease.run_id == made["run"]["id"]
    hook, _ = webhooks.create_webhook(service.db, url="https://example.org/x", events=["run.ended"], tenant="theirs")
    return {**IDS, "job": made["job"]["id"], "run": made["run"]["id"], "digest": made["job"]["digest"], "webhook": hook.id,
            "key": access.list_keys(service.db, admin("theirs")).items[0].id}


def test_another_tenants_ids_are_not_found(keyed: Keyed, theirs: dict[str, str]) -> None:
    ours = keyed.key("admin")
    seen = 0
    for method, path, operation in described(keyed):
        if "{" not in path or operation["x-permission"] in ("public", "operate", "metrics"):
            continue
        answer = keyed.ask(method, filled(path, theirs), ours, json={} if path.endswith("/runs") else None)
        if path == "/v1/digests/{digest}":
            assert answer.json()["items"] == []
        else:
            assert answer.status_code == 404, (method, path, answer.text)
        assert "theirs" not in answer.text
        seen += 1
    assert seen > 20
    verification = keyed.ask("POST", "/v1/verifications", ours, json={"run": theirs["run"]})
    assert verification.status_code == 404
    stream = keyed.ask("GET", f"/v1/runs/{theirs['run']}/events", ours, headers={"Accept": "text/event-stream"})
    assert stream.status_code == 404
    mine = keyed.ask("GET", f"/v1/runs/{theirs['run']}", keyed.key("viewer", "theirs"))
    assert mine.status_code == 200 and mine.json()["status"] == "claimed", "nobody cancelled it"


def test_lists_and_searches_show_only_the_own(keyed: Keyed, theirs: dict[str, str]) -> None:
    ours = keyed.key("admin", "empty")
    for method, path, operation in described(keyed):
        if method != "GET" or "{" in path or operation["x-permission"] in ("public", "operate", "metrics"):
            continue
        answer = keyed.ask("GET", path, ours)
        assert theirs["run"] not in answer.text and theirs["job"] not in answer.text, path
        if path in ("/v1/jobs", "/v1/runs", "/v1/webhooks", "/v1/audit"):
            assert answer.json()["items"] == [], path
    for query in (f"digest={theirs['digest']}", f"job={theirs['job']}", "status=claimed", "name=tiny"):
        assert keyed.ask("GET", f"/v1/runs?{query}", ours).json()["items"] == []
    assert [key["role"] for key in keyed.ask("GET", "/v1/api-keys", ours).json()["items"]] == ["admin"]


def test_idempotency_keys_are_the_tenants_own(keyed: Keyed, theirs: dict[str, str]) -> None:
    ours = keyed.key("member")
    other = {**SPEC, "training": {**SPEC["training"], "seed": 9}}
    answer = keyed.ask("POST", "/v1/jobs", ours, json=other, headers={"Idempotency-Key": "one"})
    assert answer.status_code == 201 and answer.json()["created"] and answer.json()["job"]["tenant"] == "ours"


def test_the_log_of_attestations_names_only_the_own_runs(keyed: Keyed) -> None:
    db, worker = keyed.service.db, Worker(keyed.service.db, keyed.service.settings)
    from mok_service import runs
    from mok_service.spec import parse_job

    for tenant in ("ours-1", "ours-2"):
        made = jobs.submit(db, parse_job(SPEC), tenant=tenant)
        runs.cancel(db, made.run.id, tenant)
    worker.sign()
    shown = keyed.ask("GET", "/v1/log/entries", keyed.key("viewer", "ours-1")).json()["items"]
    assert len(shown) == 2 and sum(entry["run"] is not None for entry in shown) == 1
    everything = keyed.ask("GET", "/v1/log/entries", keyed.key("operator", "ours-1")).json()["items"]
    assert [e["entry"] for e in everything] == [e["entry"] for e in shown] and all(e["run"] for e in everything)


def test_an_operator_acts_in_any_tenant_and_nobody_else_does(keyed: Keyed, theirs: dict[str, str]) -> None:
    path, inside = f"/v1/runs/{theirs['run']}", {"Mok-Tenant": "theirs"}
    operator = keyed.key("operator")
    assert keyed.ask("GET", path, operator).status_code == 404
    assert keyed.ask("GET", path, operator, headers=inside).status_code == 200
    assert keyed.ask("GET", path, keyed.key("admin"), headers=inside).status_code == 403
    assert keyed.ask("GET", path, operator, headers={"Mok-Tenant": "No Such!"}).status_code == 422


# ---- Nothing beyond the role -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("role", list(OF_ROLE))
def test_a_role_may_do_what_is_its_own(keyed: Keyed, role: Any) -> None:
    key = keyed.key(role, f"t-{role}")
    for method, path, operation in described(keyed):
        needed = operation["x-permission"]
        status = keyed.ask(method, filled(path, IDS), key, json=BODIES.get(path)).status_code
        assert (status == 403) == (needed != "public" and needed not in OF_ROLE[role]), (method, path, status)


def test_scopes_take_away_from_a_role(keyed: Keyed) -> None:
    key = keyed.key("operator", scopes=["metrics"])
    assert keyed.ask("GET", "/metrics", key).status_code == 200
    assert keyed.ask("GET", "/v1/runs", key).status_code == 403


def test_a_key_makes_no_key_that_may_do_more(keyed: Keyed) -> None:
    admin_key = keyed.key("admin", "makers")
    made = keyed.ask("POST", "/v1/api-keys", admin_key, json={"name": "a", "role": "member"})
    assert made.status_code == 201 and made.headers["Location"] == f"/v1/api-keys/{made.json()['id']}"
    assert made.json()["tenant"] == "makers" and keyed.ask("GET", "/v1/jobs", made.json()["key"]).status_code == 200
    assert keyed.ask("POST", "/v1/api-keys", admin_key, json={"name": "a", "role": "operator"}).status_code == 403
    narrow = keyed.key("admin", "makers", scopes=["keys", "read"])
    assert keyed.ask("POST", "/v1/api-keys", narrow, json={"name": "a", "role": "admin"}).status_code == 403
    assert keyed.ask("POST", "/v1/api-keys", narrow, json={"name": "a", "role": "viewer"}).status_code == 201
    for bad in ({"name": "", "role": "viewer"}, {"name": "a\n", "role": "viewer"}, {"name": "a", "role": "root"},
                {"name": "a", "role": "viewer", "scopes": ["keys"]}, {"name": "a", "role": "viewer", "expires_at": "soon"},
                {"name": "a", "role": "viewer", "expires_at": "2020-01-01T00:00:00Z"},
                {"name": "a", "role": "viewer", "expires_at": "2099-01-01T00:00:00"},
                {"name": "a", "role": "viewer", "expires_at": "0001-01-01T00:00:00+23:59"}):
        assert keyed.ask("POST", "/v1/api-keys", admin_key, json=bad).status_code == 422, bad
    operator = access.create_key(keyed.service.db, admin("makers"), name="o", role="operator")[0]
    assert keyed.ask("POST", f"/v1/api-keys/{operator.id}/revoke", admin_key).status_code == 404


def test_a_revoked_key_is_refused_at_once_and_its_streams_end(keyed: Keyed, theirs: dict[str, str]) -> None:
    made, text = access.create_key(keyed.service.db, admin("theirs"), name="x", role="viewer")
    headers = {"Authorization": f"Bearer {text}", "Accept": "text/event-stream"}
    with httpx.stream("GET", f"{keyed.service.url}/v1/runs/{theirs['run']}/events", headers=headers, timeout=30) as stream:
        lines = stream.iter_lines()
        assert next(lines) == "retry: 1000"
        answer = keyed.ask("POST", f"/v1/api-keys/{made.id}/revoke", keyed.key("admin", "theirs"))
        assert answer.status_code == 200 and answer.json()["revoked_at"]
        assert keyed.ask("GET", "/v1/runs", text).status_code == 401
        assert "event: end" not in list(lines), "it ends, and doesn't say that all was told"


# ---- Keys themselves, on both databases ------------------------------------------------------------------------------

class TestKeys:
    @pytest.fixture(params=["sqlite", "postgresql"])
    def kind(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    def test_a_key_is_random_and_stored_as_a_digest(self, db: Database) -> None:
        made = [access.create_key(db, admin("t"), name="x", role="viewer") for _ in range(20)]
        texts = {text for _, text in made}
        assert len(texts) == 20 and all(access.KEY.fullmatch(text) for text in texts)
        with db.read() as tx:
            stored = str(tx.execute(select(api_keys)).all())
        assert not [text for text in texts if text.split("_", 2)[2][:20] in stored]

    def test_a_key_ends(self, db: Database, clock: Clock) -> None:
        ends = clock.now + timedelta(hours=1)
        made, text = access.create_key(db, admin("t"), name="x", role="member", expires_at=ends)
        found = access.authenticate(db, text)
        assert (found.tenant, found.role, found.key) == ("t", "member", made.id) and access.is_good(db, made.id)
        clock.tick(3600)
        assert not access.is_good(db, made.id)
        with pytest.raises(Unauthenticated):
            access.authenticate(db, text)

    @pytest.mark.parametrize("change", [lambda t: t[:-1], lambda t: t[:-1] + ("A" if t[-1] != "A" else "B"), lambda t: t + "A",
                                        lambda t: t.upper(), lambda t: t[:16], lambda t: "", lambda t: t + "\n"])
    def test_nearly_a_key_is_none(self, db: Database, change: Any) -> None:
        _, text = access.create_key(db, admin("t"), name="x", role="member")
        with pytest.raises(Unauthenticated):
            access.authenticate(db, change(text))

    def test_last_use_is_coarse(self, db: Database, clock: Clock) -> None:
        made, text = access.create_key(db, admin("t"), name="x", role="member")
        first = clock.now
        access.authenticate(db, text)
        clock.tick(60)
        access.authenticate(db, text)
        assert access.get_key(db, admin("t"), made.id).last_used_at == first
        clock.tick(300)
        access.authenticate(db, text)
        assert access.get_key(db, admin("t"), made.id).last_used_at == clock.now

    def test_another_tenants_key_is_not_found(self, db: Database) -> None:
        made, text = access.create_key(db, admin("t"), name="x", role="member")
        for action in (access.get_key, access.revoke_key):
            with pytest.raises(NotFound):
                action(db, admin("u"), made.id)
        assert access.list_keys(db, admin("u")).items == () and access.authenticate(db, text).tenant == "t"

    def test_keys_are_paged(self, db: Database) -> None:
        made = [access.create_key(db, admin("t"), name=str(n), role="viewer")[0].id for n in range(5)]
        page = access.list_keys(db, admin("t"), limit=3)
        rest = access.list_keys(db, admin("t"), page.next_cursor, 3)
        assert sorted(key.id for key in (*page.items, *rest.items)) == sorted(made) and rest.next_cursor is None

    def test_only_operators_leave_their_tenant(self) -> None:
        assert admin("t").within("u").tenant == "u"
        with pytest.raises(Forbidden):
            access.Principal("t", "admin", OF_ROLE["admin"], "key_x").within("u")
        assert set(OF_ROLE["operator"]) == set(PERMISSIONS)


# ---- Limits ----------------------------------------------------------------------------------------------------------

class TestLimits:
    def test_a_bucket_empties_and_fills(self) -> None:
        now = [0.0]
        buckets = Buckets(rate=2.0, burst=3, clock=lambda: now[0])
        assert [buckets.take("a") for _ in range(4)] == [0.0, 0.0, 0.0, 0.5] and buckets.take("b") == 0.0
        now[0] = 0.5
        assert buckets.take("a") == 0.0 and buckets.take("a") == 0.5
        buckets.give_back("a")
        assert buckets.take("a") == 0.0
        now[0] = 100.0
        assert [buckets.take("a") for _ in range(4)] == [0.0, 0.0, 0.0, 0.5], "never fuller than full"
        for number in range(BUCKETS_MAX + 10):
            buckets.take(str(number))
        assert len(buckets._buckets) == BUCKETS_MAX

    def test_a_key_that_asks_too_often_waits(self, url: str, tmp_path: Path) -> None:
        db = Database(url)
        settings = Settings(data_dir=tmp_path, require_keys=True, requests_per_second=0.1, requests_burst=3)
        with running_api(db, settings) as service:
            keyed = Keyed(service)
            key, other = keyed.key("viewer"), keyed.key("viewer")
            answers = [keyed.ask("GET", "/v1/runs", key) for _ in range(4)]
            assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
            assert 1 <= int(answers[-1].headers["Retry-After"]) <= 10
            assert answers[-1].json()["error"]["code"] == "too_many_requests"
            assert keyed.ask("GET", "/v1/runs", other).status_code == 200
        db.close()

    def test_wrong_keys_from_one_address_are_slowed_down(self, url: str, tmp_path: Path) -> None:
        db = Database(url)
        settings = Settings(data_dir=tmp_path, trusted_proxies="127.0.0.1/32", failed_keys_per_minute=2)
        with running_api(db, settings) as service:
            keyed = Keyed(service)
            good, wrong = keyed.key("viewer"), "mok_0123456789ab_" + "A" * 43

            def ask(key: str, address: str) -> int:
                return keyed.ask("GET", "/v1/runs", key, headers={"X-Forwarded-For": address}).status_code

            assert [ask(good, "192.0.2.1") for _ in range(5)] == [200] * 5, "good ones cost nothing"
            assert [ask(wrong, "192.0.2.1") for _ in range(3)] == [401, 401, 429]
            assert ask(good, "192.0.2.1") == 429 and ask(good, "192.0.2.2") == 200
            assert [ask(wrong, f"2001:db8::{n}") for n in range(3)] == [401, 401, 429], "a /64 counts as one"
            assert auditlog.entries(db, "ours") == [], "failures fill no log"
        db.close()

    def test_the_log_tells_of_who_has_no_good_key(self, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        db = Database(url)
        settings = Settings(data_dir=tmp_path, trusted_proxies="127.0.0.1/32", failed_keys_per_minute=1000)
        with running_api(db, settings) as service:
            keyed = Keyed(service)
            good, secret = keyed.key("viewer"), "A" * 43
            for key in (good, None, f"mok_0123456789ab_{secret}", "mok_x"):
                keyed.ask("GET", "/v1/runs", key, headers={"X-Forwarded-For": "192.0.2.1"})
            lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("no access")]
            assert lines == ["no access: address=192.0.2.1 key=-", "no access: address=192.0.2.1 key=mok_0123456789ab",
                             "no access: address=192.0.2.1 key=-"]
            for number in range(20):
                keyed.ask("GET", "/v1/runs", f"mok_{number:012x}_{secret}", headers={"X-Forwarded-For": "192.0.2.1"})
            keyed.ask("GET", "/v1/runs", headers={"X-Forwarded-For": "192.0.2.2"})
        told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("no access")]
        assert 10 <= len(told) < 20 and told[-1] == "no access: address=192.0.2.2 key=-", "a few of each address"
        assert secret not in caplog.text
        db.close()

    @pytest.mark.parametrize(("peer", "forwarded", "address"), [
        ("192.0.2.9", "203.0.113.1", "192.0.2.9"), ("10.0.0.1", "203.0.113.1", "203.0.113.1"), ("10.0.0.1", None, "10.0.0.1"),
        ("10.0.0.1", "203.0.113.1, 198.51.100.7", "198.51.100.7"), ("10.0.0.1", "203.0.113.1, 10.0.0.2", "203.0.113.1"),
        ("10.0.0.1", "evil, 10.0.0.2", "10.0.0.2"), ("10.0.0.1", "10.0.0.3,10.0.0.2", "10.0.0.3"), ("10.0.0.1", ",,", "10.0.0.1"),
    ])
    def test_only_configured_proxies_are_believed(self, peer: str, forwarded: str | None, address: str) -> None:
        assert client_address(peer, forwarded, [ip_network("10.0.0.0/8")]) == address

    def test_sizes_are_limited(self, keyed: Keyed) -> None:
        key = keyed.key("viewer")
        assert keyed.ask("GET", "/v1/runs?job=" + "a" * 9000, key).status_code == 414
        assert keyed.ask("GET", "/v1/runs/" + "a" * 9000, key).status_code == 414
        assert keyed.ask("GET", "/v1/runs", key, headers={"X-Large": "a" * 17_000}).status_code == 431

    def test_answers_are_not_cached(self, keyed: Keyed) -> None:
        key = keyed.key("admin")
        for path in ("/v1/runs", "/v1/api-keys", "/v1/audit", "/v1/runs/x", "/metrics", "/openapi.json"):
            assert keyed.ask("GET", path, key).headers["Cache-Control"] == "no-store", path


def test_the_client_sends_its_key(keyed: Keyed) -> None:
    with Client(keyed.service.url) as client, pytest.raises(Unauthenticated):
        client.runs()
    with Client(keyed.service.url, api_key=keyed.key("viewer", "nobody")) as client:
        assert client.runs()["items"] == []
        with pytest.raises(Forbidden):
            client.submit("{}")


def test_a_key_is_honoured_where_none_is_asked_for(api: httpx.Client, service: Any) -> None:
    made, text = access.create_key(service.db, admin("t"), name="x", role="viewer")
    assert api.get("/v1/api-keys").json()["items"] == [] and datetime.now(UTC) > made.created_at
    assert api.get("/v1/runs", headers={"Authorization": f"Bearer {text}"}).status_code == 200
    assert api.post("/v1/jobs", json=SPEC, headers={"Authorization": f"Bearer {text}"}).status_code == 403
    assert api.get("/v1/runs", headers={"Authorization": "Bearer x"}).status_code == 401

"""The audit log: every write is on it, in the write's own transaction, and no entry can be removed, changed or moved unseen."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from sqlalchemy import delete, update

from mok_service import access, auditlog, jobs
from mok_service.db.session import Database
from mok_service.db.tables import audit_entries, audit_heads
from mok_service.provenance.auditlog import check_audit_log
from mok_service.provenance.digest import sha256
from mok_service.spec import parse_job
from tests.api.keys import admin
from tests.databases import Clock
from tests.services import SPEC, Service, Worker


def entries(api: httpx.Client) -> list[dict[str, Any]]:
    return list(api.get("/v1/audit").json()["items"])


def test_every_write_is_on_the_log_with_what_came_of_it(api: httpx.Client, service: Service) -> None:
    made = api.post("/v1/jobs", json=SPEC)
    job, run = made.json()["job"]["id"], made.json()["run"]["id"]
    api.post(f"/v1/runs/{run}/cancel")
    api.post(f"/v1/runs/{run}/resume")                      # refused: it is over
    api.post("/v1/jobs", json={"training": {"lr": 1}})      # refused: malformed
    api.post(f"/v1/jobs/{job}/runs", json={})
    api.get("/v1/runs")
    api.post("/v1/jobs/validate", json=SPEC)                # writes nothing
    found = entries(api)
    assert [(e["number"], e["action"], e["outcome"]) for e in found] == [
        (0, "POST /v1/jobs", 201), (1, "POST /v1/runs/{run}/cancel", 200), (2, "POST /v1/runs/{run}/resume", 409),
        (3, "POST /v1/jobs", 422), (4, "POST /v1/jobs/{job}/runs", 201),
    ]
    assert found[0]["ids"] == {"job": job, "run": run} and found[1]["ids"] == {"run": run}
    assert found[0]["body"] == str(sha256(made.request.content)) and found[1]["body"] is None
    assert {(e["actor"], e["role"], e["address"]) for e in found} == {("local", "operator", "127.0.0.1")}
    assert found[0]["request"] == made.headers["X-Request-ID"]
    assert api.get("/v1/audit", params={"after": 2}).json()["items"] == found[3:]
    head = api.get("/v1/audit/head").json()
    assert check_audit_log("local", head, found).verdict == "INTACT" == auditlog.verify(service.db).verdict


def test_a_repeated_request_is_on_the_log_too(api: httpx.Client) -> None:
    for _ in range(2):
        api.post("/v1/jobs", json=SPEC, headers={"Idempotency-Key": "one"})
    assert [e["outcome"] for e in entries(api)] == [201, 201]


def test_what_is_queued_is_on_the_log_once(api: httpx.Client, worker: Worker) -> None:
    run = api.post("/v1/jobs", json=SPEC).json()["run"]["id"]
    worker.work()
    for wish in ({"level": "audit"}, {"level": "rerun"}, {"level": "bisect"}, {"level": "check"}):
        api.post("/v1/verifications", json={"run": run, **wish})
    assert [e["outcome"] for e in entries(api)] == [201, 202, 202, 202, 201]


def test_a_write_that_cannot_be_logged_is_not_made(api: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no entry")

    monkeypatch.setattr("mok_service.db.access.add_audit_entry", broken)
    assert httpx.post(f"{api.base_url}/v1/jobs", json=SPEC).status_code == 500
    monkeypatch.undo()
    assert api.get("/v1/jobs").json()["items"] == []


def test_a_write_that_fails_after_its_commit_is_told_apart(api: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> None:
        raise RuntimeError("the answer can't be made")

    monkeypatch.setattr("mok_service.jobs.Job.as_dict", broken)
    first = httpx.post(f"{api.base_url}/v1/jobs", json=SPEC)
    monkeypatch.undo()
    assert first.status_code == 500 and [e["outcome"] for e in entries(api)] == [500]
    assert api.get("/v1/jobs").json()["items"] == [], "as_dict is part of the transaction here"


class TestChain:
    @pytest.fixture(params=["sqlite", "postgresql"])
    def kind(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def db(self, db: Database, clock: Clock) -> Database:
        """Six entries of one tenant, between those of another."""
        for number in range(6):
            for tenant in ("t", "u"):
                request = auditlog.Request(db, tenant, f"key_{number}", "admin", None, "POST /v1/jobs", f"req_{number}", 201)
                with auditlog.audited(request):
                    jobs.submit(db, parse_job(SPEC), tenant=tenant, now=clock.tick())
                request.end(201)
        assert [e["number"] for e in auditlog.entries(db, "t")] == list(range(6))
        assert auditlog.verify(db, "t").verdict == "INTACT" and auditlog.tenants(db) == ["t", "u"]
        return db

    def test_the_entry_is_in_the_transaction_of_the_write(self, db: Database) -> None:
        request = auditlog.Request(db, "t", "a", "admin", None, "x", "r", 200)
        with pytest.raises(ZeroDivisionError), auditlog.audited(request), db.write():
            raise ZeroDivisionError
        assert len(auditlog.entries(db, "t")) == 6
        request.end(500)
        assert [e["outcome"] for e in auditlog.entries(db, "t")][6:] == [500]

    @pytest.mark.parametrize("number", range(6))
    def test_a_removed_entry_is_found(self, db: Database, number: int) -> None:
        with db.write() as tx:
            tx.execute(delete(audit_entries).where(audit_entries.c.tenant == "t", audit_entries.c.number == number))
        finding = auditlog.verify(db, "t")
        assert finding.verdict == "TAMPERED" and auditlog.verify(db, "u").verdict == "INTACT"

    @pytest.mark.parametrize(("column", "value"), [
        ("actor", "key_x"), ("role", "viewer"), ("address", "192.0.2.1"), ("action", "GET /"), ("ids", {"job": "x"}),
        ("body", sha256(b"x")), ("outcome", 200), ("request", "x"), ("previous", sha256(b"x")), ("digest", sha256(b"x")),
        ("tenant", "v"), ("number", 9),
    ])
    def test_a_changed_entry_is_found(self, db: Database, column: str, value: Any) -> None:
        for number in (0, 3, 5):
            before = auditlog.entries(db, "t")
            with db.write() as tx:
                row = (audit_entries.c.tenant == "t") & (audit_entries.c.number == number)
                tx.execute(update(audit_entries).where(row).values({column: value}))
                assert check_audit_log("t", auditlog.head(db, "t"), before).verdict == "INTACT"
            finding = auditlog.verify(db, "t")
            assert finding.verdict == "TAMPERED", (column, number)
            break_at = finding.step
            assert break_at is None or break_at <= number + 1
            return

    def test_entries_that_change_places_are_found(self, db: Database) -> None:
        with db.write() as tx:
            for old, new in ((2, 100), (3, 2), (100, 3)):
                row = (audit_entries.c.tenant == "t") & (audit_entries.c.number == old)
                tx.execute(update(audit_entries).where(row).values(number=new))
        assert auditlog.verify(db, "t").verdict == "TAMPERED"

    def test_a_log_that_was_cut_with_its_head_is_found_by_who_saw_it(self, db: Database) -> None:
        seen, kept = auditlog.head(db, "t"), auditlog.entries(db, "t")[:4]
        with db.write() as tx:
            tx.execute(delete(audit_entries).where(audit_entries.c.tenant == "t", audit_entries.c.number > 3))
            head = {"length": 4, "digest": audit_digest(kept[-1])}
            tx.execute(update(audit_heads).where(audit_heads.c.tenant == "t").values(**head))
        assert auditlog.verify(db, "t").verdict == "INTACT", "nothing in the database tells"
        assert check_audit_log("t", auditlog.head(db, "t"), kept, seen).verdict == "TAMPERED"

    def test_keys_made_by_the_command_are_on_it(self, db: Database) -> None:
        request = auditlog.Request(db, "t", "command of root", "operator", None, "mok apikey create", "cmd_1", 200)
        with auditlog.audited(request):
            made, text = access.create_key(db, admin("t"), name="x", role="viewer")
        last = auditlog.entries(db, "t")[-1]
        assert (last["action"], last["ids"]) == ("mok apikey create", {"key": made.id}) and text not in str(last)


def audit_digest(entry: dict[str, Any]) -> Any:
    from mok_service.provenance.digest import Digest

    return Digest.parse(entry["digest"])

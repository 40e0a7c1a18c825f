"""Webhooks: put into the outbox with the event, delivered at least once, signed, tried again, given up."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import httpx
import pytest

from mok_service import jobs, runs, webhooks
from mok_service.db.session import Database
from mok_service.errors import InvalidSpec, MokError, NotFound
from mok_service.net import Refused
from mok_service.settings import Settings
from mok_service.spec import parse_job
from mok_service.webhooks import InvalidSignature, Outbox, sign, verify
from mok_service.webhooks.hooks import WEBHOOKS_MAX
from tests.databases import Clock
from tests.services import SPEC

URL = "https://example.org/mok"


class Receiver:
    """Answers in turn; the last one for ever. An exception is raised."""

    def __init__(self, *answers: int | BaseException) -> None:
        self.answers, self.requests = list(answers), list[httpx.Request]()
        self._lock = threading.Lock()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        with self._lock:
            self.requests.append(request)
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return httpx.Response(answer, headers={"Location": "http://127.0.0.1/"})


@pytest.fixture
def outbox(db: Database, clock: Clock, tmp_path: Path) -> Callable[[Receiver], Outbox]:
    def make(receiver: Receiver) -> Outbox:
        settings = Settings(data_dir=tmp_path, webhook_hours_max=1.0)
        return Outbox(db, settings, httpx.MockTransport(receiver), unix_time=lambda: clock.now.timestamp())

    return make


def end_a_run(db: Database, now: datetime, tenant: str = "local") -> str:
    run = jobs.submit(db, parse_job(SPEC), tenant=tenant, now=now).run.id
    runs.cancel(db, run, tenant, now)
    return run


def states(db: Database, hook: str, tenant: str = "local") -> list[tuple[str, int]]:
    return [(d.status, d.attempts) for d in webhooks.deliveries(db, hook, tenant).items]


def test_a_run_that_ended_is_told_once_to_those_who_asked(db: Database, clock: Clock, outbox: Any) -> None:
    hook, secret = webhooks.create_webhook(db, url=URL, events=["run.ended"])
    webhooks.create_webhook(db, url=URL + "/other", events=["verification.done"])
    webhooks.create_webhook(db, url=URL + "/theirs", events=["run.ended"], tenant="theirs")
    run, receiver = end_a_run(db, clock.tick()), Receiver(204)
    sender = outbox(receiver)
    assert sender.tick(clock.tick()) == 1 and sender.tick(clock.tick(7200)) == 0
    [request] = receiver.requests
    told = verify(secret, request.headers, request.content, clock.now.timestamp() - 7200)
    assert (str(request.url), told["type"], told["tenant"], told["data"]["run"]["id"]) == (URL, "run.ended", "local", run)
    assert told["data"]["run"]["status"] == "cancelled" and request.headers["webhook-id"] == told["id"]
    [delivery] = webhooks.deliveries(db, hook.id).items
    assert (delivery.id, delivery.status, delivery.attempts) == (told["id"], "delivered", 1)


def test_what_is_rolled_back_is_not_told(db: Database, clock: Clock) -> None:
    from mok_service.runs.locked import locked

    hook, _ = webhooks.create_webhook(db, url=URL, events=["run.ended"])
    run = jobs.submit(db, parse_job(SPEC), now=clock.now).run.id
    with pytest.raises(ZeroDivisionError), locked(db, run) as held:
        held.transition("cancelled", clock.now, "user_cancelled")
        held.save()
        raise ZeroDivisionError
    assert webhooks.deliveries(db, hook.id).items == () and runs.get_run(db, run).status == "queued"


def test_a_verdict_is_told(db: Database, clock: Clock, outbox: Any) -> None:
    _, secret = webhooks.create_webhook(db, url=URL, events=["verification.done"])
    run, receiver = end_a_run(db, clock.tick()), Receiver(200)
    made = runs.judge(db, run, lambda *_: iter(()), now=clock.now)
    assert outbox(receiver).tick(clock.tick()) == 1
    told = verify(secret, receiver.requests[0].headers, receiver.requests[0].content, clock.now.timestamp())
    assert (told["type"], told["data"]["verification"]["id"]) == ("verification.done", made.id)


@pytest.mark.parametrize("failure", [500, 404, 302, httpx.ConnectError("down"), httpx.ReadTimeout("slow"), Refused("not public")])
def test_a_failed_delivery_is_tried_again_under_its_id(db: Database, clock: Clock, outbox: Any, failure: Any) -> None:
    hook, _ = webhooks.create_webhook(db, url=URL, events=["run.ended"])
    end_a_run(db, clock.tick())
    receiver = Receiver(failure, failure, 200)
    sender = outbox(receiver)
    assert sender.tick(clock.tick()) == 1 and sender.tick(clock.tick(4)) == 0, "not at once"
    assert webhooks.deliveries(db, hook.id).items[0].message
    assert sender.tick(clock.tick(1)) == 1 and sender.tick(clock.tick(9)) == 0, "and later each time"
    assert sender.tick(clock.tick(1)) == 1 and states(db, hook.id) == [("delivered", 3)]
    assert len({request.headers["webhook-id"] for request in receiver.requests}) == 1
    assert len({request.headers["webhook-signature"] for request in receiver.requests}) == 3, "each has its own time"


def test_a_delivery_is_given_up_after_a_time_and_shown_so(db: Database, clock: Clock, outbox: Any) -> None:
    hook, _ = webhooks.create_webhook(db, url=URL, events=["run.ended"])
    end_a_run(db, clock.now)
    began, receiver = clock.now, Receiver(503)
    sender = outbox(receiver)
    while states(db, hook.id)[0][0] == "pending":
        sender.tick(clock.tick(5))
    assert clock.now - began < timedelta(hours=1) and len(receiver.requests) == 10
    [delivery] = webhooks.deliveries(db, hook.id).items
    assert (delivery.status, delivery.message) == ("given_up", "the receiver answered 503") and delivery.ended_at == clock.now
    assert sender.tick(clock.tick(100_000)) == 0


def test_a_receiver_that_is_down_holds_up_nobody_else(db: Database, clock: Clock, outbox: Any) -> None:
    down, _ = webhooks.create_webhook(db, url=URL, events=["run.ended"])
    up, _ = webhooks.create_webhook(db, url=URL, events=["run.ended"], tenant="u")
    for _ in range(20):
        end_a_run(db, clock.tick())
    end_a_run(db, clock.tick(), "u")
    assert outbox(Receiver(500)).tick(clock.tick()) == 2, "of each webhook one at a time"
    assert [s for s, _ in states(db, down.id)].count("pending") == 20 and states(db, up.id, "u") == [("pending", 1)]


def test_a_sender_that_died_is_made_up_for(db: Database, clock: Clock, outbox: Any) -> None:
    """At least once: the answer to the first attempt was never written down."""
    hook, _ = webhooks.create_webhook(db, url=URL, events=["run.ended"])
    end_a_run(db, clock.tick())
    with pytest.raises(KeyboardInterrupt):
        outbox(Receiver(KeyboardInterrupt())).tick(clock.tick())
    assert outbox(Receiver(200)).tick(clock.tick(1)) == 0, "it may still be under way"
    assert outbox(Receiver(200)).tick(clock.tick(60)) == 1 and states(db, hook.id) == [("delivered", 1)]


def test_a_deleted_webhook_is_told_nothing_and_its_secret_is_gone(db: Database, clock: Clock, outbox: Any) -> None:
    from sqlalchemy import select

    from mok_service.db import tables

    hook, _ = webhooks.create_webhook(db, url=URL, events=["run.ended"])
    end_a_run(db, clock.tick())
    with pytest.raises(NotFound):
        webhooks.delete_webhook(db, hook.id, "theirs")
    webhooks.delete_webhook(db, hook.id)
    assert outbox(Receiver(200)).tick(clock.tick()) == 0 and webhooks.list_webhooks(db) == []
    with db.read() as tx:
        assert tx.execute(select(tables.webhooks.c.secret)).scalar_one() is None
        assert tx.execute(select(tables.deliveries.c.status)).scalar_one() == "given_up"


@pytest.mark.parametrize("address", [
    "http://example.org/", "ftp://example.org/", "https://", "https:///x", "https://u:p@example.org/", "https://example.org/#x",
    "https://example.org:0/", "https://example.org:x/", "https://[::1", "https://127.0.0.1/", "https://[::1]/", "javascript:x",
    "https://169.254.169.254/latest", "http://10.0.0.1/", "https://exa mple.org/", "https://example.org\\@evil/", "//example.org",
    "https://ex\u00e4mple.org/", "https://example.org/" + "a" * 2000,
])
def test_an_address_that_is_none_is_refused(db: Database, address: str) -> None:
    with pytest.raises(MokError) as refused:
        webhooks.create_webhook(db, url=address, events=["run.ended"])
    assert refused.value.http_status == 422


def test_a_network_can_be_allowed_and_a_tenant_has_a_limit(db: Database) -> None:
    webhooks.create_webhook(db, url="http://127.0.0.1:8000/", events=["run.ended"], allowed=[ip_network("127.0.0.1/32")])
    for _ in range(WEBHOOKS_MAX - 1):
        webhooks.create_webhook(db, url=URL, events=["run.ended"])
    with pytest.raises(InvalidSpec, match="at most 20"):
        webhooks.create_webhook(db, url=URL, events=["run.ended"])


class TestSignature:
    SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    BODY = b'{"test": 2432232314}'

    def headers(self, **more: str) -> dict[str, str]:
        return {"webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek", "webhook-timestamp": "1614265330",
                "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=", **more}

    def test_it_is_that_of_the_public_specification(self) -> None:
        """Its own example."""
        assert sign(self.SECRET, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, self.BODY) == self.headers()["webhook-signature"]
        assert verify(self.SECRET, self.headers(), self.BODY, 1614265330) == json.loads(self.BODY)

    @pytest.mark.parametrize("change", [
        {"webhook-id": "msg_x"}, {"webhook-timestamp": "1614265331"}, {"webhook-timestamp": "x"}, {"webhook-timestamp": "-1"},
        {"webhook-signature": ""}, {"webhook-signature": "v1,"}, {"webhook-signature": "v2,g0hM9SsE"}, {"webhook-signature": "é"},
    ])
    def test_a_changed_header_is_noticed(self, change: dict[str, str]) -> None:
        with pytest.raises(InvalidSignature):
            verify(self.SECRET, self.headers(**change), self.BODY, 1614265330)

    def test_a_changed_body_and_another_secret_are_noticed(self) -> None:
        for secret, body in ((self.SECRET, self.BODY + b" "), ("whsec_" + "A" * 32, self.BODY)):
            with pytest.raises(InvalidSignature):
                verify(secret, self.headers(), body, 1614265330)

    @pytest.mark.parametrize(("late", "good"), [(0, True), (300, True), (301, False), (-300, True), (-301, False)])
    def test_a_replay_is_refused(self, late: int, good: bool) -> None:
        if good:
            verify(self.SECRET, self.headers(), self.BODY, 1614265330 + late)
        else:
            with pytest.raises(InvalidSignature, match="300 s"):
                verify(self.SECRET, self.headers(), self.BODY, 1614265330 + late)

    def test_one_of_several_signatures_is_enough(self) -> None:
        both = {"webhook-signature": "v1,AAAA " + self.headers()["webhook-signature"]}
        verify(self.SECRET, self.headers(**both), self.BODY, 1614265330)

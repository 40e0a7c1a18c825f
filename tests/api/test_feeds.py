"""What streams share: one reader of the database for all of them, and a few kept events; nobody waits for a slow listener."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from mok_api import feeds
from mok_api.feeds import Feed
from mok_service import runs
from mok_service.db.session import Database
from mok_service.runs.following import News, news
from mok_service.runs.types import LogLine
from tests.api.test_events import STREAM, stream, wait_until
from tests.service.play import submit
from tests.services import SPEC, Service, Worker


@pytest.fixture
def run(api: httpx.Client) -> str:
    return str(api.post("/v1/jobs", json=SPEC).json()["run"]["id"])


# ---- One feed --------------------------------------------------------------------------------------------------------

def told(first: int, last: int, size: int = 1) -> list[tuple[int, bytes]]:
    return [(number, b"%d;" % number * size) for number in range(first, last + 1)]


def found(last: int, ended: bool = False) -> News:
    return News([], last, ended)


class TestFeed:
    def test_it_tells_what_comes_after_a_number(self) -> None:
        feed = Feed("run")
        feed.add([], found(7))
        assert feed.last == 7 and feed.after(6) is None and feed.after(7) == (b"", 7)
        feed.add(told(8, 10), found(10))
        assert feed.after(7) == (b"8;9;10;", 10) and feed.after(9) == (b"10;", 10) and feed.after(6) is None

    def test_it_keeps_few_events_and_bytes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(feeds, "KEPT_MAX", 3)
        monkeypatch.setattr(feeds, "KEPT_BYTES_MAX", 100)
        feed = Feed("run")
        feed.add([], found(0))
        feed.add(told(1, 5), found(5))
        assert feed.after(1) is None and feed.after(2) == (b"3;4;5;", 5)
        feed.add(told(6, 6, size=40), found(6))
        assert feed.after(2) is None and feed.after(3) == (b"4;5;" + b"6;" * 40, 6)
        feed.add(told(7, 7, size=51), found(7))
        assert feed.after(6) is None and feed.after(7) == (b"", 7), "one that is too large is for each to read"

    def test_a_run_has_ended_once_all_is_told(self) -> None:
        feed = Feed("run")
        feed.add([], found(0))
        feed.add(told(1, 2), found(3, ended=True))
        assert not feed.ended, "an event of a run that has ended is still to be read"
        feed.add(told(3, 3), found(3, ended=True))
        assert feed.ended

    def test_listeners_are_woken_by_changes_only(self) -> None:
        feed = Feed("run")
        for told_now, of_run, woken in ([], found(1), True), ([], found(1), False), (told(2, 2), found(2), True), \
                ([], found(2, ended=True), True), ([], found(2, ended=True), False):
            changed = feed.changed
            feed.add(told_now, of_run)
            assert changed.is_set() == woken


def test_news_are_of_many_runs_at_once(db: Database) -> None:
    made = [submit(db, name=str(number)).run.id for number in range(3)]
    runs.cancel(db, made[1])  # two events: what was wished, and what came of it
    seen: dict[str, int | None] = {made[0]: 0, made[1]: 1, made[2]: None, "run_0198c0de5e1f7000800000000000c0de": 0}
    got = news(db, seen, 10)
    assert {run: ([e.number for e in n.events], n.last, n.ended) for run, n in got.items()} == {
        made[0]: ([1], 1, False), made[1]: ([2, 3], 3, True), made[2]: ([], 1, False)}
    assert [e.number for e in news(db, {made[1]: 0}, 1)[made[1]].events] == [1]


# ---- Streams of a service --------------------------------------------------------------------------------------------

def test_the_database_is_asked_once_for_all_listeners(service: Service, run: str, worker: Worker) -> None:
    asked: list[str] = []

    @event.listens_for(service.db.engine, "before_cursor_execute")
    def statement(_c: Any, _cursor: Any, text: str, *_more: Any) -> None:
        if threading.current_thread() is not threading.main_thread() and "FROM events" in text:
            asked.append(text)

    with ThreadPoolExecutor(30) as threads:
        streams = [threads.submit(stream, service, run, **{"Last-Event-ID": "1"}) for _ in range(30)]
        wait_until(lambda: service.app.state.streams.open == 30)
        asked.clear()
        worker.work()
        everything = [one.result() for one in streams]
    assert all(one == everything[0] for one in everything) and everything[0][-1] == ("end", {})
    assert 0 < len(asked) <= len(everything[0]), "not once for each listener"


def test_news_of_this_process_need_no_poll(monkeypatch: pytest.MonkeyPatch, service: Service, run: str) -> None:
    monkeypatch.setattr(feeds, "POLL_SECONDS_MIN", 1000.0)
    monkeypatch.setattr(feeds, "POLL_SECONDS_MAX", 1000.0)
    with httpx.stream("GET", f"{service.url}/v1/runs/{run}/events", headers=STREAM, timeout=30) as answer:
        lines = answer.iter_lines()
        assert "id: 1" in iter(lines.__next__, "data: ")
        runs.cancel(service.db, run)
        assert "event: end" in lines


def test_news_of_other_processes_are_polled(service: Service, run: str, url: str) -> None:
    other = Database(url)
    with httpx.stream("GET", f"{service.url}/v1/runs/{run}/events", headers=STREAM, timeout=30) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "retry: 1000"
        runs.cancel(other, run)
        assert "event: end" in lines
    other.close()


def test_streams_outlive_a_database_that_is_away(monkeypatch: pytest.MonkeyPatch, service: Service, run: str,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    away = threading.Event()

    def broken(*asked: Any) -> Any:
        if away.is_set():
            away.clear()
            raise OperationalError("SELECT", None, Exception("gone"))
        return news(*asked)

    monkeypatch.setattr(feeds, "news", broken)
    with httpx.stream("GET", f"{service.url}/v1/runs/{run}/events", headers=STREAM, timeout=30) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "retry: 1000"
        away.set()
        wait_until(lambda: not away.is_set())
        runs.cancel(service.db, run)
        assert "event: end" in lines
    assert "the event streams' reader failed" in caplog.text


def test_a_listener_that_does_not_read_holds_nobody_up_and_misses_nothing(service: Service, run: str, worker: Worker) -> None:
    lease = worker.start()
    asked = f"GET /v1/runs/{run}/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\nConnection: close\r\n\r\n"
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(service.address)
    slow.sendall(asked.encode())
    assert slow.recv(12) == b"HTTP/1.1 200"
    with ThreadPoolExecutor(1) as threads:
        quick = threads.submit(stream, service, run)
        for first in range(0, 1600, 100):
            lines = [LogLine(number, worker.now(), "info", "x" * 4000) for number in range(first, first + 100)]
            runs.append(worker.db, lease, [], lines, [], worker.now())
        runs.cancel(worker.db, run)
        runs.finish(worker.db, lease, runs.Outcome("cancelled", "user_cancelled"), worker.now())
        everything = quick.result()
    assert everything[-1] == ("end", {})
    wait_until(lambda: service.app.state.streams.open == 1)
    (feed,) = service.app.state.streams._feeds._feeds.values()
    assert feed._bytes <= feeds.KEPT_BYTES_MAX
    assert list(_ids(slow)) == [data["number"] for _, data in everything[:-1]]
    slow.close()


def _ids(connection: socket.socket) -> Iterator[int]:
    with connection.makefile("rb") as lines:
        for line in lines:
            if line.startswith(b"data: {\"run\""):
                yield json.loads(line[6:])["number"]

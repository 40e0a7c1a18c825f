"""The event stream: in order, without gaps or repeats, also across connections; and it lets go of everything."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mok_service import runs
from mok_service.client import Client, parse_stream, stream_lines
from mok_service.errors import NotFound, ServiceUnreachable
from mok_service.runs.types import LogLine
from tests.services import SPEC, Service, Worker

STREAM = {"Accept": "text/event-stream"}


@pytest.fixture
def run(api: httpx.Client) -> str:
    """A queued run."""
    return str(api.post("/v1/jobs", json=SPEC).json()["run"]["id"])


def stream(service: Service, run: str, **headers: str) -> list[tuple[str, dict[str, Any]]]:
    """(event, data) of a whole stream."""
    with httpx.stream("GET", f"{service.url}/v1/runs/{run}/events", headers=STREAM | headers, timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        return [(name, json.loads(data)) for name, data in parse_stream(stream_lines(answer.iter_bytes()))]


def test_a_stream_tells_everything_and_ends(service: Service, api: httpx.Client, worker: Worker, run: str) -> None:
    worker.work()
    told = stream(service, run)
    assert told[-1] == ("end", {})
    expected = api.get(f"/v1/runs/{run}/events").json()["items"]
    assert [data for _, data in told[:-1]] == expected
    assert [data["number"] for _, data in told[:-1]] == list(range(1, len(expected) + 1))
    assert all(name == data["type"] for name, data in told[:-1])
    assert [d["payload"]["status"] for n, d in told if n == "run.status"] == ["queued", "claimed", "starting", "running",
                                                                              "stopping", "succeeded"]


@pytest.mark.parametrize("last", [0, 1, 5, 10**9])
def test_a_stream_goes_on_after_the_last_event(service: Service, worker: Worker, run: str, last: int) -> None:
    """Case 28."""
    worker.work()
    everything = stream(service, run)
    assert stream(service, run, **{"Last-Event-ID": str(last)}) == everything[min(last, len(everything) - 1):]


def test_a_follower_gets_each_event_once_while_it_happens(service: Service, worker: Worker, run: str) -> None:
    """Case 28: over connections that break after every few events."""
    with Client(service.url, retry_seconds=(0.0,) * 3) as client:
        broken = BreakingStream(client, every=3)
        followed: list[dict[str, Any]] = []
        follower = threading.Thread(target=lambda: followed.extend(broken.events(run)))
        follower.start()
        worker.work()
        follower.join(30)
        assert not follower.is_alive() and broken.breaks > 2
    assert [event["number"] for event in followed] == list(range(1, len(followed) + 1))
    assert followed == [event.as_dict() for event in runs.events(service.db, run)]


class BreakingStream:
    """A client whose connections break after every few events."""

    def __init__(self, client: Client, every: int) -> None:
        self.client, self.every, self.breaks = client, every, 0
        self._stream = client._stream
        client._stream = self._break  # type: ignore[method-assign]

    def events(self, run: str) -> Iterator[dict[str, Any]]:
        return self.client.events(run)

    def _break(self, run_id: str, after: int) -> Iterator[dict[str, Any] | None]:
        for count, event in enumerate(self._stream(run_id, after)):
            if count == self.every:
                self.breaks += 1
                raise httpx.ReadError("broken")
            yield event


def test_a_silent_stream_shows_signs_of_life(service: Service, run: str) -> None:
    with httpx.stream("GET", f"{service.url}/v1/runs/{run}/events", headers=STREAM, timeout=30) as answer:
        assert next(line for line in answer.iter_lines() if line.startswith(":")) == ": still here"


def test_text_in_an_event_cannot_end_it(service: Service, worker: Worker, run: str) -> None:
    lease = worker.start()
    message = "a\n\nevent: end\ndata: {}\r\n\r\u2028\x85 报告"
    runs.append(worker.db, lease, [], [LogLine(0, worker.now(), "info", message)], [], worker.now())
    runs.cancel(worker.db, run)
    runs.finish(worker.db, lease, runs.Outcome("cancelled", "user_cancelled"), worker.now())
    told = stream(service, run)
    assert [data["payload"]["message"] for name, data in told if name == "log"] == [message] and told[-1][0] == "end"


def test_a_stream_of_a_run_that_is_not_there_is_not_found(service: Service) -> None:
    with Client(service.url) as client, pytest.raises(NotFound):
        list(client.events("run_0198c0de5e1f7000800000000000c0de"))


def test_a_stream_that_cannot_be_taken_up_again_is_reported() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers["Last-Event-ID"])
        if len(asked) > 1:
            raise httpx.ConnectError("gone")
        return httpx.Response(200, text='data: {"number": 1}\n\ndata: {"number": 2}\n\ndata: {"num')

    seen: list[int] = []
    client = Client("http://127.0.0.1:1", transport=httpx.MockTransport(answer), retry_seconds=(0.0, 0.0))
    with client, pytest.raises(ServiceUnreachable, match=r"broke off after event 2: gone"):
        seen.extend(event["number"] for event in client.events("run_x"))
    assert seen == [1, 2] and asked == ["0", "2", "2"]


def test_aborted_streams_leave_nothing(service: Service, run: str) -> None:
    """Case 28, with 500 of them: open streams and database connections return to what they were."""
    request = f"GET /v1/runs/{run}/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n".encode()
    connections = [socket.create_connection(service.address) for _ in range(500)]
    for connection in connections:
        connection.sendall(request)
    for connection in connections:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert service.app.state.streams.open == 500
    for connection in connections:
        connection.close()
    wait_until(lambda: service.app.state.streams.open == 0)
    wait_until(lambda: service.db.engine.pool.checkedout() == 0)  # type: ignore[attr-defined]


def test_more_streams_than_allowed_are_refused(service: Service, api: httpx.Client, run: str) -> None:
    service.app.state.streams.open_max = 1
    with api.stream("GET", f"/v1/runs/{run}/events", headers=STREAM) as answer:
        lines = answer.iter_lines()  # kept: a dropped iterator closes its connection
        assert next(lines) == "retry: 1000"
        refused = api.get(f"/v1/runs/{run}/events", headers=STREAM)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "busy"
        assert api.get(f"/v1/runs/{run}/events").status_code == 200, "as JSON it is told all the same"
    wait_until(lambda: service.app.state.streams.open == 0)


def test_a_service_that_stops_ends_its_streams(url: str, tmp_path: Path) -> None:
    from mok_service.db.session import Database
    from mok_service.settings import Settings
    from tests.services import running_api

    db = Database(url)
    with running_api(db, Settings(data_dir=tmp_path)) as service:
        run = httpx.post(f"{service.url}/v1/jobs", json=SPEC).json()["run"]["id"]
        ended = threading.Event()

        def read() -> None:
            stream(service, run)
            ended.set()

        reader = threading.Thread(target=read)
        reader.start()
        wait_until(lambda: service.app.state.streams.open == 1)
    assert ended.wait(10)
    reader.join()
    db.close()


@pytest.mark.parametrize(("lines", "expected"), [
    (["data: 1", ""], [("message", "1")]), (["event:x", "data:1", "data: 2", "id: 3", "", ""], [("x", "1\n2")]),
    ([": ping", "", "event: y", "", "data: 1"], []), (["data: 1", "", "event: x", "data: 2"], [("message", "1")]),
])
def test_parsing_a_stream(lines: list[str], expected: list[tuple[str, str]]) -> None:
    assert list(parse_stream(lines)) == expected


def wait_until(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it didn't happen"
        time.sleep(0.01)

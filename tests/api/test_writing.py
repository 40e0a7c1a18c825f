"""Requests that write at the same time share a commit, and each gets its own answer and its own entry in the audit log."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from mok_api.writing import TOGETHER_MAX
from mok_service import auditlog, jobs
from tests.api.test_events import wait_until
from tests.services import Service, spec


def at_once(service: Service, asked: list[Callable[[httpx.Client], httpx.Response]]) -> list[httpx.Response]:
    """Sends one request, and all others while that one waits for the database."""
    writing = service.app.state.writing
    with httpx.Client(base_url=service.url, timeout=60.0, limits=httpx.Limits(max_connections=100)) as client, \
            ThreadPoolExecutor(len(asked)) as threads:
        with service.db.write():
            answers = [threads.submit(asked[0], client)]
            wait_until(lambda: writing._at_work is not None and not writing._waiting)
            answers += [threads.submit(ask, client) for ask in asked[1:]]
            wait_until(lambda: len(writing._waiting) == len(asked) - 1)
        return [answer.result() for answer in answers]


def submits(**training: Any) -> Callable[[httpx.Client], httpx.Response]:
    return lambda client: client.post("/v1/jobs", json=spec(**training))


def test_requests_that_wait_together_share_a_commit(service: Service) -> None:
    heard: list[int] = []
    service.db.after_write.append(lambda: heard.append(1))
    answers = at_once(service, [submits(name=str(number)) for number in range(10)])
    assert [answer.status_code for answer in answers] == [201] * 10
    assert [answer.json()["job"]["name"] for answer in answers] == [str(number) for number in range(10)]
    assert len(heard) == 3, "the test's own transaction, that of the first request, and that of all others"
    found = auditlog.entries(service.db)
    assert sorted(entry["request"] for entry in found) == sorted(answer.headers["X-Request-ID"] for answer in answers)
    made = {answer.headers["X-Request-ID"]: answer.json() for answer in answers}
    for entry in found:
        assert entry["ids"] == {what: made[entry["request"]][what]["id"] for what in ("job", "run")}
    assert auditlog.verify(service.db).verdict == "INTACT"


def test_more_than_a_group_may_have_are_several(service: Service) -> None:
    heard: list[int] = []
    service.db.after_write.append(lambda: heard.append(1))
    answers = at_once(service, [submits(name=str(number)) for number in range(TOGETHER_MAX + 4)])
    assert {answer.status_code for answer in answers} == {201} and len(heard) == 4
    assert len(jobs.list_jobs(service.db, limit=100).items) == TOGETHER_MAX + 4


def test_who_is_refused_is_refused_alone(service: Service) -> None:
    one = httpx.post(f"{service.url}/v1/jobs", json=spec()).json()
    answers = at_once(service, [
        submits(name="a"), submits(name="b"), submits(steps=-1), lambda client: client.post("/v1/jobs", json={}),
        lambda client: client.post(f"/v1/jobs/{one['job']['id']}/runs", json={}),  # its run hasn't ended
        submits(name="c"),
    ])
    assert [answer.status_code for answer in answers] == [201, 201, 422, 422, 409, 201]
    outcomes = {entry["request"]: entry["outcome"] for entry in auditlog.entries(service.db)}
    assert [outcomes[answer.headers["X-Request-ID"]] for answer in answers] == [answer.status_code for answer in answers]


def test_a_commit_that_fails_fails_all_of_them(service: Service) -> None:
    tried: list[int] = []

    def broken(connection: Any) -> None:
        tried.extend([1] if connection.get_execution_options().get("mok_write") else [])
        if len(tried) == 3:  # after the test's own transaction and that of the first request: all others
            tried.append(1)
            raise OperationalError("COMMIT", None, Exception("disk I/O error"))

    event.listen(service.db.engine, "commit", broken)
    answers = at_once(service, [submits(name=str(number)) for number in range(4)])
    assert [answer.status_code for answer in answers] == [201, 503, 503, 503]
    assert [job.training.name for job in jobs.list_jobs(service.db).items] == ["0"]
    assert sorted(entry["outcome"] for entry in auditlog.entries(service.db)) == [201, 503, 503, 503]

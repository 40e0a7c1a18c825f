"""A client of the REST API: the command uses it, and so can any Python program.

    with Client("http://127.0.0.1:8080") as client:
        submitted = client.submit(spec_json)
        for event in client.events(submitted["run"]["id"]):
            print(event["type"], event["payload"])

Answers are the decoded JSON. A refusal is raised as the same `MokError` that the service raised.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Final, Self
from urllib.parse import quote

import httpx

from mok_service.errors import MokError, ServiceUnreachable

READ_SECONDS: Final = 60.0          # for an answer
SILENCE_SECONDS_MAX: Final = 45.0   # in an event stream, which says something every few seconds
ITEMS_MAX: Final = 1000             # of one request
RETRY_SECONDS: Final = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)  # waits between attempts to reach a service that has gone away


class Refused(MokError):
    """A refusal of a kind that this client doesn't know by name."""

    http_status, exit_status, code = 400, 2, "refused"


class BadAddress(MokError):
    """The address of the service isn't one."""

    http_status, exit_status, code = 400, 2, "bad_address"


@dataclass(frozen=True, slots=True)
class ServerFile:
    """`server.json` in a data folder: where the service that holds the folder listens."""

    url: str
    pid: int
    boot: str

    NAME: ClassVar[str] = "server.json"

    @classmethod
    def read(cls, data_dir: Path) -> Self | None:
        """What the folder's file says, or None where there is none or its process is gone."""
        try:
            value = json.loads((data_dir / cls.NAME).read_text())
            found = cls(str(value["url"]), int(value["pid"]), str(value["boot"]))
            os.kill(found.pid, 0)
        except (FileNotFoundError, NotADirectoryError, ProcessLookupError, ValueError, KeyError, TypeError):
            return None
        except PermissionError:  # another user's process: it's there
            return found
        return found


def find_url(url: str | None, data_dir: Path) -> str | None:
    """The address to use: the given one, else that of the service which holds the data folder, else None."""
    if url:
        return url
    server = ServerFile.read(data_dir)
    return None if server is None else server.url


class Client:
    """A connection to one service. Its methods raise ServiceUnreachable when nothing answers, or the service's refusal."""

    def __init__(self, url: str, *, api_key: str | None = None, transport: httpx.BaseTransport | None = None,
                 retry_seconds: tuple[float, ...] = RETRY_SECONDS) -> None:
        self.url = url.rstrip("/")
        self._retry_seconds = retry_seconds
        try:
            host = httpx.URL(self.url).host
            self._http = httpx.Client(
                base_url=self.url, transport=transport, headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
                timeout=httpx.Timeout(READ_SECONDS, connect=5.0),
                trust_env=host not in ("localhost", "127.0.0.1", "::1"),  # a proxy can't reach a service on this machine
            )
        except httpx.InvalidURL as error:
            raise BadAddress(f"{url!r} is no address: {error}; one looks like http://127.0.0.1:8080", url=url) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    # Jobs

    def submit(self, spec: str | bytes, key: str | None = None) -> dict[str, Any]:
        """Submit a job spec (JSON text): {"job": ..., "run": ...}. A lost answer is asked for again under the same
        Idempotency-Key, so that one call makes one job."""
        return self._create("/v1/jobs", spec, key)

    def validate(self, spec: str | bytes) -> dict[str, Any]:
        """What `submit` would do: the resolved spec and what it costs."""
        return self._json("POST", "/v1/jobs/validate", content=spec)

    def job(self, job_id: str) -> dict[str, Any]:
        return self._json("GET", f"/v1/jobs/{_part(job_id)}")

    def jobs(self, **filters: Any) -> dict[str, Any]:
        """One page: {"items": [...], "next_cursor": ...}. Filters: name, digest, cursor, limit."""
        return self._json("GET", "/v1/jobs", params=_given(filters))

    def create_run(self, job_id: str, execution: Mapping[str, Any] | None = None, reproduces: str | None = None,
                   key: str | None = None) -> dict[str, Any]:
        """A new run of the job, compared step by step with an earlier one. `execution` replaces single keys of the job's."""
        body = {"execution": execution, "reproduces": reproduces}
        return self._create(f"/v1/jobs/{_part(job_id)}/runs", json.dumps(_given(body)), key)

    # Runs

    def run(self, run_id: str) -> dict[str, Any]:
        return self._json("GET", f"/v1/runs/{_part(run_id)}")

    def runs(self, **filters: Any) -> dict[str, Any]:
        """One page. Filters: status, job, digest, kind, name, model, seed, parent, since, until, cursor, limit."""
        return self._json("GET", "/v1/runs", params=_given(filters))

    def lineage(self, run_id: str, depth: int = 5) -> dict[str, Any]:
        """What the run came from, and what came from it: {"nodes": [...], "edges": [...], "truncated": ...}."""
        return self._json("GET", f"/v1/runs/{_part(run_id)}/lineage", params={"depth": depth})

    def find_digest(self, digest: str) -> dict[str, Any]:
        """What produced or used a digest: {"items": [...], "truncated": ...}."""
        return self._json("GET", f"/v1/digests/{_part(digest)}")

    def act(self, run_id: str, action: str) -> dict[str, Any]:
        """cancel, pause or resume: the run as it's now."""
        return self._json("POST", f"/v1/runs/{_part(run_id)}/{action}", content=b"{}")

    def steps(self, run_id: str, after: int = -1) -> list[dict[str, Any]]:
        return self._items(run_id, "steps", after)

    def logs(self, run_id: str, after: int = 0) -> list[dict[str, Any]]:
        return self._items(run_id, "logs", after)

    def checkpoints(self, run_id: str) -> list[dict[str, Any]]:
        return self._list(run_id, "checkpoints")

    def verifications(self, run_id: str) -> list[dict[str, Any]]:
        return self._list(run_id, "verifications")

    def provenance(self, run_id: str) -> dict[str, Any]:
        return self._json("GET", f"/v1/runs/{_part(run_id)}/provenance")

    def attestation(self, run_id: str) -> dict[str, Any]:
        """What was signed about a run that has ended: {"envelope": ..., "log_index": ...}. NotFound while there is none."""
        return self._json("GET", f"/v1/runs/{_part(run_id)}/attestation")

    def delete_checkpoint(self, run_id: str, step: int) -> dict[str, Any]:
        """Delete a checkpoint's bytes; its digests stay on record."""
        return self._json("DELETE", f"/v1/runs/{_part(run_id)}/checkpoints/{step}")

    def checkpoint_file(self, run_id: str, step: int, name: str) -> Iterator[bytes]:
        """The bytes of a checkpoint's file, in pieces."""
        path = f"/v1/runs/{_part(run_id)}/checkpoints/{step}/files/{_part(name)}"
        try:
            with self._http.stream("GET", path) as response:
                self._refuse(response)
                yield from response.iter_bytes()
        except httpx.TransportError as error:
            raise self._unreachable(error) from None

    # The log of attestations

    def signing_keys(self) -> list[dict[str, Any]]:
        """The public keys that have signed there: id and PEM. Who trusts them trusts the service."""
        items: list[dict[str, Any]] = self._json("GET", "/v1/keys")["items"]
        return items

    def log_head(self) -> dict[str, Any]:
        """The signed tree head: an envelope. NotFound while the log is empty."""
        return self._json("GET", "/v1/log/head")

    def log_entries(self, after: int = -1) -> list[dict[str, Any]]:
        """All entries after an index."""
        return self._pages("/v1/log/entries", after)

    def log_proof(self, size: int, *, index: int | None = None, old_size: int | None = None) -> list[str]:
        """The hashes that prove inclusion of an entry, or consistency with an older log, under the head of `size` entries."""
        asked = _given({"size": size, "index": index, "old_size": old_size})
        proof: list[str] = self._json("GET", "/v1/log/proof", params=asked)["proof"]
        return proof

    # The audit log of writes

    def audit_entries(self, after: int = -1, *, tenant: str | None = None) -> list[dict[str, Any]]:
        """All entries after a number. `tenant` is for operators; None: that of the key."""
        return self._pages("/v1/audit", after, _of_tenant(tenant))

    def audit_head(self, *, tenant: str | None = None) -> dict[str, Any]:
        """The log's tenant, length and last digest."""
        return self._json("GET", "/v1/audit/head", headers=_of_tenant(tenant))

    # Verifications

    def verify(self, run_id: str, level: str = "check", *, segments: int | None = None, seed: int | None = None,
               against: str | None = None, execution: Mapping[str, Any] | None = None,
               against_execution: Mapping[str, Any] | None = None, key: str | None = None) -> dict[str, Any]:
        """Have the service verify a run. check: done when this returns. audit (of so many drawn segments), rerun (of everything)
        and bisect (`against` another run of its job, or a replay): queued, and carried out by the run that `executed_by` names;
        see `verification` and `events`."""
        body = {"run": run_id, "level": level, "segments": segments, "seed": seed, "against": against, "execution": execution,
                "against_execution": against_execution}
        return self._create("/v1/verifications", json.dumps(_given(body)), key)

    def verification(self, verification_id: str) -> dict[str, Any]:
        """One verification: `status`, `progress`, and `verdict` once it has ended."""
        return self._json("GET", f"/v1/verifications/{_part(verification_id)}")

    def cancel_verification(self, verification_id: str) -> dict[str, Any]:
        """End a verification without a verdict."""
        return self._json("POST", f"/v1/verifications/{_part(verification_id)}/cancel", content=b"{}")

    def verdict_attestation(self, verification_id: str) -> dict[str, Any]:
        """What was signed about the verdict of an audit, a rerun or a bisect. NotFound while there is none."""
        return self._json("GET", f"/v1/verifications/{_part(verification_id)}/attestation")

    def events(self, run_id: str, after: int = 0) -> Iterator[dict[str, Any]]:
        """Every event of a run from number `after` + 1 on, as it happens, until the run has ended.

        A stream that breaks is taken up again at the next number: no event is missed, and none comes twice. Raises
        ServiceUnreachable when it can't be.
        """
        failures = 0
        while True:
            lost: Exception | None = None
            try:
                for event in self._stream(run_id, after):
                    if event is None:
                        return
                    if event["number"] > after:
                        after, failures = event["number"], 0
                        yield event
            except httpx.TransportError as error:
                lost = error
            if failures == len(self._retry_seconds):
                raise ServiceUnreachable(f"the event stream of {run_id} broke off after event {after}: {_said(lost)}", run=run_id)
            time.sleep(self._retry_seconds[failures])
            failures += 1

    # How requests are made

    def _stream(self, run_id: str, after: int) -> Iterator[dict[str, Any] | None]:
        """One connection's events; None when the service says that there are no more."""
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
        timeout = httpx.Timeout(SILENCE_SECONDS_MAX, connect=5.0)
        with self._http.stream("GET", f"/v1/runs/{_part(run_id)}/events", headers=headers, timeout=timeout) as response:
            self._refuse(response)
            for name, data in parse_stream(stream_lines(response.iter_bytes())):
                if name == "end":
                    yield None
                    return
                yield json.loads(data)

    def _create(self, path: str, body: str | bytes, key: str | None) -> dict[str, Any]:
        headers = {"Idempotency-Key": key or str(uuid.uuid4())}
        for seconds in (*self._retry_seconds[:3], None):
            try:
                return self._json("POST", path, content=body, headers=headers)
            except ServiceUnreachable:
                if seconds is None:
                    raise
                time.sleep(seconds)
        raise AssertionError("the last attempt returns or raises")

    def _items(self, run_id: str, what: str, after: int) -> list[dict[str, Any]]:
        return self._pages(f"/v1/runs/{_part(run_id)}/{what}", after)

    def _pages(self, path: str, after: int, headers: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """Everything after a number, page after page."""
        items: list[dict[str, Any]] = []
        while True:
            page = self._json("GET", path, params={"after": after, "limit": ITEMS_MAX}, headers=headers)
            items += page["items"]
            if len(page["items"]) < ITEMS_MAX:
                return items
            after = page["next_after"]

    def _list(self, run_id: str, what: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = self._json("GET", f"/v1/runs/{_part(run_id)}/{what}")["items"]
        return items

    def _json(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        if "content" in options:
            options["headers"] = {"Content-Type": "application/json", **options.get("headers", {})}
        try:
            response = self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise self._unreachable(error) from None
        self._refuse(response)
        return self._decoded(response)

    def _refuse(self, response: httpx.Response) -> None:
        """Raise what an answer that isn't a success says."""
        if response.is_success:
            return
        response.read()
        error = self._decoded(response).get("error")
        if not isinstance(error, dict) or not isinstance(error.get("code"), str):
            raise self._foreign(response)
        raise refusal(response.status_code, error)

    def _decoded(self, response: httpx.Response) -> dict[str, Any]:
        try:
            value = response.json()
        except ValueError:
            raise self._foreign(response) from None
        if not isinstance(value, dict):
            raise self._foreign(response)
        return value

    def _foreign(self, response: httpx.Response) -> MokError:
        return ServiceUnreachable(f"what answers at {self.url} is no MoK service (status {response.status_code})", url=self.url)

    def _unreachable(self, error: httpx.TransportError) -> MokError:
        if isinstance(error, httpx.UnsupportedProtocol):
            return BadAddress(f"{self.url!r} is no address; one looks like http://127.0.0.1:8080", url=self.url)
        return ServiceUnreachable(f"no service answers at {self.url} ({_said(error)}); `mok serve` starts one", url=self.url)


def refusal(status: int, error: Mapping[str, Any]) -> MokError:
    """The exception that an error answer stands for."""
    code, message, detail = error["code"], str(error.get("message", "")), error.get("detail")
    kinds = {kind.code: kind for kind in _kinds(MokError) if "code" in vars(kind)}
    kind = kinds.get(code, Refused if status < 500 else MokError)
    made = kind(message)
    made.detail = dict(detail) if isinstance(detail, Mapping) else {}
    return made


def stream_lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """The lines of UTF-8 text that comes in pieces. Only a line feed ends a line (str.splitlines knows a dozen others)."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode()


def parse_stream(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(event, data) of a text/event-stream. An event that the stream's end cuts off isn't one."""
    name, data = "message", list[str]()
    for line in lines:
        if line == "":
            if data:
                yield name, "\n".join(data)
            name, data = "message", []
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)


def _kinds(root: type[MokError]) -> Iterator[type[MokError]]:
    yield root
    for kind in root.__subclasses__():
        yield from _kinds(kind)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in values.items()
            if value is not None}


def _of_tenant(tenant: str | None) -> dict[str, str]:
    return {} if tenant is None else {"Mok-Tenant": tenant}


def _part(text: str) -> str:
    """One part of a path."""
    return quote(text, safe="")


def _said(error: Exception | None) -> str:
    return "it ended" if error is None else str(error) or type(error).__name__

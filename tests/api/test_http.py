"""What a client may have this process keep before its request is known is bounded."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from mok_api.guard import HEADERS_MAX
from mok_api.http import UNTOLD_BYTES_MAX, BoundedHttp
from tests.services import Service

START = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CHUNKED = b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def connection(service: Service) -> Iterator[socket.socket]:
    with socket.create_connection(service.address, timeout=30) as made:
        yield made


def sent_until_refused(connection: socket.socket, piece: bytes) -> int:
    """How many bytes of endless pieces the service takes."""
    sent = 0
    with suppress(ConnectionError):
        while sent < 64 << 20:
            connection.sendall(piece)
            sent += len(piece)
    return sent


@pytest.mark.parametrize("piece", [b"x" * 4096, b"a:b\r\n" * 800, b"x: " + b"y" * 4000 + b"\r\n"],
                         ids=["one line", "short lines", "long lines"])
@pytest.mark.parametrize("start", [b"", START, CHUNKED + b"2\r\n{}\r\n0\r\n"], ids=["first line", "headers", "trailers"])
def test_endless_heads_and_trailers_are_cut_off(service: Service, connection: socket.socket, start: bytes, piece: bytes) -> None:
    connection.sendall(start or b"GET /")
    buffered = 16 << 20  # more than the kernel holds of a connection on its way
    assert sent_until_refused(connection, piece) < buffered
    assert httpx.get(f"{service.url}/healthz").status_code == 200


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closed = b"", False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


@pytest.mark.parametrize(("more", "refused"), [(UNTOLD_BYTES_MAX, False), (UNTOLD_BYTES_MAX + 1, True)])
def test_a_head_that_is_too_long_is_told_so(more: int, refused: bool) -> None:
    async def talk() -> Transport:
        config = uvicorn.Config(app=lambda *_: None, log_config=None)
        config.load()
        protocol, transport = BoundedHttp(config, ServerState(), {}), Transport()
        protocol.connection_made(transport)
        protocol.data_received(START)
        protocol.data_received(b"x: " + b"y" * (more - 3))
        return transport

    transport = asyncio.run(talk())
    assert transport.closed == refused and transport.written.startswith(b"HTTP/1.1 431 ") == refused


def test_a_body_is_not_a_head(service: Service, connection: socket.socket) -> None:
    """Long bodies, in many chunks, and request after request on one connection."""
    for _ in range(3):
        connection.sendall(CHUNKED)
        for _ in range(200):
            connection.sendall(b"200\r\n" + b" " * 512 + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 422 ")


def test_many_headers_are_refused(service: Service) -> None:
    with httpx.Client(base_url=service.url) as client:
        fixed = len(client.get("/healthz").request.headers)
        most = {f"x-{number}": "y" for number in range(HEADERS_MAX - fixed)}
        assert client.get("/healthz", headers=most).status_code == 200
        answer = client.get("/healthz", headers={**most, "x": "y"})
        assert answer.status_code == 431 and answer.json()["error"]["code"] == "headers_too_large"

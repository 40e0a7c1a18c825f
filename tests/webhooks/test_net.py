"""Connections made for users go to public addresses only, whatever names and redirects say."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_address, ip_network

import httpx
import pytest

from mok_service.net import GuardedTransport, Refused, choose, is_allowed, resolve_name

HOME = ip_network("127.0.0.1/32")


@pytest.mark.parametrize("address", [
    "127.0.0.1", "127.255.255.254", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254",
    "100.64.0.1", "100.100.100.200", "168.63.129.16", "192.0.0.192", "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1",
    "255.255.255.255", "::", "::1", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2002:a9fe:a9fe::1", "2001:0:4136:e378:8000:63bf:80ff:fffe",
    "2001:db8::1", "::7f00:1",
])
def test_what_is_not_public_is_refused(address: str) -> None:
    assert not is_allowed(ip_address(address))
    with pytest.raises(Refused, match="isn't public"):
        choose("example.org", [address])


@pytest.mark.parametrize("address", ["8.8.8.8", "172.32.0.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_what_is_public_is_allowed(address: str) -> None:
    assert choose("example.org", [address]) == ip_address(address)


def test_one_bad_address_spoils_a_name() -> None:
    for addresses in (["8.8.8.8", "127.0.0.1"], ["127.0.0.1", "8.8.8.8"]):
        with pytest.raises(Refused):
            choose("rebinding.example.org", addresses)


def test_a_network_can_be_allowed() -> None:
    assert is_allowed(ip_address("10.1.2.3"), [ip_network("10.1.0.0/16")])
    assert not is_allowed(ip_address("10.2.2.3"), [ip_network("10.1.0.0/16")])
    assert is_allowed(ip_address("::ffff:10.1.2.3"), [ip_network("10.1.0.0/16")])


@pytest.mark.parametrize("host", ["localhost", "127.1", "2130706433", "0x7f.1", "0177.0.0.1"])
def test_other_ways_to_write_this_machine_are_refused(host: str) -> None:
    try:
        addresses = resolve_name(host, 80)
    except httpx.ConnectError:
        return  # this system's resolver doesn't know that notation
    with pytest.raises(Refused):
        choose(host, addresses)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.hosts.append(self.headers["Host"])  # type: ignore[attr-defined]
        self.send_response(302 if self.path == "/away" else 200)
        self.send_header("Location", "http://169.254.169.254/latest?token=secret")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Handler) as running:
        running.hosts = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_the_connection_goes_to_the_address_that_was_checked(server: HTTPServer) -> None:
    """The name is looked up once: a second answer would lead elsewhere."""
    asked: list[str] = []

    def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["169.254.169.254"]

    with httpx.Client(transport=GuardedTransport([HOME], resolve), trust_env=False) as client:
        url = f"http://name.example.org:{server.server_port}/"
        assert client.get(url).status_code == 200
        assert asked == ["name.example.org"]
        assert server.hosts == [f"name.example.org:{server.server_port}"]  # type: ignore[attr-defined]
        with pytest.raises(Refused):
            client.get(url)


def test_without_permission_nothing_is_sent(server: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # a proxy would connect for us
    with httpx.Client(transport=GuardedTransport(), trust_env=False) as client:
        for host in ("127.0.0.1", "localhost"):
            with pytest.raises(Refused):
                client.get(f"http://{host}:{server.server_port}/")
    assert server.hosts == []  # type: ignore[attr-defined]


def test_no_log_has_the_query_of_a_url(server: HTTPServer, caplog: pytest.LogCaptureFixture) -> None:
    httpcore = logging.getLogger("httpcore")
    before = httpcore.level
    with caplog.at_level(logging.DEBUG):
        httpcore.setLevel(logging.NOTSET)
        with httpx.Client(transport=GuardedTransport([HOME]), trust_env=False) as client:
            client.get(f"http://127.0.0.1:{server.server_port}/away")
    httpcore.setLevel(before)
    assert "secret" not in caplog.text


def test_a_redirect_is_not_followed(server: HTTPServer) -> None:
    with httpx.Client(transport=GuardedTransport([HOME]), trust_env=False) as client:
        assert client.get(f"http://127.0.0.1:{server.server_port}/away").status_code == 302


def test_a_name_without_an_address_is_a_failure_of_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object, **__: object) -> object:
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", nothing)
    with httpx.Client(transport=GuardedTransport()) as client, pytest.raises(httpx.ConnectError, match="no address"):
        client.get("https://nowhere.example.org/")

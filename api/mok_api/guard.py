"""What every request must pass before a route sees it, and the headers that every answer carries.

A page of another site can make a browser send requests to a service on this machine: by a name that it lets point here
(so the Host header must name us), or as a form or a script (so a request that changes something must come from our own page
or from no page at all, and a body must be JSON, which other sites can't send unasked).
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mok_api.errors import CrossOrigin, HeadersTooLarge, Misdirected, UriTooLong, answer_for, short
from mok_service.errors import MokError

HEADER_BYTES_MAX = 16 << 10
HEADERS_MAX = 100
URI_BYTES_MAX = 8 << 10
READING = frozenset({"GET", "HEAD", "OPTIONS"})
ANSWER_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """ASGI middleware: refuses foreign hosts and origins, and sets headers. `hosts` are names without a port."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str]) -> None:
        self.app = app
        self.hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in ANSWER_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            _check_size(scope)
            self._check(scope["method"], Headers(scope=scope))
        except MokError as error:
            await answer_for(error)(scope, receive, send_with_headers)
        else:
            await self.app(scope, receive, send_with_headers)

    def _check(self, method: str, headers: Headers) -> None:
        host = headers.get("host", "")
        if _name(host) not in self.hosts:
            raise Misdirected(
                f"the Host header says {short(host)}, and this service answers for {', '.join(sorted(self.hosts))}",
                host=host, allowed=sorted(self.hosts),
            )
        origin = headers.get("origin")
        if method not in READING and origin is not None and _authority(origin) != host.lower():
            raise CrossOrigin(f"a page of {short(origin)} sent the request, and it may not change anything here", origin=origin)


def _check_size(scope: Scope) -> None:
    if len(scope.get("raw_path") or scope["path"].encode()) + len(scope["query_string"]) > URI_BYTES_MAX:
        raise UriTooLong(f"path and query have more than {URI_BYTES_MAX} bytes", allowed=URI_BYTES_MAX)
    if sum(len(name) + len(value) for name, value in scope["headers"]) > HEADER_BYTES_MAX:
        raise HeadersTooLarge(f"the headers have more than {HEADER_BYTES_MAX} bytes", allowed=HEADER_BYTES_MAX)
    if len(scope["headers"]) > HEADERS_MAX:
        raise HeadersTooLarge(f"there are {len(scope['headers'])} headers; allowed: at most {HEADERS_MAX}", allowed=HEADERS_MAX)


def _name(host: str) -> str:
    """The host without its port: `localhost:8080` -> `localhost`, `[::1]:8080` -> `::1`."""
    host = host.lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""

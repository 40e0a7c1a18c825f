"""Around everything else: each request gets an id, is measured and traced, and what came of a write gets onto the audit log."""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import Final

from sqlalchemy.exc import OperationalError, SQLAlchemyError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mok_api.access import client_address
from mok_api.errors import error_answer
from mok_api.metrics import Metrics
from mok_service import auditlog, logs, tracing
from mok_service.settings import Settings

logger = logging.getLogger("mok.api")

FAILED: Final = 500
UNAVAILABLE: Final = 503
_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Observer:
    """ASGI middleware, the outermost."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self.app, self._trusted, self._metrics = app, settings.trusted_proxies, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        await _Exchange(self, scope).run(receive, send)


class _Exchange:
    """One request and its answer."""

    def __init__(self, observer: Observer, scope: Scope) -> None:
        self.app, self.metrics, self.scope = observer.app, observer._metrics, scope
        headers, peer = Headers(scope=scope), (scope.get("client") or ("-", 0))[0]
        self.address = client_address(peer, headers.get("x-forwarded-for"), observer._trusted)
        asked = headers.get("x-request-id", "")
        # A proxy of ours may name a request; anybody else could make two look like one.
        self.id = asked if self.address != peer and _ID.fullmatch(asked) else f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {})["address"] = self.address
        self.status: int | None = None

    async def run(self, receive: Receive, send: Send) -> None:
        logs.request_id.set(self.id)
        began = time.perf_counter()

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = self.id
                self.metrics.observe(self.scope["method"], self._route(), self.status, time.perf_counter() - began)
                await self._audit(self.status)
            await send(message)

        with tracing.span(f"{self.scope['method']} request", request=self.id) as span:
            try:
                await self.app(self.scope, receive, sending)
            except Exception as error:
                await self._fail(error, receive, sending)
            if span is not None:
                span.update_name(f"{self.scope['method']} {self._route()}")
                span.set_attribute("http.route", self._route())
                span.set_attribute("http.response.status_code", self.status or 0)
                for name, value in self.scope.get("path_params", {}).items():
                    span.set_attribute(f"mok.{name}", str(value)[:100])

    def _route(self) -> str:
        """Its path as it's declared: a number of names, not of ids."""
        route = self.scope.get("route")
        return getattr(route, "path", "none")

    async def _fail(self, error: Exception, receive: Receive, send: Send) -> None:
        """Our own fault, or the database's: the log says which, the answer doesn't tell more than that."""
        unavailable = isinstance(error, OperationalError)
        if isinstance(error, SQLAlchemyError):
            self.metrics.database_errors += 1
        logger.error("%s %s failed", self.scope["method"], self._route(), exc_info=error)
        if self.status is not None:  # the answer had begun: cutting it off is all that can be said
            raise error
        answer = (error_answer(UNAVAILABLE, "database_unavailable", "the database can't be reached; try again",
                               headers={"Retry-After": "5"}) if unavailable else
                  error_answer(FAILED, "internal", "the service failed; its log says why"))
        await answer(self.scope, receive, send)

    async def _audit(self, status: int) -> None:
        """What came of a write, before the answer is sent."""
        request: auditlog.Request | None = self.scope["state"].get("audited")
        if request is None or request.written == status:  # mostly the write itself has said so
            return
        try:
            await run_in_threadpool(request.end, status)
        except Exception as error:  # a write that isn't on the log was rolled back with it: what came is a refusal, or nothing
            self.metrics.database_errors += isinstance(error, SQLAlchemyError)
            logger.error("the outcome %d isn't on the audit log", status, exc_info=error)

"""Who may call which route. Every route is closed, unless the table below opens it; the application doesn't start with a
route that isn't in the table."""

from __future__ import annotations

import ipaddress
import logging
import math
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal

from fastapi import Depends, Header, Request
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.routing import BaseRoute

from mok_api.guard import READING
from mok_api.limits import Buckets
from mok_service import access, auditlog, logs
from mok_service.access import KEY_PREFIX, LOCAL, Permission, Principal
from mok_service.db.session import Database
from mok_service.errors import Forbidden, TooManyRequests, Unauthenticated
from mok_service.settings import Network, Settings

logger = logging.getLogger("mok.api")

RUN: Final = "/v1/runs/{run}"
ROUTES: Final[dict[tuple[str, str], Permission | Literal["public"]]] = {
    ("GET", "/"): "public", ("GET", "/healthz"): "public", ("GET", "/readyz"): "public", ("GET", "/metrics"): "metrics",
    ("POST", "/v1/jobs"): "write", ("POST", "/v1/jobs/validate"): "read", ("GET", "/v1/jobs"): "read",
    ("GET", "/v1/jobs/{job}"): "read", ("POST", "/v1/jobs/{job}/runs"): "write",
    ("GET", "/v1/runs"): "read", ("GET", RUN): "read",
    **{("POST", f"{RUN}/{action}"): "write" for action in ("cancel", "pause", "resume")},
    **{("GET", f"{RUN}/{part}"): "read" for part in (
        "steps", "logs", "events", "checkpoints", "attempts", "verifications", "provenance", "attestation", "lineage",
        "checkpoints/{step}/files/{name}")},
    ("DELETE", f"{RUN}/checkpoints/{{step}}"): "write",
    ("POST", "/v1/verifications"): "write", ("GET", "/v1/verifications/{verification}"): "read",
    ("POST", "/v1/verifications/{verification}/cancel"): "write",
    ("GET", "/v1/verifications/{verification}/attestation"): "read",
    ("GET", "/v1/digests/{digest}"): "read",
    ("GET", "/v1/log/head"): "read", ("GET", "/v1/log/entries"): "read", ("GET", "/v1/log/proof"): "read",
    ("GET", "/v1/keys"): "read", ("GET", "/v1/nodes"): "operate",
    ("POST", "/v1/api-keys"): "keys", ("GET", "/v1/api-keys"): "keys", ("GET", "/v1/api-keys/{key}"): "keys",
    ("POST", "/v1/api-keys/{key}/revoke"): "keys",
    ("POST", "/v1/webhooks"): "webhooks", ("GET", "/v1/webhooks"): "webhooks", ("GET", "/v1/webhooks/{webhook}"): "webhooks",
    ("DELETE", "/v1/webhooks/{webhook}"): "webhooks", ("GET", "/v1/webhooks/{webhook}/deliveries"): "webhooks",
    ("GET", "/v1/audit"): "audit", ("GET", "/v1/audit/head"): "audit",
}
FORWARDED_MAX: Final = 20  # addresses of an X-Forwarded-For that are looked at
_BEARER: Final = re.compile(r"Bearer +(\S{1,500})", re.IGNORECASE)


class Door:
    """What decides whether a request is let in."""

    def __init__(self, settings: Settings) -> None:
        self.keys_required = access.keys_required(settings)
        self.by_key = Buckets(settings.requests_per_second, settings.requests_burst)
        self.failures = Buckets(settings.failed_keys_per_minute / 60, settings.failed_keys_per_minute)
        # Of a network the log tells a little, and of all together a bounded amount: nobody without a key can fill the disk.
        self._told, self._told_of_all = Buckets(0.1, 10), Buckets(2.0, 100)

    async def principal(self, db: Database, authorization: str | None, address: str) -> Principal:
        """Who asks. Raises Unauthenticated, and TooManyRequests for a key or an address that asks too often. The log tells
        who had no good key, and which by the part of it that isn't secret."""
        try:
            return await self._principal(db, authorization, address)
        except Unauthenticated:
            if not self._told.take(_network(address)) and not self._told_of_all.take(""):
                key = KEY_PREFIX.search(authorization or "")
                logger.warning("no access: address=%s key=%s", address, key[0] if key else "-")
            raise

    async def _principal(self, db: Database, authorization: str | None, address: str) -> Principal:
        if authorization is None:
            if self.keys_required:
                raise Unauthenticated("this service asks for an API key: Authorization: Bearer KEY")
            return LOCAL
        match = _BEARER.fullmatch(authorization)
        if match is None:
            raise Unauthenticated("Authorization isn't understood; allowed: Bearer KEY")
        network = _network(address)
        _refuse(self.failures.take(network), "too many wrong API keys came from this address")
        found = await run_in_threadpool(access.authenticate, db, match[1])  # a wrong one has cost its token
        self.failures.give_back(network)
        _refuse(self.by_key.take(str(found.key)), "this API key asks too often")
        return found


def _refuse(seconds: float, why: str) -> None:
    if seconds > 0:
        wait = math.ceil(seconds)
        raise TooManyRequests(f"{why}; try again in {wait} s", retry_after=wait)


async def authorize(
    request: Request,
    mok_tenant: Annotated[str | None, Header(description="For operators: the tenant to act in; default: the key's own.")] = None,
) -> None:
    """Let the request in, or not; and if it may write, have it on the audit log. Runs before anything else of a route."""
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    needed = permission_of(request.method, route.path)
    if needed == "public":
        return
    door: Door = request.app.state.door
    db: Database = request.app.state.db
    found = await door.principal(db, request.headers.get("authorization"), request.state.address)
    principal = found if mok_tenant is None else found.within(mok_tenant)
    request.state.principal = principal
    if request.method not in READING and needed != "read":
        audited = auditlog.Request(
            db, principal.tenant, principal.actor, principal.role, request.state.address, f"{request.method} {route.path}",
            logs.request_id.get() or "-", route.status_code or 200,
            {name: str(value)[:100] for name, value in request.path_params.items()},
        )
        request.state.audited = audited
        auditlog.begin(audited)
    if needed not in principal.permissions:
        raise Forbidden(f"this API key ({principal.role}) has no permission to {needed}", needed=needed)


async def principal(request: Request) -> Principal:
    found: Principal = request.state.principal
    return found


async def tenant(request: Request) -> str:
    found: Principal = request.state.principal
    return found.tenant


Who = Annotated[Principal, Depends(principal)]
Tenant = Annotated[str, Depends(tenant)]


# ---- The table -------------------------------------------------------------------------------------------------------

def permission_of(method: str, path: str) -> Permission | Literal["public"]:
    return ROUTES[("GET" if method == "HEAD" else method, path)]


def check_every_route(routes: Iterable[BaseRoute]) -> None:
    """Raises RuntimeError for a route that nobody has decided about."""
    there = [(method, route.path) for route in routes if isinstance(route, APIRoute) for method in route.methods or ()]
    unknown = sorted(" ".join(route) for route in there if route not in ROUTES)
    if unknown:
        raise RuntimeError(f"no permission is declared for {', '.join(unknown)}: say in mok_api/access.py who may call them")


def describe(description: dict[str, Any]) -> None:
    """Into the OpenAPI description: that routes take a key, and which permission each needs."""
    description["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer",
                                                            "description": "An API key, made by `mok apikey create`."}}
    for path, item in description["paths"].items():
        for method, operation in item.items():
            needed = permission_of(method.upper(), path)
            operation["x-permission"] = needed
            operation["security"] = [] if needed == "public" else [{"key": []}]


# ---- Addresses -------------------------------------------------------------------------------------------------------

def client_address(peer: str, forwarded: str | None, trusted: Sequence[Network]) -> str:
    """Who is behind the connection: its peer; behind trusted proxies the last address that isn't one of theirs."""
    hops = [hop.strip() for hop in (forwarded or "").split(",")][-FORWARDED_MAX:]
    address = peer
    while _is_in(address, trusted) and hops and _is_address(hops[-1]):
        address = hops.pop()
    return address


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_in(text: str, networks: Sequence[Network]) -> bool:
    return _is_address(text) and any(ipaddress.ip_address(text) in network for network in networks)


def _network(address: str) -> str:
    """What counts as one address: of IPv6 a /64, which one household has."""
    if ":" not in address or not _is_address(address):
        return address
    return str(ipaddress.ip_network(f"{address.partition('%')[0]}/64", strict=False))

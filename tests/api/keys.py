"""A service that asks for keys, with two tenants and a key of each role."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from mok_service import access
from mok_service.access import OF_ROLE, Principal, Role
from mok_service.db.session import Database
from tests.services import Service


def admin(tenant: str) -> Principal:
    """Who makes the first keys."""
    return Principal(tenant, "operator", OF_ROLE["operator"])


def new_key(db: Database, role: Role, tenant: str = "ours", **more: Any) -> str:
    """The text of a new key."""
    return access.create_key(db, admin(tenant), name=role, role=role, **more)[1]


@dataclass
class Keyed:
    """A service that asks for keys."""

    service: Service

    def key(self, role: Role, tenant: str = "ours", **more: Any) -> str:
        return new_key(self.service.db, role, tenant, **more)

    def ask(self, method: str, path: str, key: str | None = None, **more: Any) -> httpx.Response:
        headers = more.pop("headers", {}) | ({} if key is None else {"Authorization": f"Bearer {key}"})
        return httpx.request(method, self.service.url + path, headers=headers, timeout=30, **more)

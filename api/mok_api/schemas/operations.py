"""The machines, and whether the service is well."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from mok_api.schemas.base import Answer


class Node(Answer):
    name: str
    capacity: dict[str, int] = Field(examples=[{"cpu": 1}])
    labels: dict[str, str]
    worker: str | None
    heartbeat_at: datetime | None


class NodeItems(Answer):
    items: list[Node]


class Health(Answer):
    status: Literal["ok", "ready"]

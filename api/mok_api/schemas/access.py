"""API keys, webhooks and the audit log."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final, Literal, NoReturn

from pydantic import Field

from mok_api.schemas.base import AT, DIGEST, JOB, Answer, Strict
from mok_service.access import NAME_LENGTH_MAX, Permission, Role
from mok_service.errors import InvalidSpec
from mok_service.runs.outbox import WebhookEvent
from mok_service.webhooks.hooks import URL_LENGTH_MAX

NEW_API_KEY_EXAMPLE: Final[dict[str, Any]] = {"name": "ci", "role": "member", "scopes": [], "expires_at": None}
NEW_WEBHOOK_EXAMPLE: Final[dict[str, Any]] = {"url": "https://example.org/mok", "events": ["run.ended"]}


class NewApiKey(Strict):
    name: str = Field(min_length=1, max_length=NAME_LENGTH_MAX)
    """What it's for, for people."""
    role: Role
    """viewer: looks. member: also submits, steers, verifies. admin: also keys, webhooks, audit log. operator: all tenants."""
    scopes: list[Permission] = Field(default_factory=list, max_length=20)
    """Only these permissions of the role; none: all of them."""
    expires_at: str | None = Field(default=None, max_length=40)
    """When it ends by itself, with a time zone; null: never."""

    def expiry(self) -> datetime | None:
        """The time. Raises InvalidSpec for one that can't be read or has no zone."""
        if self.expires_at is None:
            return None
        try:
            at = datetime.fromisoformat(self.expires_at)
            return at.astimezone(UTC) if at.tzinfo is not None else _no_time(self.expires_at)
        except (ValueError, OverflowError):
            return _no_time(self.expires_at)


def _no_time(text: str) -> NoReturn:
    raise InvalidSpec(f"expires_at: {text!r} is no time; allowed: such as {AT}", field="expires_at", value=text)


class ApiKey(Answer):
    """A key, without its text."""

    id: str = Field(examples=["key_0198c0de5e1f7000800000000000c0de"])
    tenant: str = Field(examples=["local"])
    name: str = Field(examples=["ci"])
    prefix: str = Field(examples=["mok_0123456789ab"])
    """How the key begins."""
    role: Role
    scopes: list[Permission]
    created_by: str | None
    """A key's id; or the user of the command on the service's machine."""
    created_at: datetime = Field(examples=[AT])
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None
    """To a few minutes."""


class NewApiKeyAnswer(ApiKey):
    key: str
    """Shown once."""


class ApiKeyPage(Answer):
    items: list[ApiKey]
    next_cursor: str | None
    """For the next page; null on the last."""


class NewWebhook(Strict):
    url: str = Field(min_length=1, max_length=URL_LENGTH_MAX)
    """Where deliveries go: https."""
    events: list[WebhookEvent] = Field(min_length=1, max_length=10)


class Webhook(Answer):
    id: str = Field(examples=["whk_0198c0de5e1f7000800000000000c0de"])
    tenant: str = Field(examples=["local"])
    url: str = Field(examples=["https://example.org/mok"])
    events: list[WebhookEvent]
    created_at: datetime = Field(examples=[AT])


class NewWebhookAnswer(Webhook):
    secret: str
    """What deliveries are signed with. Shown once."""


class WebhookItems(Answer):
    items: list[Webhook]


class Delivery(Answer):
    id: str = Field(examples=["dlv_0198c0de5e1f7000800000000000c0de"])
    webhook: str
    type: WebhookEvent
    status: Literal["pending", "delivered", "given_up"]
    attempts: int = Field(examples=[1])
    message: str | None
    """Why the last attempt failed."""
    created_at: datetime = Field(examples=[AT])
    next_at: datetime | None
    """When it's tried next, at the earliest."""
    ended_at: datetime | None


class DeliveryPage(Answer):
    items: list[Delivery]
    next_cursor: str | None
    """For the next page; null on the last."""


class AuditEntry(Answer):
    """A write that somebody asked for."""

    tenant: str = Field(examples=["local"])
    number: int = Field(examples=[0])
    at: datetime = Field(examples=[AT])
    actor: str = Field(examples=["key_0198c0de5e1f7000800000000000c0de"])
    """A key's id; local where none is asked for; or the user of a command on the service's machine."""
    role: str = Field(examples=["member"])
    address: str | None = Field(examples=["192.0.2.1"])
    action: str = Field(examples=["POST /v1/jobs"])
    ids: dict[str, str] = Field(examples=[{"job": JOB}])
    body: str | None = Field(examples=[DIGEST])
    """SHA-256 of the request's body."""
    outcome: int = Field(examples=[201])
    """The answer's status."""
    request: str
    """The request's id: X-Request-ID of its answer."""
    previous: str = Field(examples=[DIGEST])
    digest: str = Field(examples=[DIGEST])
    """SHA-256 of all of the above as canonical JSON; docs/api.md says how."""


class AuditItems(Answer):
    items: list[AuditEntry]
    next_after: int
    """What to give as `after` to go on."""


class AuditHead(Answer):
    tenant: str = Field(examples=["local"])
    length: int = Field(examples=[1])
    digest: str = Field(examples=[DIGEST])

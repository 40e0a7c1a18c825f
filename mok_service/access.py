"""Who may do what: API keys, roles, permissions.

A key is `mok_`, 12 hex digits that find it, `_`, and 256 random bits. It's shown once, when it is made. The database keeps
its SHA-256: a key that is random can't be guessed, so a slow hash would protect nothing.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal, get_args

from sqlalchemy import Connection

from mok_service import auditlog
from mok_service.db import access as sql
from mok_service.db import queries, tables
from mok_service.db.ids import is_id, new_id
from mok_service.db.session import Database
from mok_service.errors import Forbidden, InvalidSpec, NotFound, Unauthenticated
from mok_service.provenance.digest import sha256
from mok_service.runs import rows
from mok_service.runs.types import Page, time_text
from mok_service.settings import Settings

Role = Literal["viewer", "member", "admin", "operator"]
Permission = Literal["read", "write", "webhooks", "keys", "audit", "metrics", "operate"]

ROLES: Final = get_args(Role)
PERMISSIONS: Final = get_args(Permission)
OF_ROLE: Final[dict[str, frozenset[Permission]]] = {
    "viewer": frozenset({"read"}),
    "member": frozenset({"read", "write"}),
    "admin": frozenset({"read", "write", "webhooks", "keys", "audit"}),
    "operator": frozenset(PERMISSIONS),
}
TENANT: Final = re.compile(r"[a-z0-9-]{1,64}")
KEY_PREFIX: Final = re.compile(r"mok_[0-9a-f]{12}(?=_)")  # what finds a key, and isn't secret
KEY: Final = re.compile(rf"({KEY_PREFIX.pattern})_[A-Za-z0-9_-]{{43}}")
USED_SECONDS: Final = 300        # how coarse `last_used_at` is
NAME_LENGTH_MAX: Final = 100
_NO_KEY: Final = sha256(b"")     # compared with where there is no such key, so that it takes as long


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks: a key in its tenant, or anybody on this machine where no keys are asked for."""

    tenant: str
    role: Role
    permissions: frozenset[Permission]
    key: str | None = None

    @property
    def actor(self) -> str:
        return self.key or "local"

    def within(self, tenant: str) -> Principal:
        """The same in another tenant. Raises Forbidden for anybody but an operator, InvalidSpec for what can't be a tenant."""
        check_tenant(tenant)
        if tenant != self.tenant and self.role != "operator":
            raise Forbidden(f"this key belongs to the tenant {self.tenant}, not {tenant}", tenant=tenant)
        return Principal(tenant, self.role, self.permissions, self.key)


LOCAL: Final = Principal("local", "operator", OF_ROLE["operator"])


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as it's listed: everything but the key."""

    id: str
    tenant: str
    name: str
    prefix: str
    role: Role
    scopes: tuple[Permission, ...]
    created_by: str | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None

    def as_dict(self) -> dict[str, Any]:
        """The REST shape."""
        same = ("id", "tenant", "name", "prefix", "role", "created_by")
        times = ("created_at", "expires_at", "revoked_at", "last_used_at")
        return {**{name: getattr(self, name) for name in same}, "scopes": list(self.scopes),
                **{name: time_text(getattr(self, name)) for name in times}}


# ---- Asking for a key ------------------------------------------------------------------------------------------------

def authenticate(db: Database, text: str, now: datetime | None = None) -> Principal:
    """Whose key this is. Raises Unauthenticated for a key that isn't one, or is revoked or expired; which of them isn't told."""
    match = KEY.fullmatch(text)
    with db.read() as tx:
        at = now if now is not None else db.now(tx)
        row = sql.key_by_prefix(tx, match[1]) if match else None
    stored = _NO_KEY if row is None else row["secret"]
    equal = hmac.compare_digest(str(sha256(text.encode())), str(stored))
    if row is None or not equal or not _is_usable(row, at):
        raise Unauthenticated("this API key isn't good here: unknown, revoked or expired")
    used = row["last_used_at"]
    if used is None or at - used >= timedelta(seconds=USED_SECONDS):
        with db.write() as tx:
            sql.update_key(tx, row["id"], {"last_used_at": at})
    return Principal(row["tenant"], row["role"], _permissions(row["role"], row["scopes"]), row["id"])


def is_good(db: Database, key_id: str) -> bool:
    """Whether a key that was good before still is."""
    with db.read() as tx:
        row, at = sql.key(tx, key_id), db.now(tx)
    return row is not None and _is_usable(row, at)


def _is_usable(row: queries.Row, at: datetime) -> bool:
    """Neither revoked nor expired."""
    return row["revoked_at"] is None and (row["expires_at"] is None or row["expires_at"] > at)


def keys_required(settings: Settings) -> bool:
    """Whether requests need a key: always, but on an address that only this machine reaches."""
    return settings.require_keys or bool(settings.trusted_proxies) or not settings.on_loopback()


def refuse_without_keys(db: Database, settings: Settings) -> None:
    """Raises InvalidSpec where keys are asked for and nobody has one."""
    if not keys_required(settings):
        return
    with db.read() as tx:
        if sql.usable_key_exists(tx, db.now(tx)):
            return
    raise _no_key_yet(settings)


def refuse_without_database(settings: Settings) -> None:
    """The same before anything is made: where the embedded database isn't there yet, neither is a key."""
    embedded = settings.database_url is None and not settings.database_file().exists()
    if embedded and keys_required(settings):
        raise _no_key_yet(settings)


def _no_key_yet(settings: Settings) -> InvalidSpec:
    return InvalidSpec(
        f"at {settings.host} every request needs an API key, and there is none yet: make the first one with "
        "`mok apikey create --role operator NAME`", field="host", value=settings.host,
    )


def check_tenant(tenant: str) -> None:
    """Raises InvalidSpec for what can't be a tenant's name."""
    if not TENANT.fullmatch(tenant):
        raise InvalidSpec(f"tenant: {tenant!r:.80} can't be one; allowed: 1 to 64 of a-z, 0-9 and -", field="tenant",
                          value=tenant[:80])


# ---- Looking after keys ----------------------------------------------------------------------------------------------

def create_key(db: Database, by: Principal, *, name: str, role: Role, scopes: Collection[Permission] = (),
               expires_at: datetime | None = None, now: datetime | None = None) -> tuple[ApiKey, str]:
    """A new key in the tenant of `by`, and its text, which nobody can show again.

    Raises Forbidden for one that could do more than `by`, InvalidSpec for scopes beyond its role or a time that has passed.
    """
    at = now if now is not None else db.now()
    if not (0 < len(name) <= NAME_LENGTH_MAX and name.isprintable()):
        raise InvalidSpec(f"name: {name!r:.120} isn't allowed; allowed: 1 to {NAME_LENGTH_MAX} printable characters",
                          field="name", value=name[:120])
    beyond = sorted(set(scopes) - OF_ROLE[role])
    if beyond:
        raise InvalidSpec(f"scopes: a {role} has no {', '.join(beyond)}; allowed: {', '.join(sorted(OF_ROLE[role]))}",
                          field="scopes", value=beyond, allowed=sorted(OF_ROLE[role]))
    if expires_at is not None and expires_at <= at:
        raise InvalidSpec("expires_at: it has passed; allowed: a time to come", field="expires_at", value=time_text(expires_at))
    if not _permissions(role, scopes) <= by.permissions or (role == "operator" and by.role != "operator"):
        raise Forbidden("a key can't be made that allows more than the one that makes it", role=role)
    prefix = f"mok_{secrets.token_hex(6)}"
    text = f"{prefix}_{secrets.token_urlsafe(32)}"
    row = {
        "id": new_id("key"), "tenant": by.tenant, "name": name, "prefix": prefix, "secret": sha256(text.encode()), "role": role,
        "scopes": sorted(scopes), "created_by": by.actor, "created_at": at, "expires_at": expires_at, "revoked_at": None,
        "last_used_at": None,
    }
    auditlog.note(key=str(row["id"]))
    with db.write() as tx:
        queries.add(tx, tables.api_keys, [row])
    return _key_of(row), text


def list_keys(db: Database, by: Principal, cursor: str | None = None, limit: int = 50) -> Page[ApiKey]:
    """The keys of the tenant of `by`, the newest first. Operators' keys are shown to operators only."""
    with db.read() as tx:
        found = sql.key_page(tx, by.tenant, _hidden(by), rows.decode_cursor(cursor), rows.check_limit(limit))
    return rows.page_of(found, limit, _key_of)


def get_key(db: Database, by: Principal, key_id: str) -> ApiKey:
    """One key. Raises NotFound, also for another tenant's."""
    with db.read() as tx:
        return _key_of(_visible(tx, by, key_id))


def revoke_key(db: Database, by: Principal, key_id: str, now: datetime | None = None) -> ApiKey:
    """Ends a key at once. Again changes nothing. Raises NotFound, also for another tenant's."""
    with db.write() as tx:
        row = _visible(tx, by, key_id)
        if row["revoked_at"] is None:
            row["revoked_at"] = now if now is not None else db.now(tx)
            sql.update_key(tx, key_id, {"revoked_at": row["revoked_at"]})
    return _key_of(row)


def _visible(tx: Connection, by: Principal, key_id: str) -> queries.Row:
    row = sql.key(tx, key_id, by.tenant) if is_id(key_id, "key") else None
    if row is None or row["role"] in _hidden(by):
        raise NotFound(f"there is no API key {key_id!r:.60}", key=key_id[:60])
    return row


def _hidden(by: Principal) -> tuple[Role, ...]:
    return () if by.role == "operator" else ("operator",)


def _permissions(role: str, scopes: Collection[str]) -> frozenset[Permission]:
    of_role = OF_ROLE[role]
    return of_role if not scopes else frozenset(permission for permission in of_role if permission in scopes)


def _key_of(row: rows.Row) -> ApiKey:
    same = ("id", "tenant", "name", "prefix", "role", "created_by", "created_at", "expires_at", "revoked_at", "last_used_at")
    return ApiKey(scopes=tuple(row["scopes"]), **{name: row[name] for name in same})

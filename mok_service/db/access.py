"""SQL of API keys and of the audit log."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Connection, bindparam, func, or_, select, update

from mok_service.db.queries import Key, Row, Values, add, all_rows, insert_unless_there, one_row, page
from mok_service.db.tables import api_keys, audit_entries, audit_heads
from mok_service.provenance.digest import Digest

# ---- Keys ------------------------------------------------------------------------------------------------------------

_KEY_BY_PREFIX = select(api_keys).where(api_keys.c.prefix == bindparam("prefix"))


def key_by_prefix(tx: Connection, prefix: str) -> Row | None:
    return one_row(tx, _KEY_BY_PREFIX, {"prefix": prefix})


def key(tx: Connection, key_id: str, tenant: str | None = None) -> Row | None:
    query = select(api_keys).where(api_keys.c.id == key_id)
    if tenant is not None:
        query = query.where(api_keys.c.tenant == tenant)
    return one_row(tx, query)


def key_page(tx: Connection, tenant: str, hidden_roles: Sequence[str], after: Key | None, limit: int) -> list[Row]:
    """Up to limit + 1 keys of a tenant, newest first."""
    query = select(api_keys).where(api_keys.c.tenant == tenant, api_keys.c.role.not_in(hidden_roles))
    return page(tx, query, api_keys, after, limit)


def update_key(tx: Connection, key_id: str, values: Values) -> None:
    tx.execute(update(api_keys).where(api_keys.c.id == key_id).values(**values))


def usable_key_exists(tx: Connection, now: datetime) -> bool:
    """Whether any key is neither revoked nor expired."""
    usable = (api_keys.c.revoked_at.is_(None), or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > now))
    return tx.execute(select(api_keys.c.id).where(*usable).limit(1)).first() is not None


# ---- Audit log -------------------------------------------------------------------------------------------------------

_HEAD = select(audit_heads).where(audit_heads.c.tenant == bindparam("of"))
_HEAD_LOCKED = _HEAD.with_for_update()
_MOVE_HEAD = update(audit_heads).where(audit_heads.c.tenant == bindparam("of"))


def lock_audit_head(tx: Connection, tenant: str, genesis: Digest) -> Row:
    """Length and digest of a tenant's log. Until the transaction ends nobody else appends to it."""
    found = one_row(tx, _HEAD_LOCKED, {"of": tenant})
    if found is None:  # the tenant's first entry: of two requests at once, one makes the head and the other waits for it
        insert_unless_there(tx, audit_heads, {"tenant": tenant, "length": 0, "digest": genesis})
        found = one_row(tx, _HEAD_LOCKED, {"of": tenant})
    assert found is not None, tenant
    return found


def add_audit_entry(tx: Connection, row: Values) -> None:
    """Appends an entry, and moves the head on."""
    add(tx, audit_entries, [row])
    tx.execute(_MOVE_HEAD, {"of": row["tenant"], "length": row["number"] + 1, "digest": row["digest"]})


def audit_head(tx: Connection, tenant: str) -> Row | None:
    return one_row(tx, _HEAD, {"of": tenant})


def audit_tenants(tx: Connection) -> list[str]:
    """The tenants that have a log."""
    from_entries = select(audit_entries.c.tenant).distinct()
    both = select(audit_heads.c.tenant).union(from_entries).subquery()
    return sorted(tx.execute(select(both.c.tenant)).scalars())


def audit_entries_after(tx: Connection, tenant: str, after: int, limit: int) -> list[Row]:
    t = audit_entries
    return all_rows(tx, select(t).where(t.c.tenant == tenant, t.c.number > after).order_by(t.c.number).limit(limit))


def audit_length(tx: Connection, tenant: str) -> int:
    """The number of entries that are really there."""
    query = select(func.count()).select_from(audit_entries).where(audit_entries.c.tenant == tenant)
    return int(tx.execute(query).scalar_one())

"""Verbs about API keys. They work on the database itself: who may read the data folder is its admin, and needs no key."""

from __future__ import annotations

import getpass
import secrets
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mok_service.cli.options import DATA_DIR, AsJson, DataDir, one_of

if TYPE_CHECKING:
    from mok_service.access import Principal
    from mok_service.db.session import Database

Tenant = Annotated[str, typer.Option(metavar="TENANT", help="Whose keys: 1 to 64 of a-z, 0-9 and -.")]

keys_app = typer.Typer(help="Make, list and revoke API keys.", no_args_is_help=True, rich_markup_mode=None)


def add_to(app: typer.Typer) -> None:
    """Add these verbs to the command."""
    keys_app.command(epilog="Example: mok apikey create ci --role member --tenant research --days 90")(create)
    keys_app.command("list", epilog="Example: mok apikey list --tenant research")(list_keys)
    keys_app.command(epilog="Example: mok apikey revoke key_0198c0de5e1f7000800000000000c0de --tenant research")(revoke)
    app.add_typer(keys_app, name="apikey", epilog="Example: mok apikey create me --role operator")


def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What it's for.")],
    role: Annotated[str, typer.Option(metavar="ROLE", help="viewer, member, admin or operator.")] = "member",
    tenant: Tenant = "local",
    scope: Annotated[list[str] | None, typer.Option(metavar="PERMISSION", help="Only this of what the role may do; may be "
                                                                                 "given several times.")] = None,
    days: Annotated[float | None, typer.Option(min=0.001, max=36_500, metavar="DAYS", help="Ends by itself after so long; "
                                                                                           "default: never.")] = None,
    data_dir: DataDir = DATA_DIR, as_json: AsJson = False,
) -> None:
    """Make an API key, and print it. It can't be printed again."""
    from mok_service.access import PERMISSIONS, ROLES, create_key
    from mok_service.auditlog import audited
    from mok_service.render import print_json, show

    one_of(role, ROLES, "role", "--role")
    scopes = scope or []
    for one in scopes:
        one_of(one, PERMISSIONS, "permission", "--scope")
    ends = None if days is None else datetime.now(UTC) + timedelta(days=days)
    with _database(data_dir) as db, audited(_request(db, tenant, "create")):
        made, text = create_key(db, _admin(tenant), name=name, role=role, scopes=scopes,  # type: ignore[arg-type]
                                expires_at=ends)
    if as_json:
        print_json({**made.as_dict(), "key": text})
    else:
        show(f"{made.id}  {made.role} of {made.tenant}")
        print(text)


def list_keys(tenant: Tenant = "local", data_dir: DataDir = DATA_DIR, as_json: AsJson = False) -> None:
    """List a tenant's keys, the newest first, without their texts."""
    from mok_service import access
    from mok_service.render import print_json, show

    found: list[dict[str, Any]] = []
    cursor: str | None = None
    with _database(data_dir) as db:
        while True:
            page = access.list_keys(db, _admin(tenant), cursor, 200)
            found += [key.as_dict() for key in page.items]
            cursor = page.next_cursor
            if cursor is None:
                break
    if as_json:
        print_json({"items": found})
        return
    for key in found:
        state = "revoked" if key["revoked_at"] else f"until {key['expires_at'] or 'revoked'}"
        show(f"{key['id']}  {key['prefix']}  {key['role']}  {state}, last used {key['last_used_at'] or 'never'}  {key['name']}")


def revoke(
    key: Annotated[str, typer.Argument(metavar="KEY", help="Id of a key: key_...")],
    tenant: Tenant = "local", data_dir: DataDir = DATA_DIR, as_json: AsJson = False,
) -> None:
    """End a key at once."""
    from mok_service.access import revoke_key
    from mok_service.auditlog import audited
    from mok_service.render import print_json, show

    with _database(data_dir) as db, audited(_request(db, tenant, "revoke", key=key[:100])):
        ended = revoke_key(db, _admin(tenant), key)
    if as_json:
        print_json(ended.as_dict())
    else:
        show(f"{ended.id}  revoked")


def _admin(tenant: str) -> Principal:
    from mok_service.access import OF_ROLE, Principal, check_tenant

    check_tenant(tenant)
    return Principal(tenant, "operator", OF_ROLE["operator"], f"command of {_user()}")


def _request(db: Database, tenant: str, verb: str, **ids: str) -> Any:
    from mok_service.auditlog import Request

    actor, request = f"command of {_user()}", f"cmd_{secrets.token_hex(12)}"
    return Request(db, tenant, actor, "operator", None, f"mok apikey {verb}", request, 200, dict(ids))


def _user() -> str:
    try:
        return getpass.getuser()[:60]
    except (KeyError, OSError):  # a user without a name, as in containers
        return "nobody"


def _database(data_dir: Path) -> AbstractContextManager[Database]:
    """The database of the settings, brought to this version: the first key is made before the service starts."""
    from mok_service.cli.local import open_database
    from mok_service.db.session import upgrade
    from mok_service.settings import load_settings

    settings = load_settings(data_dir=data_dir)
    settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    upgrade(settings.database())
    return open_database(data_dir)

"""Verbs about quotas: what a tenant may have at most. They work on the database itself, with or without a service."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mok_service.cli.options import DATA_DIR, AsJson, DataDir

Tenant = Annotated[str, typer.Option(metavar="NAME", help="Whose quota.")]
Limit = Annotated[str | None, typer.Option(metavar="NUMBER|none", help="The most at once; none takes the limit off.")]

quota_app = typer.Typer(help="Look at, and change, what a tenant may have at most.", no_args_is_help=True, rich_markup_mode=None)


def add_to(app: typer.Typer) -> None:
    """Add these verbs to the command."""
    quota_app.command(epilog="Example: mok quota show --tenant research")(show)
    quota_app.command("set", epilog="Example: mok quota set --tenant research --runs 4 --devices none --weight 2")(change)
    app.add_typer(quota_app, name="quota", epilog="Example: mok quota show")


def show(tenant: Tenant = "local", data_dir: DataDir = DATA_DIR, as_json: AsJson = False) -> None:
    """Print a tenant's limits, and what it has of each."""
    from mok_service.cli.local import open_database
    from mok_service.runs import get_quota

    with open_database(data_dir) as db:
        _print(get_quota(db, tenant), as_json)


def change(
    tenant: Tenant = "local", devices: Limit = None, runs: Limit = None, queued: Limit = None, checkpoint_bytes: Limit = None,
    jobs_a_day: Limit = None,
    weight: Annotated[float | None, typer.Option(metavar="NUMBER", help="Its share beside other tenants; 1 by default.")] = None,
    data_dir: DataDir = DATA_DIR, as_json: AsJson = False,
) -> None:
    """Change a tenant's limits.

    What isn't named stays. Runs that go on are left alone.
    """
    from mok_service.cli.local import open_database
    from mok_service.runs import set_quota

    given = {"devices": devices, "runs": runs, "queued": queued, "checkpoint_bytes": checkpoint_bytes, "jobs_a_day": jobs_a_day}
    changes: dict[str, Any] = {f"{name}_max": _limit(name, text) for name, text in given.items() if text is not None}
    if weight is not None:
        changes["weight"] = weight
    with open_database(data_dir) as db:
        _print(set_quota(db, tenant, changes), as_json)


def _limit(name: str, text: str) -> int | None:
    if text == "none":
        return None
    if not (text.isascii() and text.isdigit()):
        raise typer.BadParameter(f"{text!r} is no limit; allowed: a whole number, or none",
                                 param_hint=f"--{name.replace('_', '-')}")
    return int(text)


def _print(quota: Any, as_json: bool) -> None:
    from mok_service.render import print_json, quota_table, show

    if as_json:
        print_json(quota.as_dict())
    else:
        show(f"tenant {quota.tenant}")
        show(quota_table(quota.as_dict()))

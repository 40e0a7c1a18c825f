"""Verbs that run the service: serve, api, worker, db."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mok_service.cli.options import DATA_DIR, AsJson, DataDir

if TYPE_CHECKING:
    from mok_service.settings import Settings

Host = Annotated[str | None, typer.Option(metavar="ADDRESS", help="Address to listen on; default: MOK_HOST, else 127.0.0.1.")]
Port = Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one; default: MOK_PORT or 0.")]

db_app = typer.Typer(help="Look after the database.", no_args_is_help=True, rich_markup_mode=None)


def add_to(app: typer.Typer) -> None:
    """Add these verbs to the command."""
    app.command(epilog="Example: mok serve --port 8080")(serve)
    app.command(epilog="Example: MOK_DATABASE_URL=postgresql://mok@db/mok mok api --port 8080")(api)
    app.command(epilog="Example: MOK_DATABASE_URL=postgresql://mok@db/mok mok worker")(worker)
    db_app.command(epilog="Example: mok db upgrade")(upgrade)
    db_app.command(epilog="Example: mok db check")(check)
    app.add_typer(db_app, name="db", epilog="Example: mok db check")


def serve(host: Host = None, port: Port = None, data_dir: DataDir = DATA_DIR) -> None:
    """Run the whole service on this machine.

    API, web page, scheduler and workers, on the embedded database, until Ctrl-C.
    """
    from mok_workers.serve import serve as run_service

    raise typer.Exit(run_service(_settings(data_dir, host, port), "mok_api:create_app"))


def api(host: Host = None, port: Port = None, data_dir: DataDir = DATA_DIR) -> None:
    """Run an API process alone.

    Any number of them may serve one database.
    """
    from mok_api.server import run_api
    from mok_workers.serve import refuse_other_hosts

    settings = _settings(data_dir, host, port)
    refuse_other_hosts(settings.host)
    raise typer.Exit(run_api(settings))


def worker(data_dir: DataDir = DATA_DIR) -> None:
    """Run a scheduler with its workers alone.

    APIs elsewhere serve the same database.
    """
    from mok_workers.serve import work

    raise typer.Exit(work(_settings(data_dir)))


def upgrade(data_dir: DataDir = DATA_DIR, as_json: AsJson = False) -> None:
    """Bring the database to this version.

    Creates it if there is none. Of several processes one does it, and the others wait.
    """
    from mok_service.db.session import upgrade as upgrade_database

    settings = _settings(data_dir)
    upgrade_database(settings.database())
    _tell(settings, as_json)


def check(data_dir: DataDir = DATA_DIR, as_json: AsJson = False) -> None:
    """Say whether the database is this version's.

    Changes nothing. Exits 1 if it isn't, 6 if there is none.
    """
    from mok_service.cli.local import open_local

    settings = _settings(data_dir)
    with open_local(data_dir):
        _tell(settings, as_json)


def _settings(data_dir: Path, host: str | None = None, port: int | None = None) -> Settings:
    from mok_service.settings import load_settings

    given: dict[str, Any] = {"data_dir": data_dir, "host": host, "port": port}
    return load_settings(**{name: value for name, value in given.items() if value is not None})


def _tell(settings: Settings, as_json: bool) -> None:
    from mok_service.db.session import parse_url
    from mok_service.render import print_json, show

    shown = parse_url(settings.database()).render_as_string(hide_password=True)
    if as_json:
        print_json({"database": shown, "schema": "current"})
    else:
        show(f"{shown} has this version's schema")

"""Verbs that run the service: serve, api, worker."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mok_service.cli.options import DATA_DIR, DataDir, given

if TYPE_CHECKING:
    from mok_service.settings import Settings

Host = Annotated[str | None, typer.Option(metavar="ADDRESS", help="Address to listen on; default: MOK_HOST, else 127.0.0.1.")]
Port = Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one; default: MOK_PORT or 0.")]


def add_to(app: typer.Typer) -> None:
    """Add these verbs to the command."""
    app.command(epilog="Example: mok serve --port 8080")(serve)
    app.command(epilog="Example: MOK_DATABASE_URL=postgresql://mok@db/mok mok api --port 8080")(api)
    app.command(epilog="Example: MOK_DATABASE_URL=postgresql://mok@db/mok mok worker")(worker)


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

    raise typer.Exit(run_api(_settings(data_dir, host, port)))


def worker(data_dir: DataDir = DATA_DIR) -> None:
    """Run a scheduler with its workers alone.

    APIs elsewhere serve the same database.
    """
    from mok_workers.serve import work

    raise typer.Exit(work(_settings(data_dir)))


def _settings(data_dir: Path, host: str | None = None, port: int | None = None) -> Settings:
    from mok_service.access import refuse_without_database
    from mok_service.settings import load_settings

    settings = load_settings(**given(data_dir=data_dir, host=host, port=port))
    refuse_without_database(settings)
    return settings

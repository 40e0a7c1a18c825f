"""The options that verbs share, and how a verb reaches the service."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mok_service.cli.local import Local
    from mok_service.client import Client
    from mok_service.settings import Settings

Url = Annotated[str | None, typer.Option("--url", envvar="MOK_URL", show_envvar=True, metavar="URL",
                                         help="Address of the service; default: that of the one that holds the data folder.")]
DataDir = Annotated[Path, typer.Option("--data-dir", envvar="MOK_DATA_DIR", show_envvar=True, metavar="FOLDER",
                                       help="The embedded service's folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Id of a run; latest for the newest that trains.")]
KeyFile = Annotated[Path | None, typer.Option("--key", metavar="FILE", help="Public keys that you trust, in PEM; "
                                                                            "`mok keys export` writes such a file.")]
DATA_DIR = Path(".mok")


@contextmanager
def service(url: str | None, data_dir: Path) -> Iterator[Client]:
    """A running service. Raises ServiceUnreachable when there is none."""
    from mok_service.client import Client, find_url
    from mok_service.errors import ServiceUnreachable

    found = find_url(url, data_dir)
    if found is None:
        raise ServiceUnreachable(f"no service holds the data folder {data_dir}; `mok serve` starts one, --url names another")
    with Client(found, api_key=own_key()) as client:
        yield client


@contextmanager
def reader(url: str | None, data_dir: Path) -> Iterator[Client | Local]:
    """A running service; where none holds the data folder, what the folder has, opened for reading only."""
    from mok_service.client import Client, find_url

    found = find_url(url, data_dir)
    if found is not None:
        with Client(found, api_key=own_key()) as client:
            yield client
        return
    from mok_service.cli.local import open_local

    with open_local(data_dir) as local:
        yield local


def own_key() -> str | None:
    """The key in MOK_API_KEY. It has no option: other users of a machine see a command's arguments."""
    return os.environ.get("MOK_API_KEY") or None


def run_id(source: Client | Local, text: str) -> str:
    """The id that a RUN argument stands for: `latest` is the newest run that trains, and no audit or bisect of one.

    Raises NotFound for `latest` where there are no such runs.
    """
    from mok_service.errors import NotFound
    from mok_service.lifecycle import CHAINED

    if text != "latest":
        return text
    found = [run for kind in CHAINED for run in source.runs(kind=kind, limit=1)["items"]]
    if not found:
        raise NotFound("there are no runs yet")
    return str(max(found, key=lambda run: (run["created_at"], run["id"]))["id"])


def point_in_time(text: str | None, option: str) -> datetime | None:
    """The time that an option names: a date or a time (without a zone this machine's), or 90m, 12h, 7d ago."""
    if text is None:
        return None
    try:
        ago = re.fullmatch(r"([0-9]{1,6})([mhd])", text)
        if ago is None:
            return datetime.fromisoformat(text).astimezone(UTC)
        unit = {"m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1)}[ago[2]]
        return datetime.now(UTC) - int(ago[1]) * unit
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is no time; allowed: 2026-12-01, 2026-12-01T10:00, or 90m, 12h, 7d ago",
                                 param_hint=option) from None


def one_of(value: str | None, allowed: Collection[str], kind: str, option: str) -> None:
    """Raises BadParameter for a value of an option that isn't allowed; none is."""
    if value is not None and value not in allowed:
        raise typer.BadParameter(f"{value!r} is no {kind}; allowed: {', '.join(allowed)}", param_hint=option)


def given(**keys: Any) -> dict[str, Any]:
    """The keys that have a value."""
    return {name: value for name, value in keys.items() if value is not None}


def data_roots(folders: Sequence[Path] | None, settings: Settings) -> list[Path]:
    """Where data files lie: the folders that an option names, else the settings', else the working folder."""
    return list(folders or settings.data_roots or [Path.cwd()])

"""Verbs about the database: upgrade, current, check, backup, restore. They work on the database itself, with or without a
service."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mok_service.cli.options import DATA_DIR, AsJson, DataDir

if TYPE_CHECKING:
    from mok_service.settings import Settings

BackupFile = Annotated[Path, typer.Argument(metavar="FILE", help="The backup.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there.")]

db_app = typer.Typer(help="Look after the database.", no_args_is_help=True, rich_markup_mode=None)


def add_to(app: typer.Typer) -> None:
    """Add these verbs to the command."""
    db_app.command(epilog="Example: mok db upgrade")(upgrade)
    db_app.command(epilog="Example: mok db current")(current)
    db_app.command(epilog="Example: mok db check")(check)
    db_app.command(epilog="Example: mok db backup /backups/mok-2026-12-02.db")(backup)
    db_app.command(epilog="Example: mok db restore /backups/mok-2026-12-02.db --force")(restore)
    app.add_typer(db_app, name="db", epilog="Example: mok db check")


def upgrade(data_dir: DataDir = DATA_DIR, as_json: AsJson = False) -> None:
    """Bring the database to this version.

    Creates it if there is none. Of several processes one does it, and the others wait.
    """
    from mok_service.db.session import upgrade as upgrade_database

    settings = _settings(data_dir)
    upgrade_database(settings.database())
    _tell(f"{_shown(settings)} has this version's schema", {"database": _shown(settings), "schema": "current"}, as_json)


def current(data_dir: DataDir = DATA_DIR, as_json: AsJson = False) -> None:
    """Print the revision of the database's schema, and the one that this version needs.

    Exits 0 if they are the same, 1 if not, 6 if there is no database.
    """
    from mok_service.db.backup import revision_of
    from mok_service.db.session import head_revision

    settings = _settings(data_dir)
    _must_exist(settings)
    found, wanted = revision_of(settings.database()), head_revision()
    _tell(f"{_shown(settings)} has schema {found or 'none'}; this version needs {wanted}",
          {"database": _shown(settings), "schema": found, "wanted": wanted}, as_json)
    raise typer.Exit(0 if found == wanted else 1)


def check(data_dir: DataDir = DATA_DIR, as_json: AsJson = False) -> None:
    """Check the whole database: its file, schema, chains, events, logs, and that checkpoints' files are there.

    Changes nothing, and may run beside the service. Exits 4 if anything is wrong, 1 for another version's schema, 6 if there is
    no database.
    """
    from mok_service.cli.local import open_database
    from mok_service.integrity import inspect

    settings = _settings(data_dir)
    _must_exist(settings)
    with open_database(data_dir, read_only=True) as db:
        seen = inspect(db, settings.checkpoints)
    lines = [f"{fault.of}: {fault.message}" for fault in seen.faults]
    lines.append(f"{_shown(settings)} has this version's schema, {len(seen.faults)} faults in {seen.runs} runs, "
                 f"{seen.step_records} step records, {seen.checkpoints} checkpoints, {seen.log_entries} entries of the log and "
                 f"{seen.audit_logs} audit logs")
    _tell("\n".join(lines), {"database": _shown(settings), "schema": "current", **seen.as_dict()}, as_json)
    raise typer.Exit(4 if seen.faults else 0)


def backup(file: BackupFile, force: Force = False, data_dir: DataDir = DATA_DIR, as_json: AsJson = False) -> None:
    """Write a backup of the database to a file.

    The service may go on. Checkpoints and the signing key are files of their own: back up their folders too.
    """
    from mok_service.db.backup import backup as make

    settings = _settings(data_dir)
    _must_exist(settings)
    size = make(settings.database(), file, force=force)
    _tell(f"{file}: {size:,} bytes of {_shown(settings)}",
          {"database": _shown(settings), "file": str(file), "bytes": size}, as_json)


def restore(file: BackupFile, force: Force = False, data_dir: DataDir = DATA_DIR, as_json: AsJson = False) -> None:
    """Put a backup in the place of the database; then bring it to this version with `mok db upgrade`, or start the service.

    Stop every service first. It happens as a whole or not at all.
    """
    from mok_service.db.backup import restore as put_back
    from mok_service.db.session import parse_url
    from mok_workers.serve import lock_folder

    settings = _settings(data_dir)
    with ExitStack() as stack:
        if parse_url(settings.database()).get_backend_name() == "sqlite":  # the folder's service would go on with the old one
            stack.enter_context(lock_folder(settings.data_dir))
        revision = put_back(settings.database(), file, force=force)
    _tell(f"{_shown(settings)} is that of {file}, with schema {revision}",
          {"database": _shown(settings), "file": str(file), "schema": revision}, as_json)


def _settings(data_dir: Path) -> Settings:
    from mok_service.settings import load_settings

    return load_settings(data_dir=data_dir)


def _must_exist(settings: Settings) -> None:
    from mok_service.cli.local import missing_file
    from mok_service.errors import NotFound

    missing = missing_file(settings)
    if missing is not None:
        raise NotFound(f"there is no database {missing}; `mok db upgrade` makes one", database=missing)


def _shown(settings: Settings) -> str:
    from mok_service.db.session import parse_url

    return parse_url(settings.database()).render_as_string(hide_password=True)


def _tell(text: str, value: dict[str, Any], as_json: bool) -> None:
    from mok_service.render import print_json, show

    if as_json:
        print_json(value)
    else:
        show(text)

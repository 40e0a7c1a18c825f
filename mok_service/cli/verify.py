"""Verbs that judge: verify, provenance."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mok_service.cli.options import DATA_DIR, AsJson, DataDir, RunArgument, Url, reader, run_id, service

if TYPE_CHECKING:
    from mok_service.cli.local import Local
    from mok_service.client import Client


class Level(StrEnum):
    """How much is verified."""

    CHECK = "check"
    RERUN = "rerun"


def add_to(app: typer.Typer) -> None:
    """Add these verbs to the command."""
    app.command(epilog="Example: mok verify latest --level rerun")(verify)
    app.command(epilog="Example: mok provenance latest --json > record.json")(provenance)


def verify(
    run: RunArgument,
    level: Annotated[Level, typer.Option(help="check: the record's links, and every checkpoint's bytes against their digests. "
                                              "rerun: train all of it again, and compare each step.")] = Level.CHECK,
    url: Url = None, data_dir: DataDir = DATA_DIR, as_json: AsJson = False,
) -> None:
    """Judge a run. Exits 0 for INTACT or REPRODUCED, 3 for DIVERGED, 4 for TAMPERED, 5 for INCONCLUSIVE."""
    from mok_service.cli.following import exit_for_verdict, follow, tell_verdict

    if level is Level.CHECK:
        with reader(url, data_dir) as source:
            found = run_id(source, run)
            tell_verdict({"run": found, "level": level.value, **check(source, found, source.provenance(found))}, as_json)
        return
    with service(url, data_dir) as client:
        original = client.run(run_id(client, run))
        made = client.create_run(original["job"], reproduces=original["id"])
        exit_for_verdict(client, follow(client, made, quiet=as_json), as_json)


def provenance(
    run: RunArgument,
    verify_it: Annotated[bool, typer.Option("--verify", help="Judge it too: verify at level check.")] = False,
    url: Url = None, data_dir: DataDir = DATA_DIR, as_json: AsJson = False,
) -> None:
    """Print a run's record.

    What was asked, what ran it where, and every step's digests: in short, or with --json whole.
    """
    from mok_service import render
    from mok_service.cli.following import tell_verdict

    with reader(url, data_dir) as source:
        found = run_id(source, run)
        record = source.provenance(found)
        verdict = {"run": found, "level": "check", **check(source, found, record)} if verify_it else None
    if as_json:
        render.print_json(record if verdict is None else {"record": record, "verification": verdict})
    else:
        render.show(render.record_table(record))
    if verdict is not None:
        tell_verdict(verdict, as_json, quiet=as_json)


def check(source: Client | Local, run: str, record: dict[str, Any]) -> dict[str, Any]:
    """Level check, by this program itself: the service's word isn't taken for anything."""
    from mok_service.provenance.measure import measure
    from mok_service.provenance.verify import check as check_record

    found = measure(record, lambda step, name: source.checkpoint_file(run, step, name))
    return check_record(record, found).as_dict()

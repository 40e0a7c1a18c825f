"""Verbs about checkpoints: list, rm."""

from __future__ import annotations

from typing import Annotated

import typer

from mok_service.cli.options import DATA_DIR, AsJson, DataDir, RunArgument, Url, reader, run_id, service

checkpoints_app = typer.Typer(help="List and delete a run's checkpoints.", no_args_is_help=True, rich_markup_mode=None)


def add_to(app: typer.Typer) -> None:
    """Add these verbs to the command."""
    checkpoints_app.command("list", epilog="Example: mok checkpoints list latest")(list_checkpoints)
    checkpoints_app.command(epilog="Example: mok checkpoints rm RUN 20 40; or mok checkpoints rm RUN --but-last")(rm)
    app.add_typer(checkpoints_app, name="checkpoints", epilog="Example: mok checkpoints list latest")


def list_checkpoints(run: RunArgument, url: Url = None, data_dir: DataDir = DATA_DIR, as_json: AsJson = False) -> None:
    """List a run's checkpoints: step, bytes, digest of the weights."""
    from mok_service import render

    with reader(url, data_dir) as source:
        found = source.checkpoints(run_id(source, run))
    if as_json:
        render.print_json({"items": found})
        return
    for checkpoint in found:
        gone = "  deleted" if checkpoint["deleted_at"] else ""
        render.show(f"step {checkpoint['step']}  {checkpoint['size']:,} bytes  {checkpoint['state']['weights']}{gone}")


def rm(
    run: RunArgument,
    steps: Annotated[list[int] | None, typer.Argument(metavar="STEP...", min=0, help="The steps whose checkpoints go.")] = None,
    but_last: Annotated[bool, typer.Option("--but-last", help="All but the last one's: the weights that were trained.")] = False,
    url: Url = None, data_dir: DataDir = DATA_DIR, as_json: AsJson = False,
) -> None:
    """Delete checkpoints of a run that has ended.

    Their bytes go for good. Their digests stay on record, so the run can still be verified by a check or a rerun; an audit has
    longer segments then. Refused while something that hasn't ended may need them.
    """
    from mok_service import render

    if bool(steps) == but_last:
        raise typer.BadParameter("name steps, or give --but-last; allowed: one of the two")
    with service(url, data_dir) as client:
        found = run_id(client, run)
        if but_last:
            steps = [checkpoint["step"] for checkpoint in client.checkpoints(found) if not checkpoint["deleted_at"]][:-1]
        deleted = [client.delete_checkpoint(found, step) for step in steps or ()]
    if as_json:
        render.print_json({"items": deleted})
    else:
        render.show(f"{found}: {len(deleted)} checkpoints deleted, {sum(checkpoint['size'] for checkpoint in deleted):,} bytes")

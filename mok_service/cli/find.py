"""The verb find: what produced or used a digest."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mok_service.cli.options import DATA_DIR, AsJson, DataDir, Url, reader


def add_to(app: typer.Typer) -> None:
    """Add this verb to the command."""
    app.command(epilog="Example: mok find sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")(find)


def find(
    digest: Annotated[str, typer.Argument(metavar="DIGEST", help="sha256: and 64 hex digits, or the digits alone.")],
    url: Url = None, data_dir: DataDir = DATA_DIR, as_json: AsJson = False,
) -> None:
    """Say what produced or used a digest.

    Of weights, optimizer state, a step record, a file of a checkpoint or of the data, a spec, a library, an attestation of a
    run or a verdict.

    Exits 6 when nothing here did.
    """
    from mok_service import render

    with reader(url, data_dir) as source:
        found = source.find_digest(digest)
    if as_json:
        render.print_json(found)
    else:
        for use in found["items"]:
            render.show(_line(use))
        if found["truncated"]:
            render.show("and more; mok runs --digest and mok jobs --digest have pages")
    if not found["items"]:
        if not as_json:
            render.show(f"{found['digest']} was neither produced nor used here")
        raise typer.Exit(6)


def _line(use: dict[str, Any]) -> str:
    step = "" if use["step"] is None else f"  step {use['step']}"
    where = [found for found in (use["run"] or use["job"], use["name"]) if found is not None]
    return f"{use['relation']:8}  {use['role']:20}  {where[0]}{step}{''.join(f'  {name}' for name in where[1:])}"

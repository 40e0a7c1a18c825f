"""Verbs about what is signed: export, keys, log."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from mok_service.cli.options import DATA_DIR, AsJson, DataDir, KeyFile, RunArgument, Url, reader, run_id

if TYPE_CHECKING:
    from mok_service.cli.local import Local
    from mok_service.client import Client
    from mok_service.provenance.keys import PublicKey

SIGNED_SECONDS_MAX: Final = 10.0
SIGNED_POLL_SECONDS: Final = 0.1

Format = Literal["folder", "mlflow", "openlineage", "ro-crate", "model-card"]

keys_app = typer.Typer(help="The service's public keys.", no_args_is_help=True, rich_markup_mode=None)
log_app = typer.Typer(help="The append-only log of attestations.", no_args_is_help=True, rich_markup_mode=None)


def add_to(app: typer.Typer) -> None:
    """Add these verbs to the command."""
    app.command(epilog="Example: mok export latest --to /tmp/run")(export)
    keys_app.command(epilog="Example: mok keys show")(show)
    keys_app.command("export", epilog="Example: mok keys export trusted.pem")(export_keys)
    app.add_typer(keys_app, name="keys", epilog="Example: mok keys show")
    log_app.command(epilog="Example: mok log verify --key trusted.pem")(verify)
    app.add_typer(log_app, name="log", epilog="Example: mok log verify")


def export(
    run: RunArgument,
    to: Annotated[str, typer.Option("--to", metavar="PLACE", help="A folder that isn't there yet or is empty (folder, ro-crate), "
                                    "a new file (model-card, openlineage), a URL (openlineage), a tracking URI (mlflow).")],
    form: Annotated[Format, typer.Option("--format", metavar="folder|mlflow|openlineage|ro-crate|model-card",
                                         help="What for; all but folder need an extra.")] = "folder",
    url: Url = None, data_dir: DataDir = DATA_DIR, as_json: AsJson = False,
) -> None:
    """Write a run into a folder, or in the form of another tool.

    Record, attestation, proof that the log has it, and checkpoints: `mok verify FOLDER` needs neither service nor database.
    """
    from mok_service import render

    with reader(url, data_dir) as source:
        found = run_id(source, run)
        if form != "folder":
            _export_as(source, found, form, to, as_json)
            return
        from mok_service.export import write_export

        _wait_until_signed(source, found)
        manifest = write_export(source, found, Path(to))
    if as_json:
        render.print_json(manifest)
    else:
        size = sum(file["size"] for file in manifest["files"])
        render.show(f"{manifest['run']}: {len(manifest['files'])} files, {size} bytes in {to}")


def _wait_until_signed(source: Client | Local, run: str) -> None:
    """A run that has only just ended isn't signed yet: a service does it soon after. One that isn't in time is refused later."""
    from mok_service.client import Client
    from mok_service.errors import NotFound
    from mok_service.lifecycle import FINAL, UNCHAINED

    shown = source.run(run)
    if not isinstance(source, Client) or shown["status"] not in FINAL or shown["kind"] in UNCHAINED:
        return
    for _ in range(round(SIGNED_SECONDS_MAX / SIGNED_POLL_SECONDS)):
        try:
            source.attestation(run)
            return
        except NotFound:
            time.sleep(SIGNED_POLL_SECONDS)


def _export_as(source: Client | Local, run: str, form: Format, to: str, as_json: bool) -> None:
    from mok_service import render
    from mok_service.exporters import export_as

    written = export_as(source, run, form, to)
    if as_json:
        render.print_json(written)
    else:
        facts = {name.replace("_", " "): value for name, value in written.items() if name not in ("run", "format", "to")}
        more = "".join(f", {name} {value}" for name, value in facts.items())
        render.show(f"{run}: {form} to {written['to']}{more}")


def show(url: Url = None, data_dir: DataDir = DATA_DIR, as_json: AsJson = False) -> None:
    """Print the public keys that have signed here, with their ids."""
    from mok_service import render

    with reader(url, data_dir) as source:
        found = source.signing_keys()
    if as_json:
        render.print_json({"items": found})
        return
    for key in found:
        render.show(f"{key['id']}  since {key['at']}\n{key['pem'].rstrip()}")


def export_keys(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to; it must not be there yet.")],
    url: Url = None, data_dir: DataDir = DATA_DIR, as_json: AsJson = False,
) -> None:
    """Write the service's public keys to a file, to be given as --key to who shall trust them."""
    from mok_service import render
    from mok_service.errors import Conflict, NotFound

    with reader(url, data_dir) as source:
        found = source.signing_keys()
    if not found:
        raise NotFound("no key has signed here yet")
    try:
        with file.open("x") as stream:
            stream.write("".join(key["pem"] for key in found))
    except FileExistsError:
        raise Conflict(f"{file} is there already", file=str(file)) from None
    if as_json:
        render.print_json({"file": str(file), "keys": [key["id"] for key in found]})
    else:
        render.show(f"{file}: " + ", ".join(key["id"] for key in found))


def verify(key: KeyFile = None, url: Url = None, data_dir: DataDir = DATA_DIR, as_json: AsJson = False) -> None:
    """Check the whole log.

    All entries against the signed head, and that the log seen last by this user from this service is its beginning. Exits 0 for
    INTACT, 4 for TAMPERED, 5 for INCONCLUSIVE.
    """
    from mok_service.cli.following import tell_verdict
    from mok_service.cli.seen import remember, seen_at, seen_file
    from mok_service.errors import NotFound
    from mok_service.provenance.attested import check_log
    from mok_service.provenance.verify import Finding

    place = seen_file(url, data_dir)
    seen = seen_at(place)
    with reader(url, data_dir) as source:
        try:
            head = source.log_head()
        except NotFound:
            if seen is None:
                raise
            finding = Finding("TAMPERED", "the log is empty, and had entries when it was seen last", "log.size")
        else:
            finding = check_log(head, source.log_entries(), trusted_keys(source, key), seen)
            if finding.verdict == "INTACT":
                remember(place, head)
    tell_verdict(finding.as_dict(), as_json)


def trusted_keys(source: Client | Local, file: Path | None) -> dict[str, PublicKey]:
    """The keys in the file; without one those that the service says are its own."""
    from mok_service.provenance.keys import public_keys, public_keys_of

    if file is not None:
        return public_keys(file)
    own = "".join(key["pem"] for key in source.signing_keys())
    return public_keys_of(own, "the service's list of keys") if own else {}

"""Verbs that judge: verify, provenance."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mok_service.cli.options import (
    DATA_DIR,
    AsJson,
    DataDir,
    KeyFile,
    RunArgument,
    Url,
    data_roots,
    given,
    reader,
    run_id,
    service,
)

if TYPE_CHECKING:
    from mok_service.cli.local import Local
    from mok_service.client import Client
    from mok_service.provenance.verify import Finding


class Level(StrEnum):
    """How much is verified."""

    CHECK = "check"
    AUDIT = "audit"
    RERUN = "rerun"
    BISECT = "bisect"


def add_to(app: typer.Typer) -> None:
    """Add these verbs to the command."""
    app.command(epilog="Example: mok verify latest --level audit --segments 4")(verify)
    app.command(epilog="Example: mok provenance latest --json > record.json")(provenance)


def verify(
    run: Annotated[str, typer.Argument(metavar="RUN|FOLDER", help="Id of a run; latest for the newest; or a folder that "
                                                                  "`mok export` wrote, which is verified by itself, here.")],
    level: Annotated[Level, typer.Option(help="check: the record's links, every checkpoint's bytes against their digests, the "
                                              "attestation and its place in the log. audit: compute drawn segments between "
                                              "checkpoints again. rerun: compute all of it again. bisect: find where it "
                                              "and --against, or a replay, come apart.")] = Level.CHECK,
    segments: Annotated[int | None, typer.Option(min=1, help="audit: how many segments; default: 4, or all.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="audit: what they are drawn by; default: a new "
                                                                    "one.")] = None,
    device: Annotated[str | None, typer.Option(metavar="cpu|cuda", help="audit, rerun, bisect: another kind of device.")] = None,
    threads: Annotated[int | None, typer.Option(min=0, help="audit, rerun, bisect: CPU threads; 0 for all.")] = None,
    against: Annotated[str | None, typer.Option(metavar="RUN", help="bisect: another run of its job; default: a replay.")] = None,
    against_device: Annotated[str | None, typer.Option(metavar="cpu|cuda", help="bisect: the device of the other side.")] = None,
    against_threads: Annotated[int | None, typer.Option(min=0, help="bisect: CPU threads of the other side.")] = None,
    data: Annotated[list[Path] | None, typer.Option("--data", metavar="FOLDER", help="Where data files lie, to audit or rerun an "
                                                    "exported run; default: MOK_DATA_ROOTS, else the working folder.")] = None,
    key: KeyFile = None,
    url: Url = None, data_dir: DataDir = DATA_DIR, as_json: AsJson = False,
) -> None:
    """Judge a run, or an exported one.

    A signature counts by the keys in --key; for a run without --key, by those of the service itself; for a folder without --key
    by none, so that nothing is concluded. Exits 0 for INTACT, AUDITED or REPRODUCED, 3 for DIVERGED, 4 for TAMPERED, 5 for
    INCONCLUSIVE, 1 when an audit, rerun or bisect failed or was cancelled. (`mok bisect` bisects on this machine.)
    """
    from mok_service.cli.following import exit_for_verification, follow_verification, tell_verdict

    execution, theirs = given(device=device, threads=threads), given(device=against_device, threads=against_threads)
    _refuse_what_does_not_go_together(level, segments is not None or seed is not None, bool(execution))
    if level is not Level.BISECT and (against is not None or theirs):
        raise typer.BadParameter("--against and the like go with --level bisect", param_hint="--level")
    if is_folder(run):
        if level is Level.BISECT:
            raise typer.BadParameter(f"{run} is a folder; `mok bisect` takes folders", param_hint="--level")
        if level is Level.CHECK:
            tell_verdict({"folder": run, "level": level.value, **check_folder(Path(run), key)}, as_json)
        else:
            again: Literal["audit", "rerun"] = "audit" if level is Level.AUDIT else "rerun"
            outcome = compute_folder(Path(run), key, again, segments, seed, execution, data or [], as_json)
            tell_verdict({"folder": run, "level": level.value, **outcome}, as_json)
        return
    if level is Level.CHECK:
        with reader(url, data_dir) as source:
            found = run_id(source, run)
            tell_verdict({"run": found, "level": level.value, **check(source, found, source.provenance(found), key)}, as_json)
        return
    with service(url, data_dir) as client:
        other = None if against is None else run_id(client, against)
        asked = client.verify(run_id(client, run), level.value, segments=segments, seed=seed, against=other,
                              execution=execution or None, against_execution=theirs or None)
        exit_for_verification(follow_verification(client, asked, quiet=as_json), as_json)


def _refuse_what_does_not_go_together(level: Level, drawing: bool, executing: bool) -> None:
    if drawing and level is not Level.AUDIT:
        raise typer.BadParameter("--segments and --seed go with --level audit", param_hint="--level")
    if executing and level is Level.CHECK:
        raise typer.BadParameter("--device and --threads go with --level audit, rerun or bisect", param_hint="--level")


def compute_folder(folder: Path, key: Path | None, level: Literal["audit", "rerun"], segments: int | None, seed: int | None,
                   execution: dict[str, Any], folders: list[Path], as_json: bool) -> dict[str, Any]:
    """Audit or rerun of an exported run on this machine, by its files, the trusted keys and the data alone."""
    from mok_service.provenance.chain import StepRecord
    from mok_service.provenance.keys import public_keys
    from mok_service.render import StepProgress
    from mok_service.settings import load_settings
    from mok_service.training.offline import verify_folder
    from mok_service.training.sources import Sources

    settings = load_settings()
    roots = data_roots(folders, settings)
    trusted = {} if key is None else public_keys(key)
    with StepProgress(f"{level} of {folder}", 1, quiet=as_json) as progress:
        def told(record: StepRecord, done: int, of: int) -> None:
            progress.of(of)
            progress.step(done, record.loss, record.tokens, record.seconds)

        outcome = verify_folder(folder, trusted, level, segments=segments, seed=seed, execution=execution, data_roots=roots,
                                sources=Sources.of(settings), told=told)
    return outcome.as_dict()


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


def check(source: Client | Local, run: str, record: dict[str, Any], key: Path | None = None) -> dict[str, Any]:
    """Level check, by this program itself: the service's word is taken for nothing but, without a key file, its own keys."""
    from mok_service.provenance.attested import worst
    from mok_service.provenance.measure import measure
    from mok_service.provenance.verify import check as check_record

    found = measure(record, lambda step, name: source.checkpoint_file(run, step, name))
    return worst([check_record(record, found), *_attested(source, run, record, key)]).as_dict()


def _attested(source: Client | Local, run: str, record: dict[str, Any], key: Path | None) -> list[Finding]:
    """The verdict on the run's attestation; none when there is no attestation and no key file that asks for one."""
    from mok_service.cli.proof import trusted_keys
    from mok_service.errors import NotFound, Tampered
    from mok_service.export import evidence_of
    from mok_service.provenance.attested import check_attestation
    from mok_service.provenance.verify import Finding

    trusted = trusted_keys(source, key)
    try:
        return [check_attestation(record, evidence_of(source, run), trusted)]
    except NotFound as missing:
        return [] if key is None else [Finding("INCONCLUSIVE", missing.message, "attestation")]
    except Tampered as fault:
        return [Finding.tampered(fault, "attestation")]


def is_folder(text: str) -> bool:
    """Whether a RUN|FOLDER argument means a folder: a run's id never does, unless it's written as a path."""
    named_run = text == "latest" or text.startswith("run_")
    return not named_run and Path(text).is_dir()


def check_folder(folder: Path, key: Path | None) -> dict[str, Any]:
    """Level check of an exported run, by its files and the trusted keys alone."""
    from mok_service.export import verify_export
    from mok_service.provenance.keys import public_keys

    return verify_export(folder, {} if key is None else public_keys(key)).as_dict()

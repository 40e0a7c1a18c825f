"""Verbs about runs: runs, show, logs, watch, diff, cancel, pause, resume."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from mok_service.cli.options import DATA_DIR, AsJson, DataDir, RunArgument, Url, one_of, point_in_time, reader, run_id, service


def add_to(app: typer.Typer) -> None:
    """Add these verbs to the command."""
    app.command("runs", epilog="Example: mok runs --status running")(list_runs)
    app.command(epilog="Example: mok show latest")(show)
    app.command(epilog="Example: mok logs latest")(logs)
    app.command(epilog="Example: mok watch latest")(watch)
    app.command(epilog="Example: mok diff RUN1 RUN2")(diff)
    app.command(epilog="Example: mok cancel RUN")(cancel)
    app.command(epilog="Example: mok pause RUN")(pause)
    app.command(epilog="Example: mok resume RUN")(resume)


def list_runs(
    status: Annotated[str | None, typer.Option(metavar="STATUS", help="Only runs in this state.")] = None,
    job: Annotated[str | None, typer.Option(metavar="JOB", help="Only runs of this job.")] = None,
    digest: Annotated[str | None, typer.Option(metavar="DIGEST", help="Only runs that produced or used this digest.")] = None,
    kind: Annotated[str | None, typer.Option(metavar="KIND", help="Only original, reproduction, audit or bisect.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Only runs of jobs of this name.")] = None,
    model: Annotated[str | None, typer.Option(metavar="PRESET", help="Only models with the sizes of this preset.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=2**63 - 1, help="Only runs with this seed.")] = None,
    parent: Annotated[str | None, typer.Option(metavar="RUN", help="Only reproductions of this run, and runs that started from "
                                                                    "its weights.")] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="Only runs made then or later: 2026-12-01, "
                                              "2026-12-01T10:00, or 90m, 12h, 7d ago.")] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Only runs made before then.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200, help="How many; the newest first.")] = 20,
    cursor: Annotated[str | None, typer.Option(metavar="CURSOR", help="Go on after the page that gave this cursor.")] = None,
    url: Url = None, data_dir: DataDir = DATA_DIR, as_json: AsJson = False,
) -> None:
    """List runs, the newest first."""
    from mok_service import render
    from mok_service.lifecycle import STATUSES
    from mok_service.runs.types import RUN_KINDS
    from mok_service.spec import PRESETS

    one_of(status, STATUSES, "state", "--status")
    one_of(kind, RUN_KINDS, "kind", "--kind")
    one_of(model, PRESETS, "preset", "--model")
    times = {"since": point_in_time(since, "--since"), "until": point_in_time(until, "--until")}
    with reader(url, data_dir) as source:
        page = source.runs(status=status, job=job, digest=digest, kind=kind, name=name, model=model, seed=seed,
                           parent=None if parent is None else run_id(source, parent), limit=limit, cursor=cursor, **times)
    if as_json:
        render.print_json(page)
    else:
        render.show(render.runs_table(page["items"]))


def show(run: RunArgument, url: Url = None, data_dir: DataDir = DATA_DIR, as_json: AsJson = False) -> None:
    """Show one run: state, digests, attestation, verifications."""
    from mok_service import render
    from mok_service.errors import NotFound

    with reader(url, data_dir) as source:
        found = source.run(run_id(source, run))
        job, verdicts = source.job(found["job"]), source.verifications(found["id"])
        try:
            attestation = source.attestation(found["id"])
        except NotFound:
            attestation = None
    if as_json:
        render.print_json({"run": found, "job": job, "verifications": verdicts, "attestation": attestation})
    else:
        render.show(render.run_table(found, job, verdicts, attestation))


def logs(run: RunArgument, url: Url = None, data_dir: DataDir = DATA_DIR, as_json: AsJson = False) -> None:
    """Print what a run's attempts logged."""
    from mok_service import render

    with reader(url, data_dir) as source:
        lines = source.logs(run_id(source, run))
    if as_json:
        render.print_json({"items": lines})
        return
    for line in render.logs_text(lines):
        print(line)


def watch(run: RunArgument, url: Url = None, data_dir: DataDir = DATA_DIR, as_json: AsJson = False) -> None:
    """Follow a run to its end. Exits 1 when it failed or was cancelled."""
    from mok_service.cli.following import exit_for_run, follow

    with service(url, data_dir) as client:
        exit_for_run(follow(client, client.run(run_id(client, run)), quiet=as_json), as_json)


def diff(
    first: Annotated[str, typer.Argument(metavar="RUN1", help="Id of a run, an exported folder, or a record's file.")],
    second: Annotated[str, typer.Argument(metavar="RUN2", help="The other one.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="Compare the bytes too: tensors and elements in which the first "
                                                            "checkpoints that differ do so. Not for a record's file.")] = False,
    url: Url = None, data_dir: DataDir = DATA_DIR, as_json: AsJson = False,
) -> None:
    """Compare two runs.

    What may show in the bits (training spec, data, code), what may not (execution spec, environment, layout, attempts), and
    their step records up to the first that differs.

    Exits 0 when every step is equal, 3 when one differs, 5 when they are equal as far as the shorter one goes.
    """
    from mok_service import render
    from mok_service.cli.executions import differing_tensors, executions
    from mok_service.errors import Tampered
    from mok_service.provenance.compare import compare_records

    with ExitStack() as stack:
        pair = stack.enter_context(executions([first, second], url, data_dir)) if tensors else None
        a, b = ((_record(stack, run, url, data_dir) for run in (first, second)) if pair is None else
                (_checked(one.record, one.name) for one in pair))
        try:
            difference = compare_records(a, b)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Tampered(f"one of them isn't a well-formed record: {type(error).__name__}: {error}", field="record") from None
        found = None if pair is None else differing_tensors(*pair)
    if as_json:
        render.print_json(difference.as_dict() | ({} if found is None else found.as_dict()))
    else:
        for line in (*render.difference_lines(difference), *(() if found is None else found.lines())):
            render.show(line)
    raise typer.Exit({"equal": 0, "different": 3, "equal_so_far": 5}[difference.outcome])


def _record(stack: ExitStack, text: str, url: str | None, data_dir: Path) -> dict[str, Any]:
    """The record that an argument names. What is on the disk needs no service."""
    from mok_service.export import RECORD, load_document

    path = Path(text)
    if not path.exists():
        source = stack.enter_context(reader(url, data_dir))
        return source.provenance(run_id(source, text))
    return _checked(load_document(path, RECORD) if path.is_dir() else load_document(path.parent, path.name), text)


def _checked(record: dict[str, Any], name: str) -> dict[str, Any]:
    from mok_service.provenance.record import RECORD_TYPE

    if record.get("type") != RECORD_TYPE:
        raise typer.BadParameter(f"{name} holds {record.get('type')!r:.80}; allowed: a record, {RECORD_TYPE}")
    return record


def cancel(run: RunArgument, url: Url = None, data_dir: DataDir = DATA_DIR, as_json: AsJson = False) -> None:
    """End a run. What it recorded stays."""
    _act(run, "cancel", url, data_dir, as_json)


def pause(run: RunArgument, url: Url = None, data_dir: DataDir = DATA_DIR, as_json: AsJson = False) -> None:
    """Stop a run with a checkpoint, to be resumed."""
    _act(run, "pause", url, data_dir, as_json)


def resume(run: RunArgument, url: Url = None, data_dir: DataDir = DATA_DIR, as_json: AsJson = False) -> None:
    """Go on with a paused run."""
    _act(run, "resume", url, data_dir, as_json)


def _act(run: str, action: str, url: str | None, data_dir: Any, as_json: bool) -> None:
    from mok_service import render

    with service(url, data_dir) as client:
        changed = client.act(run_id(client, run), action)
    if as_json:
        render.print_json(changed)
    else:
        wish = {"cancel": "to be cancelled", "pause": "to be paused", "run": "to be run"}[changed["desired_state"]]
        render.show(f"{changed['id']}  {changed['status']}, {wish}")

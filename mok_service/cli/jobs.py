"""Verbs about jobs: submit, jobs, rerun."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mok_service.cli.options import DATA_DIR, AsJson, DataDir, RunArgument, Url, given, own_key, reader, run_id, service

if TYPE_CHECKING:
    from mok_service.spec import JobSpec

SpecArgument = Annotated[Path, typer.Argument(metavar="SPEC", help="A job spec in YAML or JSON; - is YAML on standard input.")]
Watch = Annotated[bool, typer.Option("--watch", help="Follow the run to its end; the exit status is then its outcome.")]


def add_to(app: typer.Typer) -> None:
    """Add these verbs to the command."""
    app.command(epilog="Example: mok submit examples/tiny_moe.yaml --watch")(submit)
    app.command("jobs", epilog="Example: mok jobs --name tiny")(list_jobs)
    app.command(epilog="Example: mok rerun RUN --threads 2 --watch")(rerun)


def read_spec(path: Path) -> JobSpec:
    """The job that a file describes: JSON by its ending, else YAML. Raises NotFound or InvalidSpec."""
    from mok_service.errors import NotFound
    from mok_service.spec import load_job

    try:
        text = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise NotFound(f"{path} can't be read: {error.strerror}", path=str(path)) from None
    return load_job(text, "json" if path.suffix == ".json" else "yaml")


def submit(
    spec: SpecArgument,
    watch: Watch = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Submit nothing; show the resolved spec and what it costs.")] = False,
    key: Annotated[str | None, typer.Option("--idempotency-key", metavar="KEY", help="Submitted again under one key, a spec "
                                                                                  "is one job.")] = None,
    url: Url = None, data_dir: DataDir = DATA_DIR, as_json: AsJson = False,
) -> None:
    """Submit a training job, and print its first run."""
    from mok_service.render import print_json, show

    job = read_spec(spec)
    if dry_run:
        _dry_run(job, url, data_dir, as_json)
        return
    with service(url, data_dir) as client:
        submitted = client.submit(job.model_dump_json(exclude_unset=True), key)
        run = submitted["run"]
        if watch:
            _watch_to_end(client, run, as_json)
        elif as_json:
            print_json(submitted)
        else:
            show(f"job {submitted['job']['id']}  training {submitted['job']['digest']}\nrun {run['id']}  {run['status']}")


def list_jobs(
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Only jobs of this name.")] = None,
    digest: Annotated[str | None, typer.Option(metavar="DIGEST", help="Only jobs with this training or data digest.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200, help="How many; the newest first.")] = 20,
    cursor: Annotated[str | None, typer.Option(metavar="CURSOR", help="Go on after the page that gave this cursor.")] = None,
    url: Url = None, data_dir: DataDir = DATA_DIR, as_json: AsJson = False,
) -> None:
    """List jobs, the newest first."""
    from mok_service.render import jobs_table, print_json, show

    with reader(url, data_dir) as source:
        page = source.jobs(name=name, digest=digest, limit=limit, cursor=cursor)
    if as_json:
        print_json(page)
    else:
        show(jobs_table(page["items"]))


def rerun(
    run: RunArgument,
    threads: Annotated[int | None, typer.Option(min=0, help="CPU threads; 0 for all.")] = None,
    micro_batches: Annotated[int | None, typer.Option(min=0, help="Parts that a step is computed in.")] = None,
    device: Annotated[str | None, typer.Option(metavar="cpu|cuda", help="Kind of device.")] = None,
    watch: Watch = False, url: Url = None, data_dir: DataDir = DATA_DIR, as_json: AsJson = False,
) -> None:
    """Run a run's job again, and compare.

    Each step is compared with that run's as it is recorded. With --watch the exit status is the verdict's.
    """
    from mok_service.cli.following import exit_for_verdict, follow
    from mok_service.render import print_json, show

    execution = given(threads=threads, micro_batches=micro_batches, device=device)
    with service(url, data_dir) as client:
        original = client.run(run_id(client, run))
        made = client.create_run(original["job"], execution or None, original["id"])
        if watch:
            ended = follow(client, made, quiet=as_json)
            exit_for_verdict(client, ended, as_json)
        elif as_json:
            print_json(made)
        else:
            show(f"run {made['id']}  {made['status']}, to be compared with {original['id']}")


def _dry_run(job: JobSpec, url: str | None, data_dir: Path, as_json: bool) -> None:
    """By the service if there is one, since it knows its machines; else by the spec alone."""
    from mok_service.client import Client, find_url
    from mok_service.preview import preview
    from mok_service.render import estimate_table, print_json, show

    found = find_url(url, data_dir)
    if found is None:
        answer = preview(job)
    else:
        with Client(found, api_key=own_key()) as client:
            answer = client.validate(job.model_dump_json(exclude_unset=True))
    if as_json:
        print_json(answer)
    else:
        show(estimate_table(answer))


def _watch_to_end(client: Any, run: dict[str, Any], as_json: bool) -> None:
    from mok_service.cli.following import exit_for_run, follow

    exit_for_run(follow(client, run, quiet=as_json), as_json)

"""The verb train: the training loop by itself, without service, database or Ray."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mok_service.cli.jobs import SpecArgument, read_spec
from mok_service.cli.options import AsJson, data_roots, given

if TYPE_CHECKING:
    from mok_service.spec import JobSpec
    from mok_service.training.loop import Trainer

JOB_FILE = "job.json"


def add_to(app: typer.Typer) -> None:
    """Add this verb to the command."""
    app.command(epilog="Example: mok train examples/tiny_moe.yaml --threads 1 --out /tmp/tiny")(train)


def train(
    spec: SpecArgument,
    device: Annotated[str | None, typer.Option(metavar="cpu|cuda", help="Kind of device, in place of the spec's.")] = None,
    threads: Annotated[int | None, typer.Option(min=0, help="CPU threads, in place of the spec's; 0 for all.")] = None,
    micro_batches: Annotated[int | None, typer.Option(min=0, help="Parts of a step, in place of the spec's; 0 chooses.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where checkpoints go; without it none are written.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    data_root: Annotated[list[Path] | None, typer.Option(metavar="FOLDER", help="Where data files lie; default: MOK_DATA_ROOTS, "
                                                                                "else the working folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a job right here, without a service.

    Prints the digest of the final weights, which neither device, threads, micro-batches nor stopping and resuming change.
    Ctrl-C stops after the present step, with a checkpoint if there is --out.
    """
    from mok_service.render import StepProgress, print_json, show

    job = prepare(read_spec(spec), given(device=device, threads=threads, micro_batches=micro_batches), out, resume)
    trainer = open_trainer(job, out, data_root or [])
    steps = job.training.steps
    with StepProgress(job.training.name, steps, quiet=as_json) as progress, stopping_between_steps() as stop_wanted:
        for record in trainer.records():
            if record.step > 0:
                progress.step(record.step, record.loss, record.tokens, record.seconds)
            if stop_wanted() and record.step < steps:
                if out is not None:
                    trainer.save()
                raise KeyboardInterrupt
    weights = str(trainer.state_digests().weights)
    if as_json:
        print_json(_summary(job, trainer, weights))
    else:
        show(f"seed {job.training.seed}")
        show(f"head {trainer.head}")
        show(f"weights {weights}")


def prepare(job: JobSpec, execution: dict[str, Any], out: Path | None, resume: bool) -> JobSpec:
    """The resolved job. With --out it is kept beside the checkpoints, so that a drawn seed isn't lost, and none but that job
    goes on from them. Raises InvalidSpec for contradicting options, Conflict for another job's folder."""
    from mok_service.errors import Conflict, InvalidSpec
    from mok_service.spec import load_job, override_execution, resolve, training_digest

    if resume and out is None:
        raise InvalidSpec("--resume needs --out, the folder with the checkpoints", errors=[])
    kept = None if out is None or not (out / JOB_FILE).is_file() else load_job((out / JOB_FILE).read_bytes(), "json")
    if kept is not None and not resume:
        raise Conflict(f"{out} holds a training already: --resume goes on with it, another --out begins anew", out=str(out))
    seed = job.training.seed if kept is None or job.training.seed is not None else kept.training.seed
    job = resolve(job.model_copy(update={"training": job.training.model_copy(update={"seed": seed})}))
    job = override_execution(job, execution)
    if kept is not None and training_digest(kept.training) != training_digest(job.training):
        ours, theirs = training_digest(job.training), training_digest(kept.training)
        raise Conflict(f"{out} holds the training {theirs}, and the spec is {ours}", out=str(out))
    if out is not None and kept is None:
        out.mkdir(parents=True, exist_ok=True)
        (out / JOB_FILE).write_text(job.model_dump_json(indent=2) + "\n")
    return job


def open_trainer(job: JobSpec, out: Path | None, folders: list[Path]) -> Trainer:
    """Data, kernels and checkpoints of a job, ready to step."""
    from mok_service.kernels import load_backend
    from mok_service.settings import load_settings
    from mok_service.training.checkpoint import CheckpointStore
    from mok_service.training.data import open_corpus
    from mok_service.training.hugging_face import initial_weights
    from mok_service.training.loop import Trainer
    from mok_service.training.sources import Sources

    settings = load_settings()
    roots = data_roots(folders, settings)
    corpus = open_corpus(job.training.data, roots, job.training.model.vocabulary_size, sources=Sources.of(settings))
    backend = load_backend(job.execution.device, threads=job.execution.threads, own_stream=True)
    store = None if out is None else CheckpointStore(out)
    return Trainer(job, corpus, backend, store, initial_weights=initial_weights(job, roots, None))


@contextmanager
def stopping_between_steps() -> Iterator[Any]:
    """Ctrl-C and SIGTERM are remembered, to be asked for between two steps; the second one interrupts at once."""
    wanted: list[int] = []

    def remember(number: int, _frame: Any) -> None:
        if wanted:
            raise KeyboardInterrupt
        wanted.append(number)

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(wanted)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _summary(job: JobSpec, trainer: Trainer, weights: str) -> dict[str, Any]:
    from mok_service.spec import training_digest

    return {
        "training_digest": training_digest(job.training), "seed": job.training.seed, "steps": trainer.step,
        "manifest_digest": str(trainer.corpus.manifest.digest()), "head": str(trainer.head), "weights": weights,
    }

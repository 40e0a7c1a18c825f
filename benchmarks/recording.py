"""What recording costs of a training step of the demo: digests of the state, the body and its link, storing, signing.

    python -m benchmarks.recording [--steps 40] [--threads 1 2] [--intervals 1 10]

One process trains the demo's job and appends each record to a SQLite database by the service's own use case, as the scheduler
does. Every part is timed within the step that it belongs to, so that parts and whole are of the same run; shares are medians
over all steps but the first five (with an interval of 10: of the means of ten steps). Signing is timed once, over the whole
run, and shared out among its steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

EXAMPLE: Final = Path(__file__).parents[1] / "examples" / "tiny_moe.yaml"
WARM: Final = 5
PARTS: Final = ("weights", "optimizer", "batch and experts", "body and link", "append", "sign")


class Clock:
    """Seconds of each part of the present step. A part inside another one counts there only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - begin

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)
        return call

    def take(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, dict.fromkeys(PARTS, 0.0)
        return taken


def watch(trainer: Any, clock: Clock) -> None:
    """Time the parts of recording where the loop does them."""
    from mok_service.training import loop

    rows = trainer.tensor_rows
    trainer.tensor_rows = lambda flat, prefix="": (
        clock.timed("optimizer" if prefix else "weights", rows)(flat, prefix))
    loop.state_digest = clock.timed("body and link", loop.state_digest)  # type: ignore[assignment]
    loop.canonical_digest = clock.timed("batch and experts", loop.canonical_digest)  # type: ignore[assignment]
    loop.Batch.digest = clock.timed("batch and experts", loop.Batch.digest)  # type: ignore[method-assign]
    loop.StepRecord.head = clock.timed("body and link", loop.StepRecord.head)  # type: ignore[method-assign]


def measure(interval: int, threads: int, steps: int, folder: Path) -> None:
    """One run; a row of the table."""
    from mok_service import jobs, runs
    from mok_service.db.session import Database, upgrade
    from mok_service.kernels import load_backend
    from mok_service.provenance.keys import SigningKey
    from mok_service.spec import load_job, resolve
    from mok_service.training.data import open_corpus
    from mok_service.training.loop import Trainer

    job = load_job(EXAMPLE.read_bytes(), "yaml").model_dump()
    job["training"] |= {"steps": steps, "digest_interval": interval}
    spec = resolve(type(load_job(EXAMPLE.read_bytes(), "yaml")).model_validate(job))
    upgrade(f"sqlite:///{folder}/mok.db")
    db, clock, now = Database(f"sqlite:///{folder}/mok.db"), Clock(), datetime.now(UTC)
    corpus = open_corpus(spec.training.data, [], spec.training.model.vocabulary_size)
    trainer = Trainer(spec, corpus, load_backend("cpu", threads=threads))
    jobs.submit(db, spec, now=now)
    lease = runs.claim(db, now, "benchmark", {"cpu": 1})
    assert lease is not None and trainer.record_zero is not None
    runs.mark_starting(db, lease, now)
    runs.mark_running(db, lease, now, {"code": {"native": {}}}, {}, corpus.manifest)
    runs.append(db, lease, [trainer.record_zero], now=now)
    watch(trainer, clock)
    whole, parts = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        record = trainer.advance()
        with clock.part("append"):
            runs.append(db, lease, [record], now=now)
        whole.append(time.perf_counter() - begin)
        parts.append(clock.take())
    runs.finish(db, lease, runs.Outcome("failed", "internal"), now)  # without checkpoints it isn't a success
    begin = time.perf_counter()
    runs.attest(db, SigningKey.generate(), lease.run_id)
    signing = (time.perf_counter() - begin) / steps
    db.close()
    groups = [range(first, first + interval) for first in range(WARM, steps - interval, interval)]
    per_step = [sum(whole[i] for i in group) / interval + signing for group in groups]
    median = statistics.median(per_step)

    def share(name: str) -> float:
        if name == "sign":
            return signing / median
        return statistics.median(sum(parts[i][name] for i in group) / interval / step
                                 for group, step in zip(groups, per_step, strict=True))

    shares = [share(name) for name in PARTS]
    print(f"| {interval} | {threads} | {median * 1e3:.0f} | " + " | ".join(f"{100 * value:.2f}" for value in shares)
          + f" | {100 * sum(shares):.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--intervals", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        with tempfile.TemporaryDirectory() as folder:
            measure(arguments.intervals[0], arguments.threads[0], arguments.steps, Path(folder))
        return
    print("| digests every | threads | step, ms | " + " | ".join(f"{name}, %" for name in PARTS) + " | all, % |")
    print("| --- |" + " --- |" * (len(PARTS) + 3), flush=True)
    for threads in arguments.threads:
        for interval in arguments.intervals:
            command = [sys.executable, "-m", "benchmarks.recording", "--child", "--steps", str(arguments.steps)]
            command += ["--threads", str(threads), "--intervals", str(interval)]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": str(threads)})


if __name__ == "__main__":
    main()

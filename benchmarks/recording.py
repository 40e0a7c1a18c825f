"""What recording costs of a training step of the demo.

    python -m benchmarks.recording [--steps 60] [--threads 1 2] [--intervals 1 10]

The demo's job is trained twice in one process, in turns of ten steps: once recorded as the service does it (digests of the state
at their interval, each record sent to another process, which appends it to a SQLite database by the scheduler's own use case),
once without digests and without sending. The cost is the median of what each recorded turn took more than its neighbour.
`waited` is what the training waits for digests that other threads haven't made. `append` and `sign` are the other process's time
(signing the run's attestation, shared out among its steps): part of the cost only where they take a core from the training.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

EXAMPLE: Final = Path(__file__).parents[1] / "examples" / "tiny_moe.yaml"
TURN: Final = 10
NEVER: Final = 100_000


def job(interval: int) -> Any:
    from mok_service.spec import load_job, parse_job, resolve

    spec = load_job(EXAMPLE.read_bytes(), "yaml").model_dump()
    spec["training"] |= {"steps": NEVER, "digest_interval": interval}
    return resolve(parse_job(spec))


def append(records: Connection, folder: Path, interval: int, ready: Connection) -> None:
    """The other process: stores what comes, and tells the seconds of each append, and of signing."""
    from mok_service import jobs, runs
    from mok_service.db.session import Database, upgrade
    from mok_service.provenance.keys import SigningKey
    from mok_service.training.data import open_corpus

    spec = job(interval)
    upgrade(f"sqlite:///{folder}/mok.db")
    db, now = Database(f"sqlite:///{folder}/mok.db"), datetime.now(UTC)
    jobs.submit(db, spec, now=now)
    lease = runs.claim(db, now, "benchmark", {"cpu": 1})
    assert lease is not None
    manifest = open_corpus(spec.training.data, [], spec.training.model.vocabulary_size).manifest
    runs.mark_starting(db, lease, now)
    runs.mark_running(db, lease, now, {"code": {"native": {}}}, {}, manifest)
    ready.send(None)
    seconds = list[float]()
    while (record := records.recv()) is not None:
        begin = time.perf_counter()
        runs.append(db, lease, [record], now=now)
        seconds.append(time.perf_counter() - begin)
    runs.finish(db, lease, runs.Outcome("failed", "internal"), now)  # without checkpoints it isn't a success
    begin = time.perf_counter()
    runs.attest(db, SigningKey.generate(), lease.run_id)
    ready.send((statistics.median(seconds), (time.perf_counter() - begin) / len(seconds)))
    db.close()


def training(interval: int, threads: int) -> tuple[Any, list[float]]:
    """A trainer's records, and the seconds that each of its states was waited for."""
    from mok_service.kernels import load_backend
    from mok_service.training.data import open_corpus
    from mok_service.training.loop import Trainer

    spec, waited = job(interval), list[float]()
    corpus = open_corpus(spec.training.data, [], spec.training.model.vocabulary_size)
    trainer = Trainer(spec, corpus, load_backend("cpu", threads=threads))
    begin = trainer._hashing.begin

    def begin_timed(*arguments: Any) -> Callable[[], Any]:
        finish = begin(*arguments)

        def finish_timed() -> Any:
            started = time.perf_counter()
            try:
                return finish()
            finally:
                waited.append(time.perf_counter() - started)

        return finish_timed

    trainer._hashing.begin = begin_timed  # type: ignore[method-assign]
    return trainer.records(), waited


def measure(interval: int, threads: int, steps: int, folder: Path) -> None:
    """A row of the table."""
    spawn = multiprocessing.get_context("spawn")
    theirs, records = spawn.Pipe(duplex=False)
    ready, told = spawn.Pipe(duplex=False)
    other = spawn.Process(target=append, args=(theirs, folder, interval, told))
    other.start()
    ready.recv()
    recorded, waited = training(interval, threads)
    plain, _ = training(NEVER, threads)

    def turn(iterator: Any, send: bool) -> float:
        begin = time.perf_counter()
        for record in itertools.islice(iterator, TURN):
            if send:
                records.send(record)
        return (time.perf_counter() - begin) / TURN

    turn(recorded, True), turn(plain, False)
    waited.clear()
    turns = list[tuple[float, float]]()
    for index in range(steps // TURN):
        if index % 2:
            turns.append((turn(recorded, True), turn(plain, False)))
        else:
            without = turn(plain, False)
            turns.append((turn(recorded, True), without))
    records.send(None)
    appending, signing = ready.recv()
    other.join()
    with_it, without = (statistics.median(times) for times in zip(*turns, strict=True))
    cost = statistics.median(one / other for one, other in turns) - 1
    parts = sum(waited) / (len(turns) * TURN), appending, signing
    print(f"| {interval} | {threads} | {without * 1e3:.0f} | {with_it * 1e3:.0f} | {100 * cost:.1f} | "
          + " | ".join(f"{100 * part / without:.1f}" for part in parts) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of each of the two trainings")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--intervals", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        with tempfile.TemporaryDirectory() as folder:
            measure(arguments.intervals[0], arguments.threads[0], arguments.steps, Path(folder))
        return
    print("| digests every | threads | step, ms | recorded, ms | cost, % | waited, % | append, % | sign, % |")
    print("| --- |" + " --- |" * 7, flush=True)
    for threads in arguments.threads:
        for interval in arguments.intervals:
            command = [sys.executable, "-m", "benchmarks.recording", "--child", "--steps", str(arguments.steps)]
            command += ["--threads", str(threads), "--intervals", str(interval)]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": str(threads)})


if __name__ == "__main__":
    main()

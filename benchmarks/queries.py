"""How long queries take on a large database: 100,000 runs with 10 million step records, on SQLite and on PostgreSQL.

    python -m benchmarks.queries [--kind sqlite postgresql] [--scale 1.0] [--folder /tmp]

The rows are invented and inserted in bulk, with the indexes in place; every digest is different, but for the states and step
records of reproductions, which are those of their originals. A tenth of the runs reproduce an earlier one, another tenth start
from an earlier one's weights. Asked are the use cases that the API's routes call, for runs drawn at random. The folder needs
about 11 GB for each kind; it's emptied afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from sqlalchemy import insert, text

from mok_service import runs
from mok_service.db import tables
from mok_service.db.session import Database, upgrade
from mok_service.provenance.digest import Digest
from mok_service.spec import parse_job, preset_of, resolve, training_digest

RUNS, STEPS = 100_000, 100  # and record 0
BATCH: Final = 200          # runs inserted at once
START: Final = datetime(2026, 1, 1, tzinfo=UTC)
LIBRARY: Final = Digest("sha256", "c" * 64)
STEP_COLUMNS: Final = ("run_id", "step", "tenant", "previous", "head", "loss_bits", "grad_norm_bits", "tokens", "batch",
                       "expert_load", "weights", "optimizer", "cursor", "attempt", "seconds", "learning_rate", "metrics",
                       "created_at")
STATUSES: Final = ("succeeded",) * 8 + ("failed", "cancelled")
TEMPLATE: Final[dict[str, Any]] = {
    "training": {"name": "invented", "seed": 1, "steps": STEPS, "sequence_length": 128, "batch": {"sequences": 8},
                 "model": {"preset": "tiny"}, "data": {"source": "python-stdlib"}, "digest_interval": 1},
}


def digest(*words: object) -> Digest:
    return Digest("sha256", hashlib.sha256(" ".join(map(str, words)).encode()).hexdigest())


def item(kind: str, number: int) -> str:
    """An id that sorts by its number, as ids sort by time."""
    return f"{kind}_{number:012x}70008000{number:012x}"[: len(kind) + 33]


class Invented:
    """The rows of run `number`."""

    def __init__(self) -> None:
        self.job = resolve(parse_job(TEMPLATE))
        self.training = self.job.training.model_dump(mode="json")
        self.execution = self.job.execution.model_dump(mode="json")
        self.training_digest = training_digest(self.job.training)
        self.batch = str(digest("batch"))
        self.environment = {"code": {"version": "1", "git": None, "native": {"libmok.so": str(LIBRARY)}},
                            "packages": {f"package-{i}": "1.0" for i in range(150)}}

    def original(self, number: int) -> int:
        """The run whose bits run `number` has: its own, or for every tenth those of an earlier original."""
        return number if number % 10 != 9 else (number // 20) * 10

    def parent(self, number: int) -> int | None:
        """The run whose weights run `number` starts from."""
        return (number // 20) * 10 if number % 10 == 8 else None

    def rows(self, number: int) -> Iterator[tuple[Any, dict[str, Any]]]:
        same, parent = self.original(number), self.parent(number)
        run, job, at = item("run", number), item("job", same), START + timedelta(seconds=number)
        owned = {"tenant": "local", "created_at": at}
        weights = digest("weights", same, STEPS)
        if same == number:
            yield tables.jobs, {**owned, "id": job, "name": f"job {number % 997}", "seed": number, "steps": STEPS,
                                "training_digest": digest("job", number), "submitted": {}, "training": self.training,
                                "execution": self.execution, "manifest": None, "manifest_digest": digest("manifest", number % 50)}
        yield tables.runs, {
            **owned, "id": run, "job_id": job, "kind": "original" if same == number else "reproduction",
            "reproduces": None if same == number else item("run", same), "status": STATUSES[number % 10], "desired_state": "run",
            "execution": self.execution, "device": "cpu", "devices": 1, "queue_rank": 0, "name": f"job {same % 997}",
            "seed": same, "model": preset_of(self.training["model"]), "init_run": None if parent is None else item("run", parent),
            "init_weights": None if parent is None else digest("weights", parent, STEPS), "steps": STEPS, "attempt": 1,
            "failures": 0, "step": STEPS, "head": digest("head", same, STEPS), "weights": weights, "event_count": 0,
            "log_count": 0, "updated_at": at, "ended_at": at, "log_index": number,
        }
        yield tables.attempts, {
            "tenant": "local", "run_id": run, "attempt": 1, "id": item("att", number), "worker": "w", "boot_id": "b",
            "claimed_at": at, "running_at": at, "environment": self.environment, "placement": {},
        }
        yield tables.digest_uses, {"tenant": "local", "digest": LIBRARY, "run_id": run, "role": "native-library", "place": 1,
                                   "name": "libmok.so"}
        yield tables.checkpoints, {
            **owned, "run_id": run, "step": STEPS, "attempt": 1, "folder": f"step-{STEPS:08d}", "size": 1,
            "files": [{"name": "model.safetensors", "size": 1, "sha256": digest("file", number).hex}], "weights": weights,
            "optimizer": digest("optimizer", same, STEPS), "cursor": digest("cursor", STEPS), "head": digest("head", same, STEPS),
        }
        yield tables.digest_uses, {"tenant": "local", "digest": digest("file", number), "run_id": run, "role": "checkpoint-file",
                                   "place": STEPS, "name": "model.safetensors"}

    def steps(self, number: int, at: Any) -> Iterator[tuple[Any, ...]]:
        """The step records of a run, as the driver takes them; columns are STEP_COLUMNS."""
        same, run = self.original(number), item("run", number)
        batch, previous = self.batch, str(digest("head", same, -1))
        for step in range(STEPS + 1):
            head, weights, optimizer = (f"sha256:{hashlib.sha256(f'{word} {same} {step}'.encode()).hexdigest()}"
                                        for word in ("head", "weights", "optimizer"))
            yield (run, step, "local", previous, head, "40000000", "3f800000", 1024, batch, batch, weights, optimizer, batch, 1,
                   0.25, 1e-3, "{}", at)
            previous = head


def fill(db: Database, count: int) -> None:
    """Insert the rows of `count` runs."""
    invented = Invented()
    if db.dialect == "sqlite":  # for filling only: the questions are asked through connections of the service's own
        driver: Any = db.engine.raw_connection()
        driver.driver_connection.executescript("PRAGMA synchronous = OFF; PRAGMA cache_size = -4000000; "
                                               "PRAGMA wal_autocheckpoint = 100000")
        driver.close()
    for first in range(0, count, BATCH):
        by_table: dict[Any, list[dict[str, Any]]] = {}
        steps: list[tuple[Any, ...]] = []
        for number in range(first, min(first + BATCH, count)):
            for table, row in invented.rows(number):
                by_table.setdefault(table, []).append(row)
            at = START + timedelta(seconds=number)
            steps += invented.steps(number, at if db.dialect == "postgresql" else at.strftime("%Y-%m-%d %H:%M:%S.%f"))
        with db.write() as tx:
            for table in (tables.jobs, tables.runs, tables.attempts, tables.digest_uses, tables.checkpoints):
                tx.execute(insert(table), by_table[table])
            _add_steps(db, tx, steps)
        if first % 10_000 == 0:
            print(f"{db.dialect}: {first} runs", file=sys.stderr, flush=True)


def _add_steps(db: Database, tx: Any, steps: list[tuple[Any, ...]]) -> None:
    """The driver's own bulk insert: ten times as fast as statements of rows."""
    driver, names = tx.connection.dbapi_connection, ", ".join(STEP_COLUMNS)
    if db.dialect == "sqlite":
        driver.executemany(f"INSERT INTO step_records ({names}) VALUES ({', '.join('?' * len(STEP_COLUMNS))})", steps)
        return
    with driver.cursor() as cursor, cursor.copy(f"COPY step_records ({names}) FROM STDIN") as copy:
        for row in steps:
            copy.write_row(row)


def questions(db: Database, count: int, draw: random.Random) -> dict[str, Callable[[], object]]:
    """What is measured, each for a run drawn at random."""
    def number() -> int:
        return draw.randrange(count)

    def at(some: int) -> datetime:
        return START + timedelta(seconds=some)

    def deep_page() -> object:
        cursor = runs.list_runs(db, until=at(number() + 60), limit=50).next_cursor
        return runs.list_runs(db, cursor=cursor, limit=50)

    def of_state(word: str) -> Callable[[], object]:
        return lambda: runs.find_digest(db, str(digest(word, number() // 10 * 10, draw.randrange(STEPS + 1))))

    return {
        "a run by id": lambda: runs.get_run(db, item("run", number())),
        "the newest 50 runs": lambda: runs.list_runs(db, limit=50),
        "50 runs from the middle, by cursor (two pages)": deep_page,
        "runs of a status": lambda: runs.list_runs(db, status="failed", limit=50),
        "runs of a seed": lambda: runs.list_runs(db, seed=number(), limit=50),
        "runs of a name and a status": lambda: runs.list_runs(db, name=f"job {number() % 997}", status="succeeded", limit=50),
        "runs of a kind, a model, in a day": lambda: (lambda n: runs.list_runs(
            db, kind="reproduction", model="tiny", since=at(n), until=at(n + 86_400), limit=50))(number()),
        "runs by parent": lambda: runs.list_runs(db, parent=item("run", number() // 10 * 10), limit=50),
        "runs by a digest of weights": lambda: runs.list_runs(
            db, digest=str(digest("weights", number(), draw.randrange(STEPS + 1))), limit=50),
        "a digest: weights of a step": of_state("weights"),
        "a digest: a step record": of_state("head"),
        "a digest: a checkpoint's file": lambda: runs.find_digest(db, str(digest("file", number()))),
        "a digest: training spec": lambda: runs.find_digest(db, str(digest("job", number()))),
        "a digest: a library that every run used": lambda: runs.find_digest(db, str(LIBRARY)),
        "a digest that occurs nowhere": lambda: runs.find_digest(db, str(digest("nothing", number()))),
        "lineage, depth 5": lambda: runs.lineage_of(db, item("run", number())),
        "100 step records": lambda: runs.steps(db, item("run", number()), -1, 100),
        f"the whole record ({STEPS + 1} steps)": lambda: runs.provenance(db, item("run", number())),
    }


def measure(db: Database, count: int, times: int) -> dict[str, tuple[float, float]]:
    """Median and 95th percentile, in milliseconds. Each question is asked in turn, so that none finds its own pages warm."""
    asked = questions(db, count, random.Random(1))
    seconds: dict[str, list[float]] = {name: [] for name in asked}
    for _ in range(times):
        for name, ask in asked.items():
            begin = time.perf_counter()
            ask()
            seconds[name].append(time.perf_counter() - begin)
    return {name: (statistics.median(found) * 1e3, sorted(found)[int(0.95 * len(found))] * 1e3)
            for name, found in seconds.items()}


def sizes(db: Database) -> dict[str, float]:
    """MB of the step records and of their indexes."""
    with db.read() as tx:
        if db.dialect == "postgresql":
            found = tx.execute(text("SELECT relname, pg_relation_size(oid) FROM pg_class WHERE relname LIKE '%step_records%'"))
        else:
            found = tx.execute(text("SELECT name, sum(pgsize) FROM dbstat WHERE name LIKE '%step_records%' GROUP BY name"))
        return {name: size / 1e6 for name, size in found}


@contextlib.contextmanager
def database(kind: str, folder: Path) -> Iterator[Database]:
    """An empty, migrated database."""
    from tests.databases import _running

    with contextlib.ExitStack() as stack:
        if kind == "postgresql":
            server = stack.enter_context(_running(folder))
            server.run("CREATE DATABASE mok", "ALTER SYSTEM SET max_wal_size = '16GB'", "SELECT pg_reload_conf()")
            url = server.database("mok")
        else:
            url = f"sqlite:///{folder}/mok.db"
        upgrade(url)
        db = Database(url)
        yield db
        db.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", choices=["sqlite", "postgresql"], default=["sqlite", "postgresql"])
    parser.add_argument("--scale", type=float, default=1.0, help="1: 100,000 runs")
    parser.add_argument("--times", type=int, default=200, help="how often each question is asked")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    count = max(40, int(RUNS * arguments.scale) // 20 * 20)
    results: dict[str, dict[str, tuple[float, float]]] = {}
    for kind in arguments.kind:
        folder = Path(tempfile.mkdtemp(prefix="mok-queries-", dir=arguments.folder))
        try:
            with database(kind, folder) as db:
                begin = time.perf_counter()
                fill(db, count)
                if kind == "postgresql":
                    with db.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                        connection.execute(text("VACUUM ANALYZE"))
                print(f"{kind}: {count} runs, {count * (STEPS + 1)} step records, filled in {time.perf_counter() - begin:.0f} s; "
                      f"MB: {json.dumps({name: round(size) for name, size in sizes(db).items()})}", flush=True)
                db.engine.dispose()
                measure(db, count, 3)
                results[kind] = measure(db, count, arguments.times)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    print("| query, ms (median / 95 %) | " + " | ".join(results) + " |\n| --- |" + " --- |" * len(results))
    for name in next(iter(results.values())):
        print(f"| {name} | " + " | ".join("{:.1f} / {:.1f}".format(*results[kind][name]) for kind in results) + " |")


if __name__ == "__main__":
    main()

"""The service itself: submits, appends, event streams, lists, the way to the first step, memory; beside Ray Jobs and MLflow.

    python -m benchmarks.service [--ray PYTHON] [--mlflow PYTHON]

`--ray` and `--mlflow` name interpreters of environments with `ray[default]` and `mlflow`; without one, that peer is left out.
The client of submits and lists sends ready bytes on plain sockets (wire.py): times are the service's, not an HTTP library's.
Client and server share this machine, so a rate is of both together. Everything is on 127.0.0.1, in temporary folders.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import insert, select

from benchmarks import wire
from mok_service import jobs, runs
from mok_service.db import tables
from mok_service.db.ids import new_id
from mok_service.db.session import Database
from mok_service.settings import Settings
from mok_service.spec import parse_job
from tests.operating.installation import Api, Program, ended, free_port, get, job, mok, submit, until
from tests.service.play import ENVIRONMENT, MANIFEST, PLACEMENT, records

LISTENERS = 1000
RUNS = 100_000
Row = tuple[str, str, str, str]  # what, ours, Ray Jobs, MLflow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray", help="python of an environment with ray[default]")
    parser.add_argument("--mlflow", help="python of an environment with mlflow")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mok-be-", dir="/tmp"))
    try:
        before = psutil.cpu_times()
        ours = api_alone(folder)
        after = psutil.cpu_times()
        stolen = getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)
        ours["taken by other virtual machines meanwhile, of all cores"] = f"{100 * stolen / (sum(after) - sum(before)):.1f} %"
        print(ours, file=sys.stderr)
        ours |= whole_service(folder)
        print(ours, file=sys.stderr)
        ray = peer("ray", arguments.ray, folder)
        mlflow = peer("mlflow", arguments.mlflow, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("| what | MoK service | Ray Jobs | MLflow |\n| --- | --- | --- | --- |")
    for what in dict.fromkeys([*ours, *ray, *mlflow]):
        print(f"| {what} | {ours.get(what, '-')} | {ray.get(what, '-')} | {mlflow.get(what, '-')} |")


def peer(name: str, python: str | None, folder: Path) -> dict[str, str]:
    if python is None:
        return {}
    script = Path(__file__).with_name("service_peers.py")
    done = subprocess.run([python, str(script), name, str(folder / name)], check=False, capture_output=True, text=True)
    if done.returncode:
        print(f"{name} failed: {done.stderr[-2000:]}", file=sys.stderr)
        return {}
    told: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return told


# ---- the API alone, on SQLite ----------------------------------------------------------------------------------------

@contextmanager
def api(folder: Path) -> Iterator[tuple[Api, Database]]:
    port = free_port()
    wide = {"MOK_EVENT_STREAMS_MAX": "2000", "MOK_EVENT_STREAMS_TENANT_MAX": "2000"}
    process = Api(mok(folder, "api", ["api", "--port", str(port)], **wide), port)
    process.start()
    db = Database(Settings(data_dir=folder / "api").database())
    try:
        process.ready()
        yield process, db
    finally:
        db.close()
        process.program.stop()


def api_alone(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    with api(folder) as (process, db):
        found["API process, idle, PSS"] = f"{memory(process.program):.0f} MB"
        found["submit (create a run): p50 / p95"] = percentiles(wire.one_by_one(process.port, submits(550), 201)[50:])
        found["submits a second, 16 connections"] = f"{wire.at_once(process.port, submits(2000), 16, 201):.0f}"
        found["step records (metrics) appended a second"] = f"{append(db):,.0f}"
        spread, rate = asyncio.run(fan_out(process, db))
        found[f"event to {LISTENERS} listeners: last one after, p50 / p95"] = spread
        found["events delivered a second"] = rate
        fill(db, RUNS)
        for what, path in lists(db).items():
            found[f"{what}: p50 / p95"] = percentiles(wire.one_by_one(process.port, [wire.request("GET", path)] * 105, 200)[5:])
    return found


def percentiles(seconds: list[float]) -> str:
    points = statistics.quantiles(seconds, n=20)
    return f"{statistics.median(seconds) * 1e3:.1f} / {points[18] * 1e3:.1f} ms"


def submits(count: int) -> list[bytes]:
    return [wire.request("POST", "/v1/jobs", json.dumps(job(number)).encode()) for number in range(count)]


def started(db: Database, steps: int) -> tuple[Any, list[Any]]:
    """A run of ours that is running, and all its records. Whatever is queued is out of the way."""
    with db.write() as tx:
        tx.execute(tables.runs.update().where(tables.runs.c.status == "queued").values(status="cancelled", ended_at=db.now()))
    asked = jobs.submit(db, parse_job(job(7, steps=steps)))
    lease = runs.claim(db, db.now(), "benchmark", {"cpu": 1})
    assert lease is not None and lease.run_id == asked.run.id
    runs.mark_starting(db, lease, db.now())
    runs.mark_running(db, lease, db.now(), ENVIRONMENT, PLACEMENT, MANIFEST)
    return lease, records(asked.job)


def append(db: Database) -> float:
    lease, made = started(db, 20_000)
    began = time.perf_counter()
    for first in range(0, len(made), 256):
        runs.append(db, lease, made[first:first + 256])
    took = time.perf_counter() - began
    runs.finish(db, lease, runs.Outcome("failed", "internal", "a benchmark"), db.now())
    return len(made) / took


async def fan_out(process: Api, db: Database) -> tuple[str, str]:
    """One run, many listeners, one record at a time: from the commit until the last listener has the event."""
    lease, made = started(db, 40)
    waiting: dict[int, asyncio.Event] = {step: asyncio.Event() for step in range(len(made))}
    heard = dict.fromkeys(waiting, 0)

    async def listen() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", process.port)
        asked = f"GET /v1/runs/{lease.run_id}/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n"
        writer.write(asked.encode())
        async for line in reader:
            if line.startswith(b"data:") and b'"loss_bits"' in line:
                step = json.loads(line[5:])["payload"]["step"]
                heard[step] += 1
                if heard[step] == LISTENERS:
                    waiting[step].set()

    listeners = [asyncio.create_task(listen()) for _ in range(LISTENERS)]
    spread = []
    for record in made:
        await asyncio.to_thread(runs.append, db, lease, [record])
        began = time.perf_counter()
        await asyncio.wait_for(waiting[record.step].wait(), 60)
        spread.append(time.perf_counter() - began)
    for listener in listeners:
        listener.cancel()
    runs.finish(db, lease, runs.Outcome("failed", "internal", "a benchmark"), db.now())
    later = spread[5:]  # the first ones also connect
    return percentiles(later), f"{LISTENERS * len(later) / sum(later):,.0f}"


def fill(db: Database, count: int) -> None:
    """Copies of the last run that has ended, under ids and times of their own."""
    with db.write() as tx:
        ended_at = tables.runs.c.ended_at
        row = dict(tx.execute(select(tables.runs).where(ended_at.is_not(None)).limit(1)).mappings().one())
        now = datetime.now(UTC)
        for first in range(0, count, 10_000):
            made = []
            for number in range(first, first + 10_000):
                at = now - timedelta(seconds=number)
                status = ("succeeded", "failed", "cancelled")[number % 3]
                made.append({**row, "id": new_id("run"), "created_at": at, "ended_at": at, "status": status, "log_index": number,
                             "name": f"name-{number % 100}", "seed": number})
            tx.execute(insert(tables.runs), made)


def lists(db: Database) -> dict[str, str]:
    with db.read() as tx:
        head = tx.execute(select(tables.step_records.c.head).limit(1)).scalar_one()
    return {
        f"newest 50 of {RUNS:,} runs": "/v1/runs?limit=50", "50 failed ones": "/v1/runs?limit=50&status=failed",
        "50 by name": "/v1/runs?limit=50&name=name-7", "what has a digest": f"/v1/digests/{head}",
    }


# ---- the whole service -----------------------------------------------------------------------------------------------

def memory(program: Program) -> float:
    """MB (10^6 bytes) of the program and all its descendants, shared pages counted once."""
    return sum(process.memory_full_info().pss for process in program.processes()) / 1e6


def whole_service(folder: Path) -> dict[str, str]:
    port = free_port()
    service = Api(mok(folder, "serve", ["serve", "--port", str(port)]), port)
    service.start()
    found = {}
    try:
        service.ready()
        until(lambda: get(service.url, "/v1/nodes")["items"], "a node")
        until(lambda: any(p.name() == "raylet" for p in service.program.processes()), "Ray")
        time.sleep(10)
        found["whole service, idle, PSS"] = f"{memory(service.program):.0f} MB"
        cold, *firsts = [first_step(service.url, seed) for seed in range(6)]
        found["submit to first step on record (first output), median"] = f"{statistics.median(firsts):.2f} s"
        found["the first of all, which has a process started"] = f"{cold:.2f} s"
        psutil.cpu_percent()
        began = time.perf_counter()
        ended(service.url, [submit(service.url, job(100 + seed)) for seed in range(20)])
        found["tiny jobs finished a second (20)"] = f"{20 / (time.perf_counter() - began):.2f}"
        found["cores busy meanwhile"] = f"{psutil.cpu_percent() / 100 * (psutil.cpu_count() or 1):.1f}"
        found["whole service with the processes of ended runs, PSS"] = f"{memory(service.program):.0f} MB"
    finally:
        service.program.stop()
    return found


def first_step(url: str, seed: int) -> float:
    began = time.perf_counter()
    run = submit(url, job(seed))
    while not get(url, f"/v1/runs/{run}/steps?limit=1")["items"]:
        time.sleep(0.01)
    took = time.perf_counter() - began
    ended(url, [run])
    return took


if __name__ == "__main__":
    main()

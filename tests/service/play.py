"""A make-believe worker: step records with invented bits, in a chain as a real training makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from mok_service import jobs, runs
from mok_service.db.session import Database
from mok_service.provenance.chain import StateDigests, StepRecord, float_bits, genesis
from mok_service.provenance.checkpoint import CheckpointFile, CheckpointInfo
from mok_service.provenance.digest import Digest, sha256
from mok_service.provenance.manifest import DataManifest, ManifestFile
from mok_service.runs import Lease, Outcome, Run
from mok_service.spec import ExecutionSpec, JobSpec, parse_job, resolve
from tests.databases import Clock

MANIFEST = DataManifest("python-stdlib", (ManifestFile("abc.py", 6522, "a" * 64), ManifestFile("ast.py", 64260, "b" * 64)),
                        "bytes", 70_783)
ENVIRONMENT: dict[str, Any] = {
    "code": {"version": "0.1.0", "native": {"libmok.so": "sha256:" + "c" * 64},
             "git": {"commit": "d" * 40, "dirty": False, "patch": None}},
    "software": {"python": "3.11.9", "torch": "2.13.0"}, "hardware": {"host": "worker-1"}, "variables": {}, "packages": {},
}
PLACEMENT: dict[str, Any] = {"ranks": [{"rank": 0, "node": "worker-1", "device": "cpu"}]}
CPU = {"cpu": 1}
NO_ROOM_LIMIT = {"cpu": 1000, "cuda": 1000}


def spec(steps: int = 4, seed: int | None = 7, name: str = "play", **execution: Any) -> JobSpec:
    return parse_job({
        "training": {
            "name": name, "seed": seed, "steps": steps, "sequence_length": 16, "digest_interval": 2,
            "batch": {"sequences": 4, "shards": 2, "group_sequences": 1}, "data": {"source": "python-stdlib"},
            "model": {"hidden_size": 8, "layers": 1, "heads": 2, "kv_heads": 1, "head_size": 4, "experts": 4, "top_k": 2,
                      "expert_intermediate_size": 8, "vocabulary_size": 260},
        },
        "execution": execution,
    })


def digest(*words: object) -> Digest:
    return sha256(" ".join(map(str, words)).encode())


def state(step: int, word: object = "") -> StateDigests:
    return StateDigests(digest("weights", step, word), digest("optimizer", step, word), digest("cursor", step))


def records(job: jobs.Job, first: int = 0, change: dict[int, dict[str, Any]] | None = None,
            manifest: DataManifest = MANIFEST) -> list[StepRecord]:
    """All records of a job from step `first` on; `change[step]` replaces fields, and every later link follows."""
    steps, made = job.training.steps, list[StepRecord]()
    previous = genesis(job.training_digest, manifest.digest(), job.training.arithmetic, state(0).weights)
    for step in range(steps + 1):
        has_state = step % job.training.digest_interval == 0 or step == steps
        body = StepRecord(step, previous, state(step) if has_state else None)
        if step:
            body = replace(body, loss_bits=float_bits(5.0 / step), grad_norm_bits=float_bits(1.0), tokens=60,
                           batch=digest("batch", step), expert_load=digest("load", step), seconds=0.25, learning_rate=1e-3,
                           metrics=(("aux", float("nan")), ("tokens_per_second", 240.0)))
        body = replace(body, **(change or {}).get(step, {}))
        previous = body.head()
        made.append(body)
    return made[first:]


def checkpoint(record: StepRecord) -> CheckpointInfo:
    held = record.state or state(record.step)
    files = (CheckpointFile("state.json", 300, digest("state", record.step).hex),
             CheckpointFile("weights.safetensors", 9000, held.weights.hex))
    return CheckpointInfo(record.step, f"step-{record.step:09}", files, held, record.head())


def submit(db: Database, now: datetime | None = None, **values: Any) -> jobs.Submitted:
    return jobs.submit(db, spec(**values), now=now)


def start(db: Database, clock: Clock, environment: dict[str, Any] = ENVIRONMENT, manifest: DataManifest = MANIFEST,
          worker: str = "w", **claiming: Any) -> Lease:
    """Claims the next run and brings it to `running`."""
    lease = runs.claim(db, clock.now, worker, NO_ROOM_LIMIT, **claiming)
    assert lease is not None
    runs.mark_starting(db, lease, clock.now)
    runs.mark_running(db, lease, clock.now, environment, PLACEMENT, manifest)
    return lease


def succeed(db: Database, lease: Lease, clock: Clock, made: Sequence[StepRecord]) -> Run:
    """Stores records and the last checkpoint, and finishes."""
    runs.append(db, lease, made, checkpoints=[checkpoint(made[-1])], now=clock.now)
    assert made[-1].state is not None
    return runs.finish(db, lease, Outcome("succeeded", "finished", None, made[-1].state.weights, made[-1].head()), clock.now)


def trained(db: Database, clock: Clock, **values: Any) -> tuple[jobs.Job, Run]:
    """A job whose first run has succeeded."""
    job = submit(db, **values).job
    return job, succeed(db, start(db, clock), clock, records(job))


def execution(**values: Any) -> ExecutionSpec:
    return resolve(spec(**values)).execution


def event_words(db: Database, run_id: str) -> list[str]:
    """The statuses that a run's events tell, after checking that numbers have no gaps."""
    found = runs.events(db, run_id)
    assert [event.number for event in found] == list(range(1, len(found) + 1))
    return [event.payload["status"] for event in found if event.type == "run.status"]



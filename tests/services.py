"""A service for tests: the real API in a thread on 127.0.0.1, and a scheduler that plays its part with canned records."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from mok_api import create_app
from mok_service import jobs, runs
from mok_service.db.session import Database
from mok_service.provenance.chain import StateDigests, StepRecord, float_bits, genesis
from mok_service.provenance.checkpoint import CheckpointFile, CheckpointInfo
from mok_service.provenance.digest import Digest, TensorDigest, blake3_of, canonical_digest, sha256, state_digest
from mok_service.provenance.keys import SigningKey, signing_key
from mok_service.provenance.manifest import DataManifest, ManifestFile
from mok_service.runs.types import Lease, LogLine, Outcome
from mok_service.settings import Settings
from mok_service.spec import training_digest

MANIFEST = DataManifest("python-stdlib", (ManifestFile("a.py", 3, "ab" * 32),), "bytes", 4)
ENVIRONMENT = {"code": {"version": "1", "native": {}, "git": None}, "software": {"python": "3"}, "hardware": {"host": "h"}}
SPEC: dict[str, Any] = {
    "training": {
        "name": "tiny", "seed": 7, "steps": 3, "sequence_length": 16, "batch": {"sequences": 2}, "digest_interval": 1,
        "model": {"preset": "tiny"}, "data": {"source": "python-stdlib"},
    },
    "execution": {"checkpoint_interval": 1, "max_attempts": 1},
}


def spec(**training: Any) -> dict[str, Any]:
    """A small job, with other values in its training spec."""
    return {**SPEC, "training": {**SPEC["training"], **training}}


@dataclass
class Service:
    """A running API, its database and its settings."""

    url: str
    db: Database
    settings: Settings
    app: FastAPI

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)


@contextmanager
def running_api(db: Database, settings: Settings) -> Iterator[Service]:
    """Serve until the block ends. Afterwards the server has stopped in order: no stream kept it."""
    app = create_app(db, settings)
    server = uvicorn.Server(uvicorn.Config(app, http=app.state.http, log_level="warning", timeout_graceful_shutdown=5))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield Service(f"http://127.0.0.1:{listener.getsockname()[1]}", db, settings, app)
    finally:
        app.state.streams.stopping.set()
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive(), "the server didn't stop"


@dataclass
class Worker:
    """Plays scheduler and worker: claims the next run, and appends canned records, which the seed and the step determine."""

    db: Database
    settings: Settings
    losses: dict[int, float] = field(default_factory=dict)  # by step, in place of the canned ones

    def claim(self) -> Lease:
        lease = runs.claim(self.db, self.now(), "test", {"cpu": 100})
        assert lease is not None, "a run is queued"
        return lease

    def start(self) -> Lease:
        """A claimed run, running."""
        lease = self.claim()
        runs.mark_starting(self.db, lease, self.now())
        runs.mark_running(self.db, lease, self.now(), ENVIRONMENT, {"host": "h"}, MANIFEST)
        return lease

    def work(self) -> str:
        """The next queued run, from its claim to its end, with a checkpoint and a log line for each step; its id."""
        lease = self.start()
        run = runs.get_run(self.db, lease.run_id)
        records, checkpoints = [], []
        for record, checkpoint in self.records(run.job_id, run.id):
            records.append(record)
            checkpoints.append(checkpoint)
            lines = [LogLine(record.step, self.now(), "info", f"step {record.step} is done", record.step)]
            result = runs.append(self.db, lease, [record], lines, [checkpoint], self.now())
            if result.stop is not None:
                runs.finish(self.db, lease, Outcome("failed", result.stop, result.message), self.now())
                return run.id
        outcome = Outcome("succeeded", "finished", weights=checkpoints[-1].state.weights, head=records[-1].head())
        runs.finish(self.db, lease, outcome, self.now())
        return run.id

    @property
    def key(self) -> SigningKey:
        """The data folder's."""
        return signing_key(self.settings.key_file())

    def sign(self) -> None:
        """Attests every run that has ended, as the scheduler's process does."""
        for run_id, tenant in runs.unattested(self.db):
            runs.attest(self.db, self.key, run_id, tenant)

    def fail(self, reason: Any, message: str) -> str:
        """The next queued run fails before its first step; its id."""
        lease = self.start()
        runs.finish(self.db, lease, Outcome("failed", reason, message), self.now())
        return lease.run_id

    def records(self, job_id: str, run_id: str) -> Iterator[tuple[StepRecord, CheckpointInfo]]:
        """Record and checkpoint of each step; the checkpoint's files are on the disk."""
        training = jobs.get_job(self.db, job_id).training
        assert training.seed is not None
        head: Digest | None = None
        for step in range(training.steps + 1):
            loss = self.losses.get(step, 5.0 - step)
            weights = struct.pack("<2f", loss, float(training.seed % 1000))
            norm = float_bits(0.5) if step else float_bits(0.0)
            state = _state(step, weights, norm)
            if head is None:
                head = genesis(Digest.parse(training_digest(training)), MANIFEST.digest(), training.arithmetic, state.weights)
            record = StepRecord(step=step, previous=head, state=state)
            if step:
                batch = canonical_digest({"type": "mok.batch/v1", "ids": [str(step)]})
                record = replace(record, loss_bits=float_bits(loss), grad_norm_bits=norm, tokens=32, batch=batch,
                                 expert_load=batch, seconds=0.01, learning_rate=0.001, metrics=(("aux_loss", float("nan")),))
            head = record.head()
            yield record, self._checkpoint(run_id, step, weights, norm, state, head)

    def _checkpoint(self, run_id: str, step: int, weights: bytes, norm: str, state: StateDigests, head: Digest) -> CheckpointInfo:
        folder = self.settings.checkpoints(run_id) / f"step-{step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        contents = {
            "model.safetensors": safetensors({"w": weights}),
            "optimizer.safetensors": safetensors({"first/w": b"\0" * 8, "previous_norm": bytes.fromhex(norm)[::-1]}),
            "报告-🚀.txt": "报告".encode(),
        }
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        files = tuple(CheckpointFile(name, len(content), sha256(content).hex) for name, content in sorted(contents.items()))
        return CheckpointInfo(step, folder.name, files, state, head)

    @staticmethod
    def now() -> datetime:
        return datetime.now(UTC)


def _state(step: int, weights: bytes, norm: str) -> StateDigests:
    norm_row = TensorDigest("previous_norm", "F32", (1,), blake3_of(bytes.fromhex(norm)[::-1]).hex)
    moments = TensorDigest("first/w", "F32", (2,), blake3_of(b"\0" * 8).hex)
    return StateDigests(
        state_digest([TensorDigest("w", "F32", (2,), blake3_of(weights).hex)]), state_digest([moments, norm_row]),
        canonical_digest({"type": "mok.cursor/v1", "step": str(step)}),
    )


def safetensors(tensors: dict[str, bytes]) -> bytes:
    """A safetensors file of float32 vectors."""
    header, data = {}, b""
    for name, content in tensors.items():
        header[name] = {"dtype": "F32", "shape": [len(content) // 4], "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def flip_a_bit(path: Path, offset: int = -1) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(bytes(content))

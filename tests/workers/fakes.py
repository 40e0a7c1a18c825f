"""A training without kernels: deterministic records, checkpoints on disk, and faults at chosen steps."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mok_service.errors import NonFinite
from mok_service.provenance.chain import StateDigests, StepRecord, float_bits, genesis
from mok_service.provenance.checkpoint import CheckpointFile, CheckpointInfo
from mok_service.provenance.digest import Digest, sha256
from mok_service.provenance.manifest import DataManifest, ManifestFile
from mok_service.spec import parse_job, training_digest
from mok_workers.attempt import Control
from mok_workers.messages import Devices, Payload

MANIFEST = DataManifest("files", (ManifestFile("a.txt", 3, "ab" * 32),), "bytes", 4)


def job_document(steps: int = 6, *, seed: int = 7, checkpoint_interval: int = 2, **execution: Any) -> dict[str, Any]:
    """A resolved job, small enough for anything."""
    return {
        "training": {
            "name": "fake", "seed": seed, "model": {"preset": "tiny"}, "data": {"source": "python-stdlib"}, "sequence_length": 8,
            "batch": {"sequences": 2, "group_sequences": 1}, "steps": steps, "digest_interval": 2,
        },
        "execution": {"checkpoint_interval": checkpoint_interval, "threads": 1, "micro_batches": 1, **execution},
    }


def digest(*parts: object) -> Digest:
    return sha256(json.dumps(parts).encode())


def state(seed: int, step: int) -> StateDigests:
    return StateDigests(digest("w", seed, step), digest("o", seed, step), digest("c", step))


def chain(document: Mapping[str, Any], flip: int | None = None) -> Iterator[StepRecord]:
    """All records of a job, from record 0; the loss of step `flip` has another bit."""
    training = parse_job(dict(document)).training
    assert training.seed is not None
    start = state(training.seed, 0)
    first = genesis(Digest.parse(str(training_digest(training))), MANIFEST.digest(), "mok-1", start.weights)
    record = StepRecord(0, first, start)
    yield record
    for step in range(1, training.steps + 1):
        digested = step % training.digest_interval == 0 or step == training.steps
        loss = 1.0 / (1 << step % 20) * (-1.0 if step == flip else 1.0)
        record = StepRecord(
            step, record.head(), state(training.seed, step) if digested else None, float_bits(loss), float_bits(2.0), 16,
            digest("b", training.seed, step), digest("e", training.seed, step), seconds=0.5, learning_rate=1e-3,
        )
        yield record


class FakeTraining:
    """`faults`: step -> "nan", "wait" (until `go` is set), or, once in a folder, "crash", "memory", "kill" (the process)."""

    def __init__(
        self, payload: Payload, control: Control, faults: Mapping[int, str] | None = None, flip: int | None = None,
        go: threading.Event | None = None,
    ) -> None:
        self.manifest = MANIFEST
        self.environment: dict[str, Any] = {"code": {"version": "0"}, "seen": sorted(os.environ),
                                            "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
        self.placement: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "rank": 0, "cpus": 1, "gpus": []}
        self._payload, self._control, self._faults, self._flip, self._go = payload, control, dict(faults or {}), flip, go
        self._folder = Path(payload.checkpoints)
        self._folder.mkdir(parents=True, exist_ok=True)
        at_most = -1 if payload.last_step is None else payload.last_step
        usable = [c.step for c in self.checkpoints() if c.step <= at_most]
        self.resumed_from = usable[-1] if usable else None
        control.log(f"opened {payload.name}")

    def checkpoints(self) -> list[CheckpointInfo]:
        return [CheckpointInfo.from_dict(json.loads(p.read_text())) for p in sorted(self._folder.glob("step-*.json"))]

    def records(self) -> Iterator[StepRecord]:
        interval = self._payload.job["execution"]["checkpoint_interval"]
        last = self._payload.job["training"]["steps"]
        for record in chain(self._payload.job, self._flip):
            if self.resumed_from is not None and record.step <= self.resumed_from:
                continue
            self._fault(record.step)
            saved = record.step == last or (interval and record.step and record.step % interval == 0)
            if saved:
                self._commit(record)
            yield record
            stop = self._control.stop_wanted()
            if stop == "checkpoint" and not saved:
                self._commit(record)
            if stop is not None:
                return

    def _commit(self, record: StepRecord) -> None:
        seed = self._payload.job["training"]["seed"]
        files = (CheckpointFile("model.safetensors", 8, "cd" * 32),)
        info = CheckpointInfo(record.step, f"step-{record.step:08d}", files, state(seed, record.step), record.head())
        path = self._folder / f"{info.folder}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(info.as_dict()))
        partial.rename(path)
        self._control.checkpoint(info)

    def _fault(self, step: int) -> None:
        fault = self._faults.get(step)
        if fault is None:
            return
        if fault == "wait":
            assert self._go is not None
            assert self._go.wait(60)
            return
        if fault == "nan":
            raise NonFinite(f"step {step}: the loss is not finite", reason="non_finite", step=step)
        once = self._folder / f"fault-{step}"
        if once.exists():
            return
        once.touch()
        if fault == "kill":
            os.kill(os.getpid(), 9)
        raise {"crash": OSError(28, "No space left on device"), "memory": MemoryError("no more")}[fault]


def unchanged() -> object:
    """What the programs of an actor are measured as, in a work tree that people edit while it's tested."""
    return None


def nothing() -> None:
    """What an actor loads."""


class Opens:
    """Opens fake trainings that share faults and a gate."""

    def __init__(self, faults: Mapping[int, str] | None = None, flip: int | None = None, *, gate: bool = False) -> None:
        self.faults, self.flip, self.go = faults, flip, threading.Event() if gate else None

    def __call__(self, payload: Payload, control: Control) -> FakeTraining:
        return FakeTraining(payload, control, self.faults, self.flip, self.go)


def payload(folder: Path, *, last_step: int | None = None, lease_seconds: float = 30.0, **job: Any) -> Payload:
    return Payload(
        "run_1-1", job_document(**job), (), str(folder), None, last_step, (), lease_seconds, socket.gethostname(),
        Devices("cpu", 1, 0),
    )

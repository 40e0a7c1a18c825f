"""Opens the real training for an attempt: data, kernels, and the newest checkpoint that is whole."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from mok_service.environment import environment, gpus
from mok_service.errors import Tampered
from mok_service.kernels import load_backend
from mok_service.kernels.native import NativeBackend
from mok_service.provenance.chain import StepRecord
from mok_service.provenance.checkpoint import CheckpointInfo
from mok_service.provenance.manifest import DataManifest
from mok_service.spec import JobSpec, parse_job
from mok_service.training.checkpoint import CheckpointStore, folder_name
from mok_service.training.data import Corpus, open_corpus
from mok_service.training.hugging_face import initial_weights
from mok_service.training.loop import Trainer
from mok_service.training.sources import Sources
from mok_workers.attempt import Control, Training
from mok_workers.messages import Payload


@dataclass(frozen=True)
class Opened:
    """What an attempt computes with: its job, data, kernels and checkpoints, and what the record says of this machine."""

    job: JobSpec
    corpus: Corpus
    backend: NativeBackend
    store: CheckpointStore
    initial_weights: Mapping[str, Tensor] | None
    environment: dict[str, Any]
    placement: dict[str, Any]

    @property
    def manifest(self) -> DataManifest:
        return self.corpus.manifest

    @classmethod
    def of(cls, payload: Payload, control: Control) -> Self:
        job = parse_job(payload.job)
        torch.set_num_threads(payload.devices.cpus)  # of copies; a process may have had more or fewer for its last attempt
        roots = [Path(root) for root in payload.data_roots]
        sources = None if payload.remote is None else Sources(payload.remote, control.log)
        corpus = open_corpus(job.training.data, roots, job.training.model.vocabulary_size, payload.manifest, sources)
        manifest = corpus.manifest
        control.log(f"data: {len(manifest.files):,} files, {manifest.tokens:,} tokens, {manifest.digest()}")
        backend = load_backend(job.execution.device, threads=job.execution.threads, own_stream=True)
        placement = {
            "host": socket.gethostname(), "pid": os.getpid(), "rank": 0, "cpus": payload.devices.cpus,
            "gpus": [gpu.uuid for gpu in gpus()] if payload.devices.gpus else [],
        }
        store = CheckpointStore(Path(payload.checkpoints))
        start = initial_weights(job, roots, store.root.parent)
        return cls(job, corpus, backend, store, start, environment() | {"kernels": backend.info()}, placement)


class NativeTraining:
    """A training by the native kernels of this machine; see `mok_workers.attempt.Training`."""

    def __init__(self, payload: Payload, control: Control) -> None:
        self._control = control
        opened = Opened.of(payload, control)
        self.manifest, self.environment, self.placement = opened.manifest, opened.environment, opened.placement
        self._store = store = opened.store
        # Steps that nobody has on record are computed again, even where a checkpoint reaches further: the chain has no gap.
        at_most = -1 if payload.last_step is None else payload.last_step
        self._trainer = whole_trainer(
            store, at_most, payload.on_record, control,
            lambda limit: Trainer(opened.job, opened.corpus, opened.backend, store, resume_at_most=limit,
                                  initial_weights=opened.initial_weights),
        )
        self.resumed_from = self._trainer.step if self._trainer.record_zero is None else None

    def checkpoints(self) -> list[CheckpointInfo]:
        return [info for info in self._store.list() if info.step <= self._trainer.step]

    def records(self) -> Iterator[StepRecord]:
        told = {info.step for info in self.checkpoints()}
        for record in self._trainer.records():
            if record.step and record.step not in told:
                told |= self._tell(record.step)
            yield record
            stop = self._control.stop_wanted()
            if stop == "checkpoint" and record.step and record.step not in told:
                self._control.checkpoint(self._trainer.save())
            if stop is not None:
                return

    def _tell(self, step: int) -> set[int]:
        """Report the checkpoint of this step, if the loop committed one."""
        if not (self._store.root / folder_name(step)).is_dir():
            return set()
        self._control.checkpoint(self._store.info(step))
        return {step}


def open_training(payload: Payload, control: Control) -> Training:
    """What the service's attempts run: a training, an audit of one, or a bisect of two."""
    from mok_workers.auditing import AuditTraining  # which build on this module
    from mok_workers.bisecting import BisectTraining

    if payload.bisect is not None:
        return BisectTraining(payload, control, payload.bisect)
    if payload.segments is not None:
        return AuditTraining(payload, control, payload.segments)
    return NativeTraining(payload, control)


def whole_trainer(
    store: CheckpointStore, at_most: int, on_record: Sequence[CheckpointInfo], control: Control, make: Callable[[int], Trainer]
) -> Trainer:
    """A trainer at the newest checkpoint up to `at_most` that is what the record says, and whose bytes are what it says itself.

    A damaged one is set aside under a hidden name, so that its step is computed and committed again.
    """
    while True:
        try:
            refuse_contradictions(store.list(), on_record)
            return make(at_most)
        except Tampered as error:
            step = error.detail["step"]
            folder = store.root / folder_name(step)
            folder.rename(folder.with_name(f".{folder.name}.damaged-{os.getpid()}"))
            control.log(f"the checkpoint after step {step} is damaged and was set aside: {error.message}", "warning", step)


def refuse_contradictions(found: Sequence[CheckpointInfo], on_record: Sequence[CheckpointInfo]) -> None:
    """Raises Tampered at the first checkpoint whose state or place in the chain isn't the recorded one."""
    recorded = {info.step: (info.head, info.state) for info in on_record}
    for info in found:
        expected = recorded.get(info.step)
        if expected is not None and expected != (info.head, info.state):
            raise Tampered(
                f"{info.folder} says that it has head {info.head} and weights {info.state.weights}, recorded are head "
                f"{expected[0]} and weights {expected[1].weights}", step=info.step,
            )

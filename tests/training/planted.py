"""Executions with a planted fault: a backend that flips one bit of one operation's output in one step, always or once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mok_service.errors import NonFinite
from mok_service.kernels.abi import OUTPUTS
from mok_service.kernels.native import NativeBackend
from mok_service.provenance.chain import StepRecord
from mok_service.provenance.verify import Ending
from mok_service.spec import JobSpec
from mok_service.training.bisect import Executor, Side
from mok_service.training.checkpoint import CheckpointStore
from mok_service.training.data import Corpus
from mok_service.training.loop import Trainer

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Plant:
    """Flip this bit of this element of the last output called `argument` of operation `number` of step `step`."""

    step: int
    number: int
    argument: str
    position: int
    bit: int
    times: int = 1 << 30
    done: int = field(default=0, init=False)

    def index(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(int(i) for i in torch.unravel_index(torch.tensor(self.position), shape))


class PlantedBackend(NativeBackend):
    """Knows the step by the samples that are drawn at its beginning."""

    def __init__(self, sequences: int, plant: Plant | None = None) -> None:
        super().__init__("cpu", threads=1)
        self._sequences, self.plant = sequences, plant
        self.step, self.number = 0, 0
        self.seen: dict[int, list[tuple[str, dict[str, torch.Tensor]]]] = {}
        self.watched: int | None = None

    def call(self, operation: str, **fields: Any) -> Any:
        result = super().call(operation, **fields)
        if operation == "mok_rope_table":  # a model is set up
            self.step, self.number = 0, 0
        if operation == "mok_permutation":
            assert fields["n"] > 50 * self._sequences, "one epoch is enough for these tests"
            self.step, self.number = fields["first"] // self._sequences + 1, 0
        elif operation in OUTPUTS:
            outputs = {name: fields[name] for name in OUTPUTS[operation] if isinstance(fields.get(name), torch.Tensor)}
            if self.step == self.watched:
                self.seen.setdefault(self.step, []).append((operation, outputs))
            plant = self.plant
            if plant is not None and (plant.step, plant.number) == (self.step, self.number) and plant.done < plant.times:
                plant.done += 1
                tensor = outputs[plant.argument]
                flat = tensor.view(INTEGERS[tensor.element_size()])
                one = 1 << plant.bit
                width = 8 * tensor.element_size()
                flat[plant.index(tuple(tensor.shape))] ^= one - (1 << width) if one >> (width - 1) and width > 8 else one
            self.number += 1
        return result


@dataclass
class Execution:
    """A training that has been done, as a side of a bisect."""

    spec: JobSpec
    corpus: Corpus
    folder: Path
    open: Callable[[], NativeBackend]
    name: str

    def __post_init__(self) -> None:
        self.store = CheckpointStore(self.folder)
        self.records: list[StepRecord] = []
        reason = "finished"
        try:
            for record in Trainer(self.spec, self.corpus, self.open(), self.store).records():
                self.records.append(record)
        except NonFinite:
            reason = "non_finite"
        self.ending = Ending("succeeded" if reason == "finished" else "failed", reason, self.records[-1].step)

    def executor(self) -> Executor:
        return Executor(self.name, self.open, self.spec.execution)

    def side(self) -> Side:
        checkpoints = {info.step: info for info in self.store.list()}
        return Side(self.name, self.executor(), self.records, self.ending, self.corpus.manifest, checkpoints, self.store.load)

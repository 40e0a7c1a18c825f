"""Forward and backward of a step's micro-batches: operation by operation, or on a GPU as one recorded CUDA graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from mok_service.training.model import MicroBatch, Model, StepSums

_EAGER_STEPS = 2  # before recording: they make the workspaces, so that a recorded step allocates nothing


class Gradients:
    """Computes a step's gradients into the model's buffers, and its sums.

    With a backend that has a stream of its own, the operations are recorded once and then replayed with other inputs: every
    shape is static, and the routing is data on the device. Recording changes no bit.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._parts: list[MicroBatch] = []
        self._sums: StepSums | None = None
        self._steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def compute(self, parts: Sequence[MicroBatch], groups: int) -> StepSums:
        """The sums of a step of these micro-batches, on the device; valid until the next call."""
        if self._sums is None or len(self._parts) != len(parts):
            self._sums, self._parts, self._steps, self._graph = self._model.new_sums(groups), list(parts), 0, None
        else:
            self._parts = [_refill(old, new) for old, new in zip(self._parts, parts, strict=True)]
        stream = self._model.backend.stream
        # A scalar argument is part of a recording; with a z-loss it differs between steps.
        if stream is None or self._model.spec.z_loss_coefficient or self._steps < _EAGER_STEPS:
            self._run(self._sums)
        else:
            if self._graph is None:
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph, stream=stream):
                    self._run(self._sums)
            self._graph.replay()
        self._steps += 1
        return self._sums

    def _run(self, sums: StepSums) -> None:
        self._model.start_step(sums)
        for part in self._parts:
            self._model.accumulate(part, sums)
        self._model.finish_step()


def _refill(old: MicroBatch, new: MicroBatch) -> MicroBatch:
    """The micro-batch `new` in the memory of `old`, which a recording reads."""
    for kept, given in ((old.inputs, new.inputs), (old.labels, new.labels), (old.mask, new.mask)):
        kept.copy_(given)
    if old.aux_scale is not None and new.aux_scale is not None:
        old.aux_scale.copy_(new.aux_scale)
    return dataclasses.replace(old, z_scale=new.z_scale)

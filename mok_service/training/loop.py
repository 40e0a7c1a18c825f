"""The training loop: one StepRecord a step. It knows neither a database nor Ray, so the service, the command line and an
auditor run the very same code.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mok_service.errors import InvalidSpec, NonFinite
from mok_service.kernels.native import NativeBackend
from mok_service.provenance.chain import StateDigests, StepRecord, float_bits, float_from_bits, genesis
from mok_service.provenance.checkpoint import CheckpointInfo
from mok_service.provenance.digest import Digest, canonical_digest
from mok_service.spec import JobSpec, training_digest
from mok_service.training.checkpoint import CheckpointStore, State
from mok_service.training.data import Batch, Corpus
from mok_service.training.digests import PREVIOUS_NORM, StateHashing, norm_tensor
from mok_service.training.gradients import Gradients
from mok_service.training.hugging_face import config_of
from mok_service.training.model import MicroBatch, Model, StepSums
from mok_service.training.optimizer import clip_scale, learning_rate, update_scalars

P = ParamSpec("P")
R = TypeVar("R")
_FIXED_POINT = 2.0**-32


def train(
    job: JobSpec,
    corpus: Corpus,
    backend: NativeBackend,
    store: CheckpointStore | None = None,
    *,
    resume_at_most: int | None = None,
    initial_weights: Mapping[str, Tensor] | None = None,
) -> Iterator[StepRecord]:
    """Train a resolved job; yields record 0 (the initial state) and one record a step.

    With a store: starts from its newest checkpoint at or before step `resume_at_most` (None: the newest of all) and yields
    the records after that one; commits checkpoints by `execution.checkpoint_interval` and after the last step, each before
    its record. Stopping is to ask for no further record. Raises NonFinite, Tampered (a checkpoint), InvalidSpec (initial
    weights that don't fit).
    """
    return Trainer(job, corpus, backend, store, resume_at_most=resume_at_most, initial_weights=initial_weights).records()


def _on_stream(method: Callable[Concatenate[Trainer, P], R]) -> Callable[Concatenate[Trainer, P], R]:
    """Torch's own work inside a method goes to the stream of the trainer's backend."""

    @functools.wraps(method)
    def wrapped(self: Trainer, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.backend.active():
            return method(self, *args, **kwargs)

    return cast("Callable[Concatenate[Trainer, P], R]", wrapped)


@dataclass(frozen=True)
class _Computed:
    """Forward and backward of a step: everything but the update."""

    step: int
    batch: Batch
    sums: StepSums
    loss: float
    norm: float
    seconds: float


@dataclass(frozen=True)
class _Updated:
    """A step whose update is done: its record, but for the digests of the state, and what waits for those."""

    record: StepRecord
    digests: Callable[[], StateDigests] | None


class Trainer:
    """The loop with its state in reach: `step` and `head` after the last record, and `save()`."""

    def __init__(
        self,
        job: JobSpec,
        corpus: Corpus,
        backend: NativeBackend,
        store: CheckpointStore | None = None,
        *,
        resume_at_most: int | None = None,
        initial_weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        """The arguments of `train`."""
        spec = job.training
        assert spec.seed is not None, "a job is resolved before it is trained"
        self.job, self.spec, self.corpus, self.backend, self.store = job, spec, corpus, backend, store
        self._seed = spec.seed
        self._open(resume_at_most, initial_weights)

    @_on_stream
    def _open(self, resume_at_most: int | None, initial_weights: Mapping[str, Tensor] | None) -> None:
        spec, backend, store = self.spec, self.backend, self.store
        self.model = Model(
            spec.model, spec.precision, backend, spec.sequence_length, spec.batch.group_sequences, spec.batch.shards
        )
        self._gradient_graph = Gradients(self.model)
        self._hashing = StateHashing(self.model.parameters, backend)
        self.step = 0
        self.previous_norm = float_bits(0.0)
        self.record_zero: StepRecord | None = None
        found = [] if store is None else [c for c in store.list() if resume_at_most is None or c.step <= resume_at_most]
        if found:
            assert store is not None
            self._restore(store.load(found[-1]), found[-1])
        else:
            self._initialise(initial_weights)

    # ---- state -------------------------------------------------------------------------------------------------------

    def _initialise(self, initial_weights: Mapping[str, Tensor] | None) -> None:
        assert initial_weights is not None or self.spec.init_from is None, "init_from comes with its weights"
        if initial_weights is None:
            self.model.parameters.initialise(self._seed)
        else:
            self._set(self.model.parameters.weights, initial_weights, "initial weights")
            self.model.parameters.refresh_operands()
        state = self.state_digests()
        wanted = None if self.spec.init_from is None else self.spec.init_from.weights
        if wanted is not None and wanted != str(state.weights):
            raise InvalidSpec(
                f"init_from.weights = {wanted}: the weights found have digest {state.weights}",
                errors=[
                    {"field": "init_from.weights", "value": wanted, "problem": "another digest than that of the weights found"}
                ],
            )
        start = genesis(
            Digest.parse(training_digest(self.spec)), self.corpus.manifest.digest(), self.spec.arithmetic, state.weights
        )
        self.record_zero = StepRecord(step=0, previous=start, state=state)
        self.head = self.record_zero.head()

    @_on_stream
    def restore(self, state: State, info: CheckpointInfo) -> None:
        """Go on from the state of a checkpoint, whatever the present one is. Raises InvalidSpec for a state of another model."""
        self._restore(state, info)

    def _restore(self, state: State, info: CheckpointInfo) -> None:
        parameters = self.model.parameters
        self._set(parameters.weights, state.weights, "weights")
        for part, flat in (("first", parameters.first), ("second", parameters.second)):
            prefix = f"{part}/"
            moments = {k.removeprefix(prefix): v for k, v in state.optimizer.items() if k.startswith(prefix)}
            self._set(flat, moments, f"{part} moments")
        parameters.refresh_operands()
        self.step, self.head = info.step, info.head
        self.previous_norm = float_bits(float(state.optimizer[PREVIOUS_NORM]))

    def _set(self, flat: Tensor, tensors: Mapping[str, Tensor], what: str) -> None:
        """Copy named tensors into a flat buffer. Raises InvalidSpec naming the first that is missing, unknown or misshapen."""
        views = dict(self.model.parameters.named(flat))
        for name in sorted(views.keys() | tensors.keys()):
            ours, given = views.get(name), tensors.get(name)
            if ours is None or given is None or ours.shape != given.shape:
                problem = (
                    "is missing" if given is None else "is not in this model" if ours is None
                    else f"has shape {list(given.shape)}; allowed: {list(ours.shape)}"
                )  # fmt: skip
                raise InvalidSpec(
                    f"{what}: tensor {name!r} {problem}", errors=[{"field": "init_from", "value": name, "problem": problem}]
                )
        for name, view in views.items():
            view.copy_(tensors[name])

    @_on_stream
    def state_digests(self) -> StateDigests:
        """Digests of the state after `step`."""
        return self._hashing.begin(self.step, self.previous_norm)()

    @_on_stream
    def save(self, digests: StateDigests | None = None) -> CheckpointInfo:
        """Commit the present state as a checkpoint."""
        assert self.store is not None, "a trainer without a store has nowhere to save"
        parameters = self.model.parameters
        host = {name: tensor.cpu() for name, tensor in parameters.named(parameters.weights)}
        moments = {
            f"{part}/{name}": tensor.cpu()
            for part, flat in (("first", parameters.first), ("second", parameters.second))
            for name, tensor in parameters.named(flat)
        }
        moments[PREVIOUS_NORM] = norm_tensor(self.previous_norm)
        return self.store.save(
            self.step,
            self.head,
            State(host, moments),
            digests or self.state_digests(),
            config_of(self.spec.model, self.spec.sequence_length),
        )

    # ---- steps -------------------------------------------------------------------------------------------------------

    def records(self) -> Iterator[StepRecord]:
        """The records from here on; see `train`. While the state after a step is digested, forward and backward of the next one
        are computed, which read it; the update, which changes it, comes after the record. Between two records `save` and
        `state_digests` are of the step of the last one; who calls `advance` or `restore` must ask for no further record.
        """
        if self.record_zero is not None:
            yield self.record_zero
        interval = self.job.execution.checkpoint_interval
        ahead: _Computed | None = None
        while self.step < self.spec.steps:
            updated = self._update(ahead or self._compute())
            last = self.step == self.spec.steps
            ahead, failure = None, None
            if updated.digests is not None and self._hashing.beside and not last:
                try:
                    ahead = self._compute()
                except Exception as error:  # of the next step: this one has its record first
                    failure = error
            record = self._record(updated)
            if self.store is not None and (last or (interval and self.step % interval == 0)):
                self.save(record.state)
            yield record
            if failure is not None:
                raise failure

    def advance(self) -> StepRecord:
        """One optimizer step. Raises NonFinite; the state in memory is then unusable, checkpoints are untouched."""
        return self._record(self._update(self._compute()))

    @_on_stream
    def _compute(self) -> _Computed:
        """Forward and backward of the next step. Raises NonFinite. The sums are valid until the next call."""
        started = time.perf_counter()
        spec, step = self.spec, self.step + 1
        batch = self.corpus.batch(step, spec.batch.sequences, spec.sequence_length, self._permutation)
        sums = self._gradients(batch, batch.valid)
        loss = float(np.float32(int(sums.loss) * _FIXED_POINT / batch.valid))
        squares = sum((value for _, value in self.model.parameters.sums_of_squares()), 0.0)
        norm = float(np.float32(math.sqrt(squares) / batch.valid)) if math.isfinite(squares) else math.nan
        if int(sums.status) or not math.isfinite(norm):
            what = "a logit or the loss" if int(sums.status) else "the gradient norm"
            raise NonFinite(f"step {step}: {what} is not finite", reason="non_finite", step=step)
        return _Computed(step, batch, sums, loss, norm, time.perf_counter() - started)

    @_on_stream
    def _update(self, computed: _Computed) -> _Updated:
        """The step's update. The digests of the state begin, if they are due."""
        started = time.perf_counter()
        spec, step, batch, sums = self.spec, computed.step, computed.batch, computed.sums
        rate = self._adamw(step, batch.valid, computed.norm, sums)
        self.step = step
        self.previous_norm = float_bits(computed.norm)
        due = step % spec.digest_interval == 0 or step == spec.steps
        digests = self._hashing.begin(step, self.previous_norm) if due else None
        record = StepRecord(
            step=step,
            previous=self.head,
            state=None,
            loss_bits=float_bits(computed.loss),
            grad_norm_bits=float_bits(computed.norm),
            tokens=batch.valid,
            batch=batch.digest(),
            expert_load=canonical_digest({"type": "mok.expert_load/v1", "counts": sums.counts.sum(1).tolist()}),
            learning_rate=rate,
            metrics=self._metrics(batch, sums),
            seconds=computed.seconds + time.perf_counter() - started,
        )
        return _Updated(record, digests)

    @_on_stream
    def _record(self, updated: _Updated) -> StepRecord:
        """The step's record, once the digests are there; `head` is then its."""
        started, record = time.perf_counter(), updated.record
        if updated.digests is not None:
            state = updated.digests()
            record = dataclasses.replace(record, state=state, seconds=record.seconds + time.perf_counter() - started)
        self.head = record.head()
        return record

    def _permutation(self, stream: str, n: int, first: int, count: int) -> list[int]:
        return self.backend.permutation(self._seed, stream, n, first, count)

    def _gradients(self, batch: Batch, valid: int) -> StepSums:
        """Forward and backward of the global batch, a micro-batch of whole groups at a time."""
        spec = self.spec
        size = spec.batch.group_sequences
        groups = -(-spec.batch.sequences // size)
        per_micro_batch = groups // self.job.execution.micro_batches
        real_groups = self._real_tokens(batch)
        parts = []
        for first in range(0, groups, per_micro_batch):
            rows = slice(first * size, min((first + per_micro_batch) * size, spec.batch.sequences))
            parts.append(
                MicroBatch(
                    inputs=self._device(batch.inputs[rows]),
                    labels=self._device(batch.labels[rows]),
                    mask=self._device(batch.mask[rows]),
                    sequences=rows.stop - rows.start,
                    first_group=first,
                    aux_scale=self._aux_scale(valid, real_groups, slice(first, first + per_micro_batch)),
                    z_scale=self._z_scale(valid, int(real_groups.sum())),
                )
            )
        return self._gradient_graph.compute(parts, groups)

    def _real_tokens(self, batch: Batch) -> NDArray[np.int64]:
        """Tokens of each group that are no padding."""
        starts = np.arange(0, self.spec.batch.sequences, self.spec.batch.group_sequences)
        real: NDArray[np.int64] = np.add.reduceat(batch.mask.sum(1, dtype=np.int64), starts)
        return real

    def _device(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array.reshape(-1))).to(self.backend.device)

    def _aux_scale(self, valid: int, real: NDArray[np.int64], groups: slice) -> Tensor | None:
        """The factor of counts[g, e] in the router's gradient, docs/arithmetic.md 10.4."""
        model = self.spec.model
        if model.aux_loss_coefficient == 0:
            return None
        counted = int((real > 0).sum())
        scales = [
            model.aux_loss_coefficient * model.experts * valid / (int(n) * int(n) * counted * model.layers) if n else 0.0
            for n in real[groups]
        ]
        return torch.tensor(scales, dtype=torch.float64).to(torch.float32).to(self.backend.device)

    def _z_scale(self, valid: int, real: int) -> float:
        model = self.spec.model
        return 2.0 * model.z_loss_coefficient * valid / (real * model.layers)

    def _adamw(self, step: int, valid: int, norm: float, sums: StepSums) -> float:
        """AdamW on all parameters; returns the learning rate."""
        spec, parameters = self.spec.optimizer, self.model.parameters
        rate = learning_rate(spec, step, self.spec.steps, self.backend.scalar)
        previous = float_from_bits(self.previous_norm) if step > 1 else None
        scalars = update_scalars(spec, step, self.backend.scalar)
        decayed, size = parameters.layout.decayed, parameters.layout.size
        for part, decay in ((slice(0, decayed), spec.weight_decay), (slice(decayed, size), 0.0)):
            self.backend.adamw(
                parameters.weights[part],
                parameters.first[part],
                parameters.second[part],
                parameters.gradients[part],
                parameters.operands[part] if self.spec.precision == "bf16" else None,
                sums.status,
                grad_scale=1.0 / valid,
                clip_scale=clip_scale(spec, norm, previous),
                lr=rate,
                weight_decay=decay,
                **scalars,
            )
        return rate

    def _metrics(self, batch: Batch, sums: StepSums) -> tuple[tuple[str, float], ...]:
        """The auxiliary losses, reported beside the record (not hashed)."""
        if sums.probabilities is None or sums.z is None:
            return ()
        model = self.spec.model
        real = self._real_tokens(batch)
        used = real > 0
        counts = sums.counts.cpu().numpy()[:, used].astype(np.float64) / real[used][None, :, None]
        means = sums.probabilities.cpu().numpy()[:, used].astype(np.float64) * _FIXED_POINT / real[used][None, :, None]
        balance = float((counts * means).sum(2).mean() * model.experts)
        z = int(sums.z) * _FIXED_POINT / (int(real.sum()) * model.layers)
        return (("aux_loss", balance), ("z_loss", z))

"""Why two executions of a job differ: the first step, the first operation in it, the first tensor and element, both bit patterns.

Knows neither database nor Ray. Two sides are compared, each an executor (kernels, execution spec) with, as a rule, the records of
the run that it stands for:

1. The first step that differs on record, by binary search over the chain's heads: one head stands for all steps before it.
2. Both sides compute again, in step, from the newest state before it that both have in common; every state is compared.
3. The step in which they come apart is executed once more with every operation's outputs digested. Equal prefixes have equal
   digests, so a binary search finds the first operation.
4. Once more, holding the tensors of that operation: equal inputs and another output make it the one.

A replay shows what recurs. What doesn't is said to be so: "step s of A is not reproducible: replays agree with B".
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from mok_service.errors import InvalidSpec, NonFinite, NotFound, SourceDrift, Tampered
from mok_service.kernels.abi import ARITHMETIC
from mok_service.kernels.native import NativeBackend
from mok_service.provenance.chain import StateDigests, StepRecord, check_links, first_difference, genesis
from mok_service.provenance.checkpoint import CheckpointInfo
from mok_service.provenance.compare import changes
from mok_service.provenance.digest import Digest
from mok_service.provenance.elements import element
from mok_service.provenance.manifest import DataManifest
from mok_service.provenance.verify import Ending, compare_ends
from mok_service.spec import ExecutionSpec, JobSpec, TrainingSpec
from mok_service.training.bisect_report import Counts, OperationFinding, Report, TensorFinding, Verdict
from mok_service.training.checkpoint import DTYPES, State
from mok_service.training.data import Corpus, check_manifest
from mok_service.training.loop import Trainer
from mok_service.training.trace import Held, Operation, Trace, TracingBackend

Progress = Callable[[str, int, int], None]  # what is done, step, last step; an exception from it ends the bisect


@dataclass(frozen=True)
class Executor:
    """What computes: how to open its kernels, and an execution spec (of which the micro-batches count)."""

    name: str  # in words, for the report
    open: Callable[[], NativeBackend]
    execution: ExecutionSpec


@dataclass(frozen=True)
class Side:
    """One of the two executions. Without records it is a replay: what its executor computes."""

    name: str
    executor: Executor
    records: Sequence[StepRecord] = ()
    ending: Ending | None = None
    manifest: DataManifest | None = None
    checkpoints: Mapping[int, CheckpointInfo] = field(default_factory=dict)
    load: Callable[[CheckpointInfo], State] | None = None


def side_of(name: str, record: Mapping[str, Any], executor: Executor, load: Callable[[CheckpointInfo], State]) -> Side:
    """The side of a run, by its record; `load` reads a checkpoint and checks it (`CheckpointStore.load`).

    Raises Tampered when the record's chain contradicts itself.
    """
    try:
        rows = [StepRecord.from_dict(row) for row in record["chain"]["records"]]
        data = record["data"]
        manifest = None if data is None else DataManifest.from_document(data["manifest"])
        state = rows[0].state if rows else None
        if rows and (state is None or manifest is None):
            raise Tampered(f"{name}: step record 0 has no initial state, or there is no data manifest", step=0)
        if state is not None and manifest is not None:
            training = Digest.parse(record["spec"]["training_digest"])
            check_links(rows, genesis(training, manifest.digest(), record["arithmetic"]["name"], state.weights))
        infos = [CheckpointInfo.from_dict(row) for row in record["checkpoints"] if not row["deleted_at"]]
        identity = record["identity"]
        ending = Ending(identity["status"], identity["stop_reason"], len(rows) - 1 if rows else None)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Tampered(f"{name}: the record isn't well-formed: {type(error).__name__}: {error}", field="record") from None
    return Side(name, executor, rows, ending, manifest, {info.step: info for info in infos}, load)


def require_same_training(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Raises InvalidSpec naming the first field in which two records' jobs differ: their bits have no reason to be equal."""
    found = changes("training", first["spec"]["training"], second["spec"]["training"])
    if found:
        change = found[0]
        raise InvalidSpec(
            f"{change.field} is {change.first!r} in the first and {change.second!r} in the second: only executions of one job "
            "are compared",
            errors=[{"field": change.field, "value": change.second, "problem": "differs", "allowed": change.first}],
        )


# ---- What is found ----------------------------------------------------------------------------------------------------

class _Found(Exception):
    """The search is over."""

    def __init__(self, verdict: Verdict, message: str, step: int | None = None, operation: OperationFinding | None = None,
                 state: TensorFinding | None = None) -> None:
        super().__init__(message)
        self.verdict, self.message, self.step, self.operation, self.state = verdict, message, step, operation, state


def bisect(
    training: TrainingSpec,
    corpus: Corpus,
    first: Side,
    second: Side,
    *,
    initial_weights: Mapping[str, Tensor] | None = None,
    progress: Progress = lambda *_: None,
) -> Report:
    """Find where two executions of a job come apart.

    REPRODUCED when nothing differs; DIVERGED with the place; INCONCLUSIVE with the reason: the data or the arithmetic are others,
    or what is on record doesn't recur. `initial_weights` come with a job that has `init_from`. Raises InvalidSpec when they don't
    fit, and what `progress` raises.
    """
    search = _Search(training, corpus, [first, second], initial_weights, progress)
    try:
        search.run()
    except _Found as found:
        return Report(found.verdict, found.message, first.name, second.name, found.step, found.operation, found.state,
                      tuple(search.notes), search.counts)
    raise AssertionError("a search ends by finding something")


# ---- The search -------------------------------------------------------------------------------------------------------

class _Search:
    def __init__(self, training: TrainingSpec, corpus: Corpus, sides: list[Side], initial_weights: Mapping[str, Tensor] | None,
                 progress: Progress) -> None:
        self.training, self.corpus, self.sides = training, corpus, sides
        self.initial_weights, self.progress = initial_weights, progress
        self.counts, self.notes = Counts(), list[str]()

    def run(self) -> NoReturn:
        self._require_sources()
        self._complete()
        last = self._first_on_record()                                                                 # 1
        start = self._start(last)
        pair = _Pair(self, start)
        step = pair.advance_to(last)                                                                   # 2
        if step is None:
            self._not_reproducible(last, pair)
        if step < last and all(len(side.records) > step for side in self.sides):
            self.notes.append(f"the records show a difference from step {last} on; the states differ from step {step} on")
        for side, record in zip(self.sides, pair.records, strict=True):
            if not _as_recorded(side, step, record):
                self.notes.append(f"{side.name}: the replay of step {step} isn't what is on record")
        state = pair.state_difference()
        operation = pair.locate(step)                                                                  # 3, 4
        names = " and ".join(side.name for side in self.sides)
        where = f"step {step}" if operation is None else f"step {step}, operation {operation.number} ({operation.operation})"
        message = f"{where}: {names} come apart"
        if operation is None:
            difference = _record_difference(*pair.records)
            message += f" in {difference}, and no operation's output differs: it isn't computed by the kernels"
        elif operation.inputs:
            message += f": {operation.inputs[0].argument} was changed before it, by no operation of this step"
        raise _Found("DIVERGED", message, step, operation, state)

    def _require_sources(self) -> None:
        if self.training.arithmetic != ARITHMETIC:
            message = f"the job's arithmetic is {self.training.arithmetic}, and that of the kernels {ARITHMETIC}"
            raise _Found("INCONCLUSIVE", message)
        for side in self.sides:
            if side.manifest is not None:
                try:
                    check_manifest(side.manifest, self.corpus.manifest)
                except SourceDrift as drift:
                    raise _Found("INCONCLUSIVE", f"{side.name}: {drift.message}") from None

    # ---- 1. The step on record -------------------------------------------------------------------------------------------

    def _complete(self) -> None:
        """A side without records is computed as far as the other's go, or to the first difference."""
        known = [side for side in self.sides if side.records]
        if len(known) != 1:
            return
        other = 1 - self.sides.index(known[0])
        side, made, ending = self.sides[other], list[StepRecord](), Ending("succeeded", None, None)
        trainer = self.trainer(side, side.executor.open())
        records = trainer.records()
        for expected in known[0].records:
            self.progress("compute", expected.step, known[0].records[-1].step)
            try:
                made.append(next(records))
            except NonFinite:
                ending = Ending("failed", "non_finite", None)
                break
            self.counts.steps += 1
            if made[-1].head() != expected.head():
                break
        else:
            ending = dataclasses.replace(known[0].ending or ending)
        step = made[-1].step if made else None
        self.sides[other] = dataclasses.replace(side, records=made, ending=dataclasses.replace(ending, step=step))

    def _first_on_record(self) -> int:
        """The first step in which what is on record differs; ends the search when none does. Without records, the last step."""
        first, second = (side.records for side in self.sides)
        if not first and not second:
            return self.training.steps
        common = min(len(first), len(second))

        def differs(step: int) -> bool:
            self.counts.heads += 1
            return first[step].head() != second[step].head()

        low = bisect_left(range(common), True, key=differs)
        states = [self._known_states(side) for side in self.sides]
        both = sorted(states[0].keys() & states[1].keys())
        hidden = [step for step in both if step < low and states[0][step] != states[1][step]]
        if hidden:
            return hidden[0]
        if low < common:
            return low
        endings = [side.ending or Ending("succeeded", None, common - 1) for side in self.sides]
        shorter = min(endings, key=lambda ending: -1 if ending.step is None else ending.step)
        if len(first) != len(second) and shorter.stop_reason == "non_finite":
            return common
        finding = compare_ends(endings[0], endings[1])
        verdict: Verdict = "REPRODUCED" if finding.verdict == "REPRODUCED" else "INCONCLUSIVE"
        raise _Found(verdict, finding.message, finding.step)

    def _known_states(self, side: Side) -> dict[int, StateDigests]:
        known = {record.step: record.state for record in side.records if record.state is not None}
        return known | {step: info.state for step, info in side.checkpoints.items() if step < len(side.records)}

    # ---- 2. Where to begin -----------------------------------------------------------------------------------------------

    def _start(self, last: int) -> tuple[State, CheckpointInfo] | None:
        """The newest checkpoint before the step whose state both sides had; None for the initial state."""
        known = [self._known_states(side) for side in self.sides]
        common = {step for step in known[0].keys() & known[1].keys() if 0 < step < last and known[0][step] == known[1][step]}
        for step in sorted(common, reverse=True):
            for side in self.sides:
                info = side.checkpoints.get(step)
                if info is None or side.load is None or (info.state, info.head) != (known[0][step], side.records[step].head()):
                    continue
                try:
                    return side.load(info), info
                except (Tampered, NotFound, OSError) as error:
                    self.notes.append(f"{side.name}: the checkpoint of step {step} can't be used: {error}")
        return None

    def trainer(self, side: Side, backend: NativeBackend) -> Trainer:
        job = JobSpec(training=self.training, execution=side.executor.execution)
        return Trainer(job, self.corpus, backend, initial_weights=self.initial_weights)

    def _not_reproducible(self, last: int, pair: _Pair) -> NoReturn:
        """The replays agree with each other through the step in which the records differ."""
        if not any(side.records for side in self.sides):
            raise _Found("REPRODUCED", f"equal through step {last}, the last one", last)
        agree = [_as_recorded(side, last, record) for side, record in zip(self.sides, pair.records, strict=True)]
        names = [side.name for side in self.sides]
        if all(agree):
            raise _Found("INCONCLUSIVE", f"step {last}: the replays agree, and with both records too as far as these go", last)
        if any(agree):
            odd, even = (names[1], names[0]) if agree[0] else (names[0], names[1])
            raise _Found("INCONCLUSIVE", f"step {last} of {odd} is not reproducible: replays agree with {even}", last)
        raise _Found("INCONCLUSIVE", f"step {last} of {names[0]} and of {names[1]} is not reproducible: replays agree with each "
                                     "other, and with neither", last)


def _as_recorded(side: Side, step: int, record: StepRecord | None) -> bool:
    """Whether what was computed is what the side has on record: the step's body, and the state of a checkpoint."""
    if step >= len(side.records):
        ending = side.ending
        return record is None or ending is None or ending.stop_reason != "non_finite"
    if record is None:
        return False
    expected = side.records[step]
    info = side.checkpoints.get(step)
    state = record.state if info is not None else None
    body = record.body() if expected.state is not None else {**record.body(), "state": None}
    return body == expected.body() and (info is None or state is None or state == info.state)


def _record_difference(first: StepRecord | None, second: StepRecord | None) -> str:
    if first is None or second is None:
        return "whether it is finite"
    difference = first_difference(first, second)
    return "nothing" if difference is None else f"{difference[0]} ({difference[1]} and {difference[2]})"


class _Pair:
    """Both sides' trainers, in step, and the state before the present one."""

    def __init__(self, search: _Search, start: tuple[State, CheckpointInfo] | None) -> None:
        self._search = search
        self._backends = [TracingBackend(side.executor.open()) for side in search.sides]
        self._trainers = self._set_up()
        if start is not None:
            for trainer in self._trainers:
                trainer.restore(*start)
        self._before = _Snapshot(self._trainers[0])
        self.records: list[StepRecord | None] = [trainer.record_zero for trainer in self._trainers]

    def _set_up(self) -> list[Trainer]:
        """Both trainers; what they compute while they're made is compared too. Step 0 is the initial state."""
        traces, trainers = [], []
        for side, backend in zip(self._search.sides, self._backends, strict=True):
            with backend.tracing() as trace:
                trainers.append(self._search.trainer(side, backend))
            traces.append(trace)

        def again(side: int) -> None:
            self._search.trainer(self._search.sides[side], self._backends[side])

        finding = self._first_operation(0, traces, again)
        if finding is not None:
            place = f"step 0, operation {finding.number} ({finding.operation})"
            raise _Found("DIVERGED", f"{place}: the two come apart while the model is set up", 0, finding)
        return trainers

    def advance_to(self, last: int) -> int | None:
        """Compute until the two differ; the step in which they do, or None when they're equal through the last."""
        search = self._search
        for step in range(self._trainers[0].step + 1, last + 1):
            search.progress("replay", step, last)
            self._before.take(self._trainers[0])
            self.records = [_advance(trainer) for trainer in self._trainers]
            search.counts.steps += 2
            if self.records[0] != self.records[1] and _bodies(self.records)[0] != _bodies(self.records)[1]:
                return step
            if step < last and not all(_as_recorded(*pair) for pair in zip(search.sides, [step] * 2, self.records, strict=True)):
                names = " and of ".join(side.name for side in search.sides)
                raise _Found("INCONCLUSIVE", f"step {step} of {names} is not reproducible: replays agree with each other, and "
                                             "not with the records", step)
        return None

    def state_difference(self) -> TensorFinding | None:
        """The first tensor of the state after the step that differs."""
        if None in self.records:
            return None
        parameters = [trainer.model.parameters for trainer in self._trainers]
        for part in ("weights", "first", "second"):
            sides = [dict(p.named(getattr(p, part))) for p in parameters]
            for name in sorted(sides[0], key=str.encode):
                found = _tensor_finding(part, name, *(side[name].cpu() for side in sides))
                if found is not None:
                    return found
        return None

    # ---- 3 and 4. The operation ------------------------------------------------------------------------------------------

    def locate(self, step: int) -> OperationFinding | None:
        """The first operation of the step whose outputs differ; None when no operation's do."""
        traces, records = [], list[StepRecord | None]()
        for trainer, backend in zip(self._trainers, self._backends, strict=True):
            self._search.progress("trace", step, step)
            self._before.restore(trainer)
            with backend.tracing() as trace:
                records.append(_advance(trainer))
            self._search.counts.steps += 1
            traces.append(trace)
        bodies = _bodies(records)
        if bodies[0] == bodies[1]:
            self._gone(step, records)

        def again(side: int) -> None:
            _advance(self._trainers[side])
            self._search.counts.steps += 1

        for trainer in self._trainers:
            self._before.restore(trainer)
        return self._first_operation(step, traces, again)

    def _gone(self, step: int, records: list[StepRecord | None]) -> NoReturn:
        names = [side.name for side in self._search.sides]
        odd = [n for n, before, now in zip(names, self.records, records, strict=True) if _bodies([before]) != _bodies([now])]
        raise _Found("INCONCLUSIVE", f"step {step} of {' and '.join(odd)} is not reproducible: the replays differed once, and "
                                     "agreed when the step was executed again", step)

    def _first_operation(self, step: int, traces: list[Trace], again: Callable[[int], None]) -> OperationFinding | None:
        search = self._search
        search.counts.operation_digests += sum(trace.digests for trace in traces)
        first, second = traces
        length = min(len(first.prefixes), len(second.prefixes))

        def differs(operation: int) -> bool:
            search.counts.prefixes += 1
            return first.prefixes[operation] != second.prefixes[operation]

        low = bisect_left(range(length), True, key=differs)
        if low == length and len(first.prefixes) == len(second.prefixes):
            return None
        operations = [trace.operations[low] if low < len(trace.operations) else None for trace in traces]
        a, b = operations
        if a is None or b is None or (a.name, a.place, a.outputs) != (b.name, b.place, b.outputs):
            search.notes.append(f"operation {low} is another one on either side ({_told(a)}; {_told(b)}): the two take a step "
                                "apart in other ways (micro-batches), so that no operation can be named")
            return None
        held = []
        for side, backend in enumerate(self._backends):
            model = self._trainers[side].model if step else None
            with backend.holding(low, model) as tensors:
                again(side)
            held.append(tensors)
        outputs, inputs = (_findings(held, which) for which in ("outputs", "inputs"))
        if not outputs:
            raise _Found("INCONCLUSIVE", f"step {step} is not reproducible: operation {low} ({_told(a)}) gave two results once, "
                                         "and one when it was executed again", step)
        return OperationFinding(low, max(len(t.operations) for t in traces), a.name, a.place, outputs, inputs)


def _told(operation: Operation | None) -> str:
    return "none" if operation is None else f"{operation.name}, {operation.place}"


def _advance(trainer: Trainer) -> StepRecord | None:
    """A step, with the digests of the whole state whatever the digest interval; None when it isn't finite."""
    try:
        record = trainer.advance()
    except NonFinite:
        return None
    return record if record.state is not None else dataclasses.replace(record, state=trainer.state_digests())


def _bodies(records: Sequence[StepRecord | None]) -> list[dict[str, Any] | None]:
    return [None if record is None else record.body() for record in records]


def _findings(held: Sequence[Held], which: str) -> tuple[TensorFinding, ...]:
    return tuple(_held_findings(held, which))


def _held_findings(held: Sequence[Held], which: str) -> Iterator[TensorFinding]:
    first, second = (getattr(side, which) for side in held)
    for argument in first:
        a, b = first[argument], second[argument]
        found = _tensor_finding(argument, held[0].names.get(argument, ""), a, b)
        if found is None:
            continue
        parts = held[0].parts.get(argument, []) if a.shape == b.shape else []
        at = int(_unequal(a, b)[0]) if parts else 0
        part = next((p for p in parts if p.offset <= at < p.offset + p.count), None)
        if part is not None:
            pieces = (tensor.reshape(-1)[part.offset : part.offset + part.count].view(part.shape) for tensor in (a, b))
            kind = found.name.split(" of ")[0].removesuffix("s")
            inner = _tensor_finding(argument, f"{kind} of {part.name}", *pieces)
            assert inner is not None
            found = dataclasses.replace(inner, differing=found.differing, elements=found.elements)
        yield found


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _unequal(first: Tensor, second: Tensor) -> Tensor:
    """Row-major positions of the elements whose bits differ."""
    bits = [tensor.contiguous().reshape(-1).view(_INTEGERS[tensor.element_size()]) for tensor in (first, second)]
    return torch.nonzero(bits[0] != bits[1]).reshape(-1)


def _tensor_finding(argument: str, name: str, first: Tensor, second: Tensor) -> TensorFinding | None:
    if first.shape != second.shape:
        shared = tuple(map(min, zip(first.shape, second.shape, strict=True)))
        first, second = (tensor[tuple(map(slice, shared))] for tensor in (first, second))
    unequal = _unequal(first, second)
    if unequal.numel() == 0:
        return None
    at = int(unequal[0])
    both = (bytes(t.contiguous().reshape(-1)[at : at + 1].view(torch.uint8).tolist()) for t in (first, second))
    found = element(DTYPES[first.dtype], tuple(first.shape), at, *both)
    return TensorFinding(argument, name, int(unequal.numel()), first.numel(), found)


class _Snapshot:
    """A trainer's state in host memory, to be set again on either side."""

    def __init__(self, trainer: Trainer) -> None:
        self._flat = [flat.detach().to("cpu", copy=True) for flat in _flats(trainer)]
        self._scalars = (trainer.step, trainer.head, trainer.previous_norm)

    def take(self, trainer: Trainer) -> None:
        for kept, flat in zip(self._flat, _flats(trainer), strict=True):
            kept.copy_(flat)
        self._scalars = (trainer.step, trainer.head, trainer.previous_norm)

    def restore(self, trainer: Trainer) -> None:
        with trainer.backend.active():
            for kept, flat in zip(self._flat, _flats(trainer), strict=True):
                flat.copy_(kept)
            trainer.model.parameters.refresh_operands()
        trainer.step, trainer.head, trainer.previous_norm = self._scalars


def _flats(trainer: Trainer) -> tuple[Tensor, Tensor, Tensor]:
    parameters = trainer.model.parameters
    return parameters.weights, parameters.first, parameters.second

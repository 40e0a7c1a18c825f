"""Replaying parts of a run: from a state on record to the next one, step by step. Knows no database.

The service's audits and `mok verify FOLDER --level audit` run this very code, on whatever device is there: the arithmetic doesn't
depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from mok_service.errors import Diverged
from mok_service.kernels.native import NativeBackend
from mok_service.provenance.audit import Segment
from mok_service.provenance.chain import StateDigests, StepRecord
from mok_service.provenance.checkpoint import CheckpointInfo
from mok_service.provenance.verify import Finding
from mok_service.spec import JobSpec
from mok_service.training.checkpoint import State
from mok_service.training.data import Corpus
from mok_service.training.loop import Trainer


def replay(
    job: JobSpec,
    corpus: Corpus,
    backend: NativeBackend,
    segments: Sequence[Segment],
    checkpoints: Mapping[int, CheckpointInfo],
    load: Callable[[CheckpointInfo], State],
    *,
    initial_weights: Mapping[str, Tensor] | None = None,
) -> Iterator[StepRecord]:
    """The records of each segment, in order of steps, computed again.

    `checkpoints` are those on record, by step, and `load` reads one and checks it (`CheckpointStore.load`). A segment begins with
    the state on record at its start, or with the initial state for step 0. Comparing the records with those on file is the
    caller's; the state that a segment ends with is compared here with the one on record, once its last record is taken. Raises
    Diverged (`detail["finding"]`) when that is another, Tampered for a checkpoint whose bytes aren't those on record, NonFinite.
    """
    trainer = Trainer(job, corpus, backend, initial_weights=initial_weights)
    for segment in sorted(segments):
        if segment.start:
            info = checkpoints[segment.start]
            trainer.restore(load(info), info)
        elif trainer.record_zero is not None:
            yield trainer.record_zero
        state: StateDigests | None = None
        while trainer.step < segment.end:
            record = trainer.advance()
            state = record.state
            yield record
        stored = checkpoints.get(segment.end)
        if stored is not None:
            _compare_state(segment.end, stored.state, state or trainer.state_digests())


def _compare_state(step: int, expected: StateDigests, got: StateDigests) -> None:
    for part, digest in expected.as_dict().items():
        have = got.as_dict()[part]
        if have != digest:
            message = f"step {step}: the {part} in the checkpoint have digest {digest}, computing them again gave {have}"
            raise Diverged(message, reason="diverged", finding=Finding("DIVERGED", message, part, step, digest, have))

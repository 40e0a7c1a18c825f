"""Opens a bisect for an attempt: two runs on record, or a run and a replay of it, computed again on this machine.

It has no step records and commits no checkpoint: what it is at, and its conclusion, is all that it tells. So an attempt after a
crash or a pause begins anew, and comes to the same conclusion.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from mok_service.errors import Tampered
from mok_service.kernels import load_backend
from mok_service.provenance.bisection import Conclusion, Doing, finding_of
from mok_service.provenance.chain import StepRecord
from mok_service.provenance.checkpoint import CheckpointInfo
from mok_service.provenance.verify import Finding
from mok_service.spec import ExecutionSpec
from mok_service.training.bisect import Executor, Side, bisect, side_of
from mok_service.training.checkpoint import CheckpointStore
from mok_workers.attempt import Abandoned, Control
from mok_workers.messages import Compared, Payload
from mok_workers.opening import Opened

PARTS = {"compute": "computing the replay's records", "replay": "replaying both", "trace": "tracing both sides' operations in"}


class BisectTraining:
    """Finds where two executions come apart; see `mok_workers.attempt.Training`. It reads the runs' checkpoints in place."""

    def __init__(self, payload: Payload, control: Control, compared: tuple[Compared, Compared]) -> None:
        self._control, self._compared = control, compared
        self._opened = opened = Opened.of(payload, control)
        self.manifest, self.environment, self.placement = opened.manifest, opened.environment, opened.placement
        self.resumed_from: int | None = None
        self._part: str | None = None

    def checkpoints(self) -> list[CheckpointInfo]:
        return []

    def records(self) -> Iterator[StepRecord]:
        """None: the conclusion is told by `Control.conclude`."""
        sides = list[Side]()
        # That the second run's record contradicts itself says nothing about the first, which is the one that is verified.
        for side in self._compared:
            try:
                sides.append(_side(side))
            except Tampered as fault:
                message = f"the record of {side.name} contradicts itself: {fault.message}"
                finding = Finding("INCONCLUSIVE" if sides else "TAMPERED", message, "chain", fault.detail.get("step"))
                self._control.conclude(Conclusion(finding, None))
                return
        opened = self._opened
        report = bisect(opened.job.training, opened.corpus, sides[0], sides[1], initial_weights=opened.initial_weights,
                        progress=self._progress).as_dict()
        self._control.log(f"{report['verdict']} {report['message']}", step=report["step"])
        self._control.conclude(Conclusion(finding_of(report), report))
        yield from ()

    def _progress(self, what: str, step: int, last: int) -> None:
        if self._control.stop_wanted() is not None:  # a pause too: there is nothing to go on from
            raise Abandoned
        if what != self._part:
            self._part = what
            self._control.log(f"{PARTS[what]} step {step}" + (f" up to {last}" if last > step else ""), step=step)
        self._control.doing(Doing(what, step, last))


def _side(side: Compared) -> Side:
    """Raises Tampered when the record's chain contradicts itself."""
    execution = ExecutionSpec.model_validate(side.execution)
    words = f"{execution.device}, {execution.threads or 'all'} threads, {execution.micro_batches} micro-batches"
    executor = Executor(words, partial(load_backend, execution.device, threads=execution.threads), execution)
    if side.record is None or side.checkpoints is None:
        return Side(f"{side.name} ({words})", executor)
    return side_of(side.name, side.record, executor, CheckpointStore(Path(side.checkpoints)).load)

"""Opens an audit for an attempt: the segments of another run that are to be replayed, from that run's checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from mok_service.errors import Tampered, TrainingFailed
from mok_service.provenance.audit import Segment
from mok_service.provenance.chain import StepRecord
from mok_service.provenance.checkpoint import CheckpointInfo
from mok_service.provenance.verify import Finding
from mok_service.training.audit import replay
from mok_workers.attempt import Control
from mok_workers.messages import Payload
from mok_workers.opening import Opened


class AuditTraining:
    """Replays segments; see `mok_workers.attempt.Training`. It reads the audited run's checkpoints, and commits none."""

    def __init__(self, payload: Payload, control: Control, segments: tuple[Segment, ...]) -> None:
        self._control, self._segments = control, segments
        self._opened = opened = Opened.of(payload, control)
        self._on_record = {info.step: info for info in payload.on_record}
        self.manifest, self.environment, self.placement = opened.manifest, opened.environment, opened.placement
        self.resumed_from: int | None = None

    def checkpoints(self) -> list[CheckpointInfo]:
        return []

    def records(self) -> Iterator[StepRecord]:
        opened, last = self._opened, self._segments[-1].end
        found = replay(opened.job, opened.corpus, opened.backend, self._segments, self._on_record, opened.store.load,
                       initial_weights=opened.initial_weights)
        starts = {segment.first_record: segment for segment in self._segments}
        try:
            for record in found:
                if record.step in starts:
                    segment = starts[record.step]
                    self._control.log(f"replaying the steps after {segment.start} up to {segment.end}", step=segment.start)
                yield record
                if record.step != last and self._control.stop_wanted() is not None:
                    return
        except Tampered as fault:
            raise TrainingFailed(fault.message, reason="tampered", finding=Finding.tampered(fault, "checkpoint")) from fault

"""What travels between the scheduler and an attempt: frozen values, free of any database and of Ray."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, Literal

from mok_service.lifecycle import AttemptEnd, StopReason
from mok_service.placement import Devices
from mok_service.provenance.audit import Segment
from mok_service.provenance.bisection import Conclusion, Doing
from mok_service.provenance.chain import StepRecord
from mok_service.provenance.checkpoint import CheckpointInfo
from mok_service.provenance.manifest import DataManifest
from mok_service.provenance.verify import Finding
from mok_service.training.sources import Remote

RECORDS_A_REPLY_MAX: Final = 256
LINES_A_REPLY_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class Compared:
    """A side of a bisect: a run on record, or (`record` None) a replay of the first side's."""

    name: str
    execution: dict[str, Any]        # the resolved ExecutionSpec by which it's computed again, as JSON
    record: dict[str, Any] | None    # of provenance/record.py: runs.record_to_bisect
    checkpoints: str | None          # the run's checkpoint folder


@dataclass(frozen=True, slots=True)
class Payload:
    """All that a worker needs to execute one attempt. No database URL, no key."""

    name: str                    # run id and attempt: unique, names the placement group
    job: dict[str, Any]          # the resolved JobSpec as JSON, {"training", "execution"}
    data_roots: tuple[str, ...]
    checkpoints: str             # the run's checkpoint folder
    manifest: DataManifest | None  # what the data must be, once an earlier attempt recorded it
    last_step: int | None        # last step record on file; the attempt must not leave a gap after it
    on_record: tuple[CheckpointInfo, ...]  # checkpoints on file: one that says anything else of itself is damaged
    lease_seconds: float
    node: str                    # whose devices it gets, as `Cluster.nodes` names it
    devices: Devices
    segments: tuple[Segment, ...] | None = None  # an audit: what it replays; folder and checkpoints are the audited run's
    bisect: tuple[Compared, Compared] | None = None  # a bisect: what it compares; no checkpoint of its own is on record
    remote: Remote | None = None  # what remote data may be fetched, and how; None: none

    @property
    def final_step(self) -> int:
        """The step whose record is the last."""
        return int(self.job["training"]["steps"]) if self.segments is None else self.segments[-1].end


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the attempt's log; `sequence` counts from 0."""

    sequence: int
    at: datetime
    level: Literal["debug", "info", "warning", "error"]
    message: str
    step: int | None


@dataclass(frozen=True, slots=True)
class Started:
    """What the worker found, before its first step."""

    environment: dict[str, Any]
    placement: dict[str, Any]
    manifest: DataManifest
    resumed_from: int | None     # step of the checkpoint


@dataclass(frozen=True, slots=True)
class Seen:
    """How much of an attempt its caller has on file. Asking again with the same value gives the same things again."""

    started: bool = False
    step: int = -1
    checkpoint: int = -1
    lines: int = 0               # log lines with a lower sequence
    doing: Doing | None = None   # what a bisect was at


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of an attempt: what came after `seen`, at most `max_records` of it, after at most `max_seconds`.

    The attempt ends by itself when no other question comes within `lease_seconds`.
    """

    seen: Seen
    max_records: int
    max_seconds: float
    lease_seconds: float


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt failed. `reason` is set when trying again would fail the same way: the run then fails with it."""

    end: AttemptEnd
    message: str
    reason: StopReason | None = None
    finding: Finding | None = None   # of an audit: what it shows about the audited run


@dataclass(frozen=True, slots=True)
class Reply:
    """What came after `Seen`: records in order of steps, each checkpoint with or after its record.

    `status` other than running comes with the last of everything: `done` (a training: with the final checkpoint), `stopped`,
    `failed`. A bisect has no records: it tells what it is at, and with `done` its conclusion.
    """

    started: Started | None
    records: tuple[StepRecord, ...]
    lines: tuple[Line, ...]
    checkpoints: tuple[CheckpointInfo, ...]
    status: Literal["running", "done", "stopped", "failed"]
    final: CheckpointInfo | None = None
    failure: Failure | None = None
    doing: Doing | None = None
    conclusion: Conclusion | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to put on file."""
        news = self.started or self.records or self.lines or self.checkpoints or self.doing
        return not news and self.status == "running"

    def after(self, seen: Seen) -> Seen:
        """What the caller has once it put this on file."""
        return replace(
            seen,
            started=seen.started or self.started is not None,
            step=self.records[-1].step if self.records else seen.step,
            checkpoint=max((c.step for c in self.checkpoints), default=seen.checkpoint),
            lines=self.lines[-1].sequence + 1 if self.lines else seen.lines,
            doing=self.doing or seen.doing,
        )


@dataclass(frozen=True, slots=True)
class Refusal:
    """A process that is up won't execute an attempt, and has done nothing of it: another one must."""

    reason: str


@dataclass(frozen=True, slots=True)
class Resting:
    """What a process without an attempt says of itself."""

    resident_bytes: int
    available: float             # the part of its machine's memory that is free, 0 to 1


@dataclass(frozen=True, slots=True)
class Lost:
    """The attempt is gone without a word: its process, its node, or what Ray knew of it."""

    end: AttemptEnd
    message: str

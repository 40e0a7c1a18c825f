"""The values that the use cases take and return: frozen, and free of any database."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Generic, Literal, Self, TypeVar, get_args

from mok_service.lifecycle import (
    FINAL,
    AttemptEnd,
    DesiredState,
    RunStatus,
    StopReason,
    VerificationLevel,
    VerificationStatus,
    VerificationVerdict,
)
from mok_service.placement import Held, Room
from mok_service.provenance.chain import StepRecord
from mok_service.provenance.checkpoint import CheckpointInfo
from mok_service.provenance.digest import Digest
from mok_service.provenance.verify import Finding
from mok_service.spec import ExecutionSpec

RunKind = Literal["original", "reproduction", "audit", "bisect"]
RUN_KINDS: Final[tuple[str, ...]] = get_args(RunKind)
EventType = Literal["run.status", "step", "progress", "checkpoint", "log", "verification"]
LogLevel = Literal["debug", "info", "warning", "error"]
T = TypeVar("T")


def time_text(at: datetime | None) -> str | None:
    """UTC with microseconds, as REST shows it: `2026-12-01T10:00:00.000000Z`."""
    return None if at is None else at.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def time_from_text(text: str | None) -> datetime | None:
    """The inverse of `time_text`."""
    return None if text is None else datetime.fromisoformat(text)


def finite_or_none(value: float | None) -> float | None:
    """JSON has no NaN and no infinity; where bits are recorded, they stand beside the number."""
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a list, newest first. `next_cursor` is None on the last page."""

    items: tuple[T, ...]
    next_cursor: str | None


@dataclass(frozen=True, slots=True)
class Run:
    """One execution of a job."""

    id: str
    tenant: str
    job_id: str
    kind: RunKind
    reproduces: str | None          # the run that a reproduction is compared with
    status: RunStatus
    desired_state: DesiredState
    stop_reason: StopReason | None
    message: str | None             # why it failed, as a sentence
    verdict: VerificationVerdict | None  # of a reproduction, once it is known
    execution: ExecutionSpec
    attempt: int                    # the current or last attempt; 0 before the first claim
    failures: int                   # attempts that count against execution.max_attempts
    step: int | None                # last step record stored; None before record 0
    steps: int                      # optimizer steps that the job asks for
    head: Digest | None             # digest of that record
    weights: Digest | None          # of the final state; set when the run succeeds
    worker: str | None              # who holds the lease
    created_at: datetime
    updated_at: datetime
    started_at: datetime | None     # first claim
    ended_at: datetime | None
    retry_at: datetime | None       # not claimed again before
    queue_deadline_at: datetime | None
    run_deadline_at: datetime | None

    @property
    def ended(self) -> bool:
        return self.status in FINAL

    def as_dict(self) -> dict[str, Any]:
        """The REST shape."""
        return {
            "id": self.id, "job": self.job_id, "kind": self.kind, "reproduces": self.reproduces, "status": self.status,
            "desired_state": self.desired_state, "stop_reason": self.stop_reason, "message": self.message,
            "verdict": self.verdict, "attempt": self.attempt, "failures": self.failures, "step": self.step,
            "steps": self.steps, "head": None if self.head is None else str(self.head),
            "weights": None if self.weights is None else str(self.weights), "worker": self.worker,
            "execution": self.execution.model_dump(mode="json"), "created_at": time_text(self.created_at),
            "updated_at": time_text(self.updated_at), "started_at": time_text(self.started_at),
            "ended_at": time_text(self.ended_at), "retry_at": time_text(self.retry_at),
            "queue_deadline_at": time_text(self.queue_deadline_at), "run_deadline_at": time_text(self.run_deadline_at),
            "tenant": self.tenant,
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        """The inverse of `as_dict`."""
        same = ("id", "tenant", "kind", "reproduces", "status", "desired_state", "stop_reason", "message", "verdict", "attempt",
                "failures", "step", "steps", "worker")
        times = ("created_at", "updated_at", "started_at", "ended_at", "retry_at", "queue_deadline_at", "run_deadline_at")
        fields: dict[str, Any] = {name: value[name] for name in same} | {name: time_from_text(value[name]) for name in times}
        for name in ("head", "weights"):
            fields[name] = None if value[name] is None else Digest.parse(value[name])
        return cls(job_id=value["job"], execution=ExecutionSpec.model_validate(value["execution"]), **fields)


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to execute one attempt. The token fences: a write under another token raises LeaseLost."""

    run_id: str
    attempt: int
    token: str
    expires_at: datetime
    lease_seconds: float = 30.0
    tenant: str = "local"
    node: str | None = None          # where it is to run; None where its scheduler counts only devices


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that an attempt logged. `sequence` counts from 0 in each attempt, so that a line sent twice is stored once."""

    sequence: int
    at: datetime
    level: LogLevel
    message: str
    step: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return {"sequence": self.sequence, "at": time_text(self.at), "level": self.level, "message": self.message,
                "step": self.step}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self:
        at = time_from_text(value["at"])
        assert at is not None, "a log line has a time"
        return cls(value["sequence"], at, value["level"], value["message"], value.get("step"))


@dataclass(frozen=True, slots=True)
class AppendResult:
    """What a write under a lease tells the scheduler. `stop` is the run's stop reason once it has one: the attempt must be
    stopped (with a checkpoint if it is `user_paused`) and then `finish` called; None means go on."""

    stop: StopReason | None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt that ran to its end wants the run to end. The run's own stop reason wins if it already has one."""

    status: Literal["succeeded", "failed", "cancelled", "paused"]
    stop_reason: StopReason
    message: str | None = None
    weights: Digest | None = None   # of the final state; for succeeded
    head: Digest | None = None      # of the last step record; for succeeded
    finding: Finding | None = None  # what a verification found that its records don't show
    report: dict[str, Any] | None = None  # of a bisect, beside its finding


# What a cluster has in all, by device kind ({"cpu": 1, "cuda": 8}), or a judge: where is room beside those that are active?
Capacity = Mapping[str, int] | Callable[[ExecutionSpec, Sequence[Held]], Room | None]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of a run on hardware."""

    id: str
    run_id: str
    attempt: int
    worker: str
    claimed_at: datetime
    started_at: datetime | None      # when the actor was about to be made
    running_at: datetime | None      # when the worker was ready to step
    ended_at: datetime | None
    end: AttemptEnd | None
    message: str | None
    from_step: int | None            # last step stored when it was claimed
    from_head: Digest | None
    last_step: int | None            # last step that it stored or confirmed
    environment: dict[str, Any] | None
    placement: dict[str, Any] | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id, "run": self.run_id, "attempt": self.attempt, "worker": self.worker,
            "claimed_at": time_text(self.claimed_at), "started_at": time_text(self.started_at),
            "running_at": time_text(self.running_at), "ended_at": time_text(self.ended_at), "end": self.end,
            "message": self.message, "from_step": self.from_step,
            "from_head": None if self.from_head is None else str(self.from_head), "last_step": self.last_step,
            "environment": self.environment, "placement": self.placement,
        }


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A step record as stored, and which attempt stored it when."""

    record: StepRecord
    attempt: int
    at: datetime

    def as_dict(self) -> dict[str, Any]:
        """Body, head and unhashed columns, flat."""
        r = self.record
        return {
            "step": r.step, "attempt": self.attempt, "at": time_text(self.at), "loss": finite_or_none(r.loss),
            "loss_bits": r.loss_bits, "grad_norm": finite_or_none(r.grad_norm), "grad_norm_bits": r.grad_norm_bits,
            "tokens": r.tokens, "batch": None if r.batch is None else str(r.batch),
            "expert_load": None if r.expert_load is None else str(r.expert_load),
            "state": None if r.state is None else r.state.as_dict(), "previous": str(r.previous), "head": str(r.head()),
            "seconds": finite_or_none(r.seconds), "learning_rate": finite_or_none(r.learning_rate),
            "metrics": {name: finite_or_none(value) for name, value in r.metrics},
        }


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A checkpoint on record. `deleted_at` is set when its bytes are gone; the digests stay."""

    run_id: str
    info: CheckpointInfo
    attempt: int
    created_at: datetime
    deleted_at: datetime | None

    def as_dict(self) -> dict[str, Any]:
        return {**self.info.as_dict(), "size": self.info.size, "run": self.run_id, "attempt": self.attempt,
                "created_at": time_text(self.created_at), "deleted_at": time_text(self.deleted_at)}


@dataclass(frozen=True, slots=True)
class Event:
    """One change of a run; `number` counts from 1 in each run without gaps, and is SSE's Last-Event-ID."""

    run_id: str
    number: int
    type: EventType
    payload: dict[str, Any]
    at: datetime

    def as_dict(self) -> dict[str, Any]:
        return {"run": self.run_id, "number": self.number, "type": self.type, "payload": self.payload, "at": time_text(self.at)}


@dataclass(frozen=True, slots=True)
class StoredLog:
    """A log line on record; `number` counts from 1 over all attempts of a run."""

    run_id: str
    number: int
    attempt: int
    line: LogLine

    def as_dict(self) -> dict[str, Any]:
        return {"run": self.run_id, "number": self.number, "attempt": self.attempt, **self.line.as_dict()}


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of a verification is done, in steps. A bisect's goes back where another part of it begins."""

    done: int
    of: int

    def as_dict(self) -> dict[str, int]:
        return {"done": self.done, "of": self.of}


@dataclass(frozen=True, slots=True)
class Verification:
    """A verification of a run: asked for, carried out, and its verdict; for anything but a good one where and what."""

    id: str
    run_id: str                      # the run that is verified
    executed_by: str | None          # the run that computes it again; None for a check
    level: VerificationLevel
    status: VerificationStatus
    progress: Progress | None        # None for a check
    plan: dict[str, Any] | None      # of an audit, or a bisect
    verdict: VerificationVerdict | None  # None until it ends, and when it's cancelled
    field: str | None
    step: int | None
    expected: str | None
    got: str | None
    message: str | None
    report: dict[str, Any] | None    # of an audit that found nothing; of a bisect
    at: datetime
    ended_at: datetime | None
    log_index: int | None            # of its attestation, which it gets soon after it has ended

    def as_dict(self) -> dict[str, Any]:
        """The REST shape."""
        return {
            "id": self.id, "run": self.run_id, "executed_by": self.executed_by, "level": self.level, "status": self.status,
            "progress": None if self.progress is None else self.progress.as_dict(), "plan": self.plan, "verdict": self.verdict,
            "field": self.field, "step": self.step, "expected": self.expected, "got": self.got, "message": self.message,
            "report": self.report, "at": time_text(self.at), "ended_at": time_text(self.ended_at), "log_index": self.log_index,
        }


@dataclass(frozen=True, slots=True)
class Node:
    """A machine as a scheduler last saw it: what it has in all, by device kind."""

    name: str
    capacity: Mapping[str, int]
    labels: Mapping[str, str] = field(default_factory=dict)
    worker: str | None = None            # which scheduler reported it
    heartbeat_at: datetime | None = None

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "capacity": dict(self.capacity), "labels": dict(self.labels), "worker": self.worker,
                "heartbeat_at": time_text(self.heartbeat_at)}

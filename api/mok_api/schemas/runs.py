"""Jobs, their runs, and what a run leaves."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from mok_api.schemas.base import AT, DIGEST, JOB, RUN, Answer, Strict
from mok_service.lifecycle import AttemptEnd, DesiredState, RunStatus, StopReason, VerificationVerdict
from mok_service.runs.types import EventType, LogLevel, RunKind
from mok_service.spec import SEED_MAX, Estimate, ExecutionSpec, JobSpec, TrainingSpec

JOB_EXAMPLE: Final[dict[str, Any]] = {
    "training": {
        "name": "tiny", "seed": 7, "steps": 40, "sequence_length": 128, "batch": {"sequences": 8},
        "model": {"preset": "tiny"}, "data": {"source": "python-stdlib"},
        "optimizer": {"lr": 0.001, "warmup_steps": 4, "schedule": "cosine"},
    },
    "execution": {"device": "cpu", "checkpoint_interval": 20},
}
NEW_RUN_EXAMPLE: Final[dict[str, Any]] = {"execution": {"threads": 2}}


class NewRun(Strict):
    execution: ExecutionSpec | None = None
    """Keys that replace those of the job's own execution spec; null for none."""
    reproduces: str | None = Field(default=None, max_length=100)
    """The run to compare with; null for the job's first that succeeded, else its first that ended."""


class DataFile(Answer):
    name: str
    size: str
    sha256: str


class Manifest(Answer):
    """The data files that the job trains on, with sizes and digests."""

    type: Literal["mok.manifest/v1"]
    source: str
    tokenizer: str
    tokens: str
    order: str
    files: list[DataFile]


class Job(Answer):
    """What was asked. Its identity is the digest of the resolved training spec."""

    id: str = Field(examples=[JOB])
    tenant: str = Field(examples=["local"])
    name: str = Field(examples=["tiny"])
    digest: str = Field(examples=[DIGEST])
    """Of the resolved training spec."""
    seed: int = Field(ge=0, le=SEED_MAX, examples=[7])
    """As given, or as the service drew it. An integer of up to 63 bits: JavaScript's JSON.parse would round it."""
    steps: int = Field(examples=[40])
    training: TrainingSpec
    """Resolved: every default made explicit."""
    execution: ExecutionSpec
    """Of the first run."""
    submitted: dict[str, Any]
    """The spec as it was submitted."""
    manifest: Manifest | None
    """Written by the first attempt; null before."""
    manifest_digest: str | None = Field(examples=[DIGEST])
    created_at: datetime = Field(examples=[AT])


class Standing(Answer):
    """Where a queued run stands."""

    position: int = Field(examples=[3])
    """1 goes first. Behind the first runs of its tenant it's an estimate."""
    of: int = Field(examples=[12])
    """All queued runs, of every tenant."""
    estimated_start: datetime | None = Field(examples=[AT])
    """By the pace of the active runs; null while nothing is known about it."""
    why_waiting: str = Field(examples=["1 GPU wanted, 0 free; how long the active runs take isn't known yet"])


class Run(Answer):
    """One execution of a job."""

    id: str = Field(examples=[RUN])
    job: str = Field(examples=[JOB])
    tenant: str = Field(examples=["local"])
    kind: RunKind
    reproduces: str | None
    """The run that a reproduction is compared with."""
    status: RunStatus
    desired_state: DesiredState
    stop_reason: StopReason | None
    message: str | None
    """Why it failed."""
    verdict: VerificationVerdict | None
    """Of a reproduction, once it is known."""
    execution: ExecutionSpec
    attempt: int = Field(examples=[1])
    """The current or last attempt; 0 before the first."""
    failures: int = Field(examples=[0])
    step: int | None = Field(examples=[40])
    """The last step stored."""
    steps: int = Field(examples=[40])
    """The steps that the job asks for."""
    head: str | None = Field(examples=[DIGEST])
    """Digest of the last step record. Equal runs have equal heads."""
    weights: str | None = Field(examples=[DIGEST])
    """Digest of the final weights."""
    worker: str | None
    created_at: datetime = Field(examples=[AT])
    updated_at: datetime = Field(examples=[AT])
    started_at: datetime | None = Field(examples=[AT])
    ended_at: datetime | None = Field(examples=[AT])
    retry_at: datetime | None
    queue_deadline_at: datetime | None = Field(examples=[AT])
    run_deadline_at: datetime | None = Field(examples=[AT])
    queue: Standing | None = None
    """While it is queued, where runs are looked at."""


class Submitted(Answer):
    job: Job
    run: Run
    created: bool
    """False when the Idempotency-Key had been seen before: job and run are then as first answered."""


class Validated(Answer):
    spec: JobSpec
    """Resolved. A seed that the service would draw is null."""
    training_digest: str | None = Field(examples=[DIGEST])
    """The job's identity; null while the seed isn't drawn."""
    estimate: Estimate


class State(Answer):
    weights: str = Field(examples=[DIGEST])
    optimizer: str = Field(examples=[DIGEST])
    cursor: str = Field(examples=[DIGEST])


class Step(Answer):
    """A step record: what one optimizer step left. The bits and digests are hashed; `at`, `attempt`, `seconds`,
    `learning_rate` and `metrics` aren't."""

    step: int = Field(examples=[40])
    attempt: int = Field(examples=[1])
    at: datetime = Field(examples=[AT])
    loss: float | None = Field(examples=[2.5])
    loss_bits: str | None = Field(examples=["40200000"])
    grad_norm: float | None = Field(examples=[0.5])
    grad_norm_bits: str | None = Field(examples=["3f000000"])
    tokens: int | None = Field(examples=[1024])
    batch: str | None = Field(examples=[DIGEST])
    expert_load: str | None = Field(examples=[DIGEST])
    state: State | None
    previous: str = Field(examples=[DIGEST])
    head: str = Field(examples=[DIGEST])
    seconds: float | None = Field(examples=[0.8])
    learning_rate: float | None = Field(examples=[0.001])
    metrics: dict[str, float | None]


class File(Answer):
    name: str = Field(examples=["weights.safetensors"])
    size: int = Field(examples=[1048576])
    sha256: str = Field(examples=[DIGEST.removeprefix("sha256:")])


class Checkpoint(Answer):
    run: str = Field(examples=[RUN])
    step: int = Field(examples=[40])
    folder: str
    files: list[File]
    size: int = Field(examples=[1048576])
    state: State
    head: str = Field(examples=[DIGEST])
    attempt: int = Field(examples=[1])
    created_at: datetime = Field(examples=[AT])
    deleted_at: datetime | None


class Event(Answer):
    run: str = Field(examples=[RUN])
    number: int = Field(examples=[7])
    type: EventType
    payload: dict[str, Any]
    at: datetime = Field(examples=[AT])


class Log(Answer):
    run: str = Field(examples=[RUN])
    number: int = Field(examples=[1])
    attempt: int = Field(examples=[1])
    sequence: int = Field(examples=[0])
    at: datetime = Field(examples=[AT])
    level: LogLevel
    message: str
    step: int | None


class Attempt(Answer):
    id: str
    run: str = Field(examples=[RUN])
    attempt: int = Field(examples=[1])
    worker: str
    claimed_at: datetime = Field(examples=[AT])
    started_at: datetime | None
    running_at: datetime | None
    ended_at: datetime | None
    end: AttemptEnd | None
    message: str | None
    from_step: int | None
    from_head: str | None
    last_step: int | None
    environment: dict[str, Any] | None
    placement: dict[str, Any] | None


class Record(BaseModel):
    """The whole record of a run: identity, specs, code, environment, data, step chain, checkpoints, attempts, verdicts;
    docs/provenance.md describes it."""

    model_config = ConfigDict(extra="allow")


class JobPage(Answer):
    items: list[Job]
    next_cursor: str | None
    """For the next page; null on the last."""


class RunPage(Answer):
    items: list[Run]
    next_cursor: str | None
    """For the next page; null on the last."""


class StepItems(Answer):
    items: list[Step]
    next_after: int
    """What to give as `after` to go on."""


class LogItems(Answer):
    items: list[Log]
    next_after: int
    """What to give as `after` to go on."""


class EventItems(Answer):
    items: list[Event]
    next_after: int
    """What to give as `after` to go on."""


class CheckpointItems(Answer):
    items: list[Checkpoint]


class AttemptItems(Answer):
    items: list[Attempt]

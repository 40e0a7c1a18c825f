"""What requests and answers look like, for the OpenAPI description and for reading small bodies.

Answers are made by the use cases' own `as_dict`, not by these models; a test holds every answer against its model.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field

from mok_service.access import Permission, Role
from mok_service.errors import InvalidSpec
from mok_service.lifecycle import (
    AttemptEnd,
    DesiredState,
    RunStatus,
    StopReason,
    VerificationLevel,
    VerificationStatus,
    VerificationVerdict,
)
from mok_service.runs.outbox import WebhookEvent
from mok_service.runs.types import EventType, LogLevel, RunKind
from mok_service.spec import SEED_MAX, Estimate, ExecutionSpec, JobSpec, TrainingSpec

DIGEST: Final = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
JOB: Final = "job_0198c0de5e1f7000800000000000c0de"
RUN: Final = "run_0198c0de5e1f7000800000000000c0de"
VERIFICATION: Final = "ver_0198c0de5e1f7000800000000000c0de"
AT: Final = "2026-12-01T10:00:00.000000Z"

JOB_EXAMPLE: Final[dict[str, Any]] = {
    "training": {
        "name": "tiny", "seed": 7, "steps": 40, "sequence_length": 128, "batch": {"sequences": 8},
        "model": {"preset": "tiny"}, "data": {"source": "python-stdlib"},
        "optimizer": {"lr": 0.001, "warmup_steps": 4, "schedule": "cosine"},
    },
    "execution": {"device": "cpu", "checkpoint_interval": 20},
}
NEW_RUN_EXAMPLE: Final[dict[str, Any]] = {"execution": {"threads": 2}}
NEW_VERIFICATION_EXAMPLE: Final[dict[str, Any]] = {"run": RUN, "level": "audit", "segments": 4, "seed": 7}
NEW_API_KEY_EXAMPLE: Final[dict[str, Any]] = {"name": "ci", "role": "member", "scopes": [], "expires_at": None}
NEW_WEBHOOK_EXAMPLE: Final[dict[str, Any]] = {"url": "https://example.org/mok", "events": ["run.ended"]}


class Strict(BaseModel):
    """A body that a client sends."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class NewRun(Strict):
    execution: ExecutionSpec | None = None
    """Keys that replace those of the job's own execution spec; null for none."""
    reproduces: str | None = Field(default=None, max_length=100)
    """The run to compare with; null for the job's first that succeeded, else its first that ended."""


class NewVerification(Strict):
    run: str = Field(min_length=1, max_length=100)
    """The run to verify."""
    level: VerificationLevel = "check"
    """check: the record's links, the bytes of its checkpoints against their digests, and its attestation, now. audit: segments
    between checkpoints are drawn and computed again. rerun: all of it is computed again. bisect: where it and another run, or a
    replay, come apart."""
    against: str | None = Field(default=None, min_length=1, max_length=100)
    """bisect: another run of the same job; null for a replay of the run."""
    segments: int | None = Field(default=None, ge=1, le=10**9)
    """audit: how many segments; null for four, or all if there are fewer."""
    seed: int | None = Field(default=None, ge=0, le=SEED_MAX)
    """audit: what the segments are drawn by; null has one drawn. It's recorded."""
    execution: ExecutionSpec | None = None
    """audit, rerun, bisect: keys that replace those of the run's own execution spec."""
    against_execution: ExecutionSpec | None = None
    """bisect: the same for the other run, or for the replay. Device, threads and micro-batches count."""


class Answer(BaseModel):
    """A body that the service sends."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Error(Answer):
    code: str = Field(examples=["not_found"])
    """What kind of error it is, for programs."""
    message: str = Field(examples=[f"there is no run {RUN}"])
    """What is wrong, as a sentence."""
    request: str | None = Field(examples=["req_0123456789abcdef01234567"])
    """The request's id, as in the service's log."""
    detail: dict[str, Any] = Field(examples=[{"run": RUN}])
    """The facts; for a wrong value `errors`, each with field, value, problem, allowed and nearest."""


class ErrorAnswer(Answer):
    error: Error


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


class Progress(Answer):
    done: int = Field(examples=[120])
    of: int = Field(examples=[200])


class Segment(Answer):
    """The steps after `from` up to `to`."""

    start: int = Field(alias="from", examples=[40])
    to: int = Field(examples=[60])


class AuditPlan(Answer):
    """What an audit computes again: segments between checkpoints, drawn by the seed."""

    type: Literal["mok.audit-plan/v1"]
    seed: str = Field(examples=["7"])
    head: str = Field(examples=[DIGEST])
    last_step: int
    segments_total: int
    segments: list[Segment]


class Escape(Answer):
    """The chance that none of so many forged segments was drawn."""

    forged_segments: int = Field(examples=[1])
    chance: str = Field(examples=["3/5"])
    percent: str = Field(examples=["60.00"])


class AuditReport(Answer):
    """What an audit covered."""

    type: Literal["mok.audit-report/v1"]
    steps_total: int
    steps_covered: int
    segments_total: int
    segments_covered: int
    coverage: str = Field(examples=["2/5"])
    """The share of the steps that was computed again."""
    escape: list[Escape]


class BisectSide(Answer):
    """One of the two executions that a bisect compares, and what computes it again."""

    run: str | None = Field(examples=[RUN])
    """null for a replay of the first."""
    head: str | None = Field(examples=[DIGEST])
    device: Literal["cpu", "cuda"]
    threads: int
    micro_batches: int


class BisectPlan(Answer):
    type: Literal["mok.bisect-plan/v1"]
    first: BisectSide
    second: BisectSide
    last_step: int
    """The last step that both have on record."""


class Element(Answer):
    """One element on both sides: bits as hex digits, most significant first, and values (text where they aren't finite)."""

    index: list[int] = Field(examples=[[0, 3]])
    first_bits: str = Field(examples=["3a26e3e0"])
    second_bits: str = Field(examples=["3a26e3df"])
    first: float | int | str
    second: float | int | str


class DifferingTensor(Answer):
    argument: str = Field(examples=["out"])
    """Of the operation; weights, first or second for a tensor of the state."""
    name: str = Field(examples=["moe_out"])
    """In the model, where it is known."""
    differing: int = Field(examples=[1])
    elements: int = Field(examples=[4096])
    element: Element
    """The first that differs."""


class DifferingOperation(Answer):
    """The first operation whose outputs differ."""

    number: int = Field(examples=[14])
    of: int = Field(examples=[326])
    operation: str = Field(examples=["mok_combine"])
    place: str = Field(examples=["layer 0, experts, forward, group 0"])
    outputs: list[DifferingTensor]
    inputs: list[DifferingTensor]
    inputs_equal: bool
    """Then it is this operation itself."""


class BisectCounts(Answer):
    """What it took: heads compared, steps computed, digests of operations, prefixes of these compared."""

    heads: int
    steps: int
    operation_digests: int
    prefixes: int


class BisectReport(Answer):
    """Where two executions come apart."""

    type: Literal["mok.bisect/v1"]
    verdict: Literal["REPRODUCED", "DIVERGED", "INCONCLUSIVE"]
    message: str
    first: str = Field(examples=[RUN])
    second: str
    step: int | None
    operation: DifferingOperation | None
    state: DifferingTensor | None
    """The first tensor of the state after the step that differs."""
    notes: list[str]
    counts: BisectCounts


class Verification(Answer):
    """A verification of a run: how far it is, and its verdict; for anything but a good one where and both values."""

    id: str = Field(examples=[VERIFICATION])
    run: str = Field(examples=[RUN])
    """The run that is verified."""
    executed_by: str | None
    """The run that computes it again: its progress, logs and events; null for a check."""
    level: VerificationLevel
    status: VerificationStatus
    """done: it came to a verdict. failed: what carried it out failed, which says nothing about the run."""
    progress: Progress | None
    """In steps; null for a check."""
    plan: AuditPlan | BisectPlan | None
    verdict: VerificationVerdict | None
    """null until it ends, and when it is cancelled"""
    field: str | None
    step: int | None
    expected: str | None
    got: str | None
    message: str | None
    report: AuditReport | BisectReport | None
    """Of an audit that found no difference, and of a bisect."""
    at: datetime = Field(examples=[AT])
    ended_at: datetime | None
    log_index: int | None
    """Where the log has its attestation; null for a check, and until an audit, a rerun or a bisect is signed."""


class Signature(Answer):
    keyid: str = Field(examples=["0" * 64])
    """SHA-256 of the public key (SubjectPublicKeyInfo, DER)."""
    sig: str = Field(examples=["kGVz..."])
    """Ed25519, in base64."""


class Envelope(Answer):
    """A DSSE envelope: a signed document."""

    payload: str = Field(examples=["eyJfdHlwZSI6..."])
    """The document's bytes, in base64."""
    payloadType: Literal["application/vnd.in-toto+json", "application/vnd.mok-service.tree-head+json"]
    signatures: list[Signature]


class Attestation(Answer):
    """What was signed about a run that has ended, or about the verdict of an audit or rerun: an in-toto Statement, with SLSA
    provenance or a test result as its predicate."""

    run: str = Field(examples=[RUN])
    verification: str | None
    """The verification whose verdict it is about; null for a run's own."""
    envelope: Envelope
    digest: str = Field(examples=[DIGEST])
    """SHA-256 of the envelope's canonical JSON: its entry in the log."""
    key: str = Field(examples=["0" * 64])
    log_index: int = Field(examples=[0])
    at: datetime = Field(examples=[AT])


class LogEntry(Answer):
    index: int = Field(examples=[0])
    entry: str = Field(examples=[DIGEST])
    """The digest of an attestation's envelope."""
    run: str | None = Field(examples=[RUN])
    verification: str | None
    """Of the attestation of a verdict: the verification; null for a run's own."""
    key: str | None = Field(examples=["0" * 64])
    at: datetime = Field(examples=[AT])


class LogEntryItems(Answer):
    items: list[LogEntry]
    next_after: int
    """What to give as `after` to go on."""


class LogProof(Answer):
    """Hashes, as hex digits, in the order of RFC 6962."""

    size: int = Field(examples=[8])
    index: int | None = Field(examples=[5])
    old_size: int | None
    proof: list[str] = Field(examples=[["0" * 64]])


class SigningKey(Answer):
    id: str = Field(examples=["0" * 64])
    pem: str = Field(examples=["-----BEGIN PUBLIC KEY-----\n...\n-----END PUBLIC KEY-----\n"])
    at: datetime = Field(examples=[AT])
    """When it first signed here."""


class SigningKeyItems(Answer):
    items: list[SigningKey]


class Node(Answer):
    name: str
    capacity: dict[str, int] = Field(examples=[{"cpu": 1}])
    labels: dict[str, str]
    worker: str | None
    heartbeat_at: datetime | None


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


class VerificationItems(Answer):
    items: list[Verification]


class NodeItems(Answer):
    items: list[Node]


class Use(Answer):
    """A place where a digest occurs."""

    role: str = Field(examples=["final-weights"])
    """final-weights, step-record, step-weights, step-optimizer, checkpoint-weights, checkpoint-optimizer, checkpoint-file,
    attestation; initial-weights, training-spec, data-manifest, data-file, native-library."""
    relation: Literal["produced", "used"]
    run: str | None = Field(examples=[RUN])
    job: str | None
    step: int | None = Field(examples=[40])
    name: str | None
    """Of the file or library."""
    place: str = Field(examples=[f"/v1/runs/{RUN}"])
    """The path of what shows it."""


class Uses(Answer):
    """Where a digest occurs: what produced it first, of each role the newest first."""

    digest: str = Field(examples=[DIGEST])
    items: list[Use]
    truncated: bool
    """Whether of some role there are more than are shown."""


class LineageNode(Answer):
    id: str = Field(examples=[RUN])
    kind: Literal["run", "job", "data", "code", "weights", "verification"]
    label: str = Field(examples=["tiny"])
    facts: dict[str, str | int | None]


class LineageEdge(Answer):
    source: str = Field(examples=[RUN])
    target: str = Field(examples=[JOB])
    relation: Literal["reproduces", "audits", "bisects", "continues", "executes", "reads", "starts from", "computed with",
                      "verifies", "executed by", "compares with"]
    step: int | None
    """Of the checkpoint whose weights a run started from."""


class Lineage(Answer):
    """A graph. Edges lead from what came later to what it depends on."""

    run: str = Field(examples=[RUN])
    depth: int = Field(examples=[5])
    nodes: list[LineageNode]
    edges: list[LineageEdge]
    truncated: bool
    """Whether there is more beyond `depth`, or more than a graph holds."""


class NewApiKey(Strict):
    name: str = Field(min_length=1, max_length=100)
    """What it's for, for people."""
    role: Role
    """viewer: looks. member: also submits, steers, verifies. admin: also keys, webhooks, audit log. operator: all tenants."""
    scopes: list[Permission] = Field(default_factory=list, max_length=20)
    """Only these permissions of the role; none: all of them."""
    expires_at: str | None = Field(default=None, max_length=40)
    """When it ends by itself, with a time zone; null: never."""

    def expiry(self) -> datetime | None:
        """The time. Raises InvalidSpec for one that can't be read or has no zone."""
        if self.expires_at is None:
            return None
        try:
            at = datetime.fromisoformat(self.expires_at)
            return at.astimezone(UTC) if at.tzinfo is not None else _no_time(self.expires_at)
        except (ValueError, OverflowError):
            return _no_time(self.expires_at)


def _no_time(text: str) -> NoReturn:
    raise InvalidSpec(f"expires_at: {text!r} is no time; allowed: such as {AT}", field="expires_at", value=text)


class ApiKey(Answer):
    """A key, without its text."""

    id: str = Field(examples=["key_0198c0de5e1f7000800000000000c0de"])
    tenant: str = Field(examples=["local"])
    name: str = Field(examples=["ci"])
    prefix: str = Field(examples=["mok_0123456789ab"])
    """How the key begins."""
    role: Role
    scopes: list[Permission]
    created_by: str | None
    """A key's id; or the user of the command on the service's machine."""
    created_at: datetime = Field(examples=[AT])
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None
    """To a few minutes."""


class NewApiKeyAnswer(ApiKey):
    key: str
    """Shown once."""


class ApiKeyPage(Answer):
    items: list[ApiKey]
    next_cursor: str | None
    """For the next page; null on the last."""


class NewWebhook(Strict):
    url: str = Field(min_length=1, max_length=2000)
    """Where deliveries go: https."""
    events: list[WebhookEvent] = Field(min_length=1, max_length=10)


class Webhook(Answer):
    id: str = Field(examples=["whk_0198c0de5e1f7000800000000000c0de"])
    tenant: str = Field(examples=["local"])
    url: str = Field(examples=["https://example.org/mok"])
    events: list[WebhookEvent]
    created_at: datetime = Field(examples=[AT])


class NewWebhookAnswer(Webhook):
    secret: str
    """What deliveries are signed with. Shown once."""


class WebhookItems(Answer):
    items: list[Webhook]


class Delivery(Answer):
    id: str = Field(examples=["dlv_0198c0de5e1f7000800000000000c0de"])
    webhook: str
    type: WebhookEvent
    status: Literal["pending", "delivered", "given_up"]
    attempts: int = Field(examples=[1])
    message: str | None
    """Why the last attempt failed."""
    created_at: datetime = Field(examples=[AT])
    next_at: datetime | None
    """When it's tried next, at the earliest."""
    ended_at: datetime | None


class DeliveryPage(Answer):
    items: list[Delivery]
    next_cursor: str | None
    """For the next page; null on the last."""


class AuditEntry(Answer):
    """A write that somebody asked for."""

    tenant: str = Field(examples=["local"])
    number: int = Field(examples=[0])
    at: datetime = Field(examples=[AT])
    actor: str = Field(examples=["key_0198c0de5e1f7000800000000000c0de"])
    """A key's id; local where none is asked for; or the user of a command on the service's machine."""
    role: str = Field(examples=["member"])
    address: str | None = Field(examples=["192.0.2.1"])
    action: str = Field(examples=["POST /v1/jobs"])
    ids: dict[str, str] = Field(examples=[{"job": JOB}])
    body: str | None = Field(examples=[DIGEST])
    """SHA-256 of the request's body."""
    outcome: int = Field(examples=[201])
    """The answer's status."""
    request: str
    """The request's id: X-Request-ID of its answer."""
    previous: str = Field(examples=[DIGEST])
    digest: str = Field(examples=[DIGEST])
    """SHA-256 of all of the above as canonical JSON; docs/api.md says how."""


class AuditItems(Answer):
    items: list[AuditEntry]
    next_after: int
    """What to give as `after` to go on."""


class AuditHead(Answer):
    tenant: str = Field(examples=["local"])
    length: int = Field(examples=[1])
    digest: str = Field(examples=[DIGEST])


class Health(Answer):
    status: Literal["ok", "ready"]

"""Verifications: what is asked, how far they are, and their verdicts."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, Literal

from pydantic import Field

from mok_api.schemas.base import AT, DIGEST, RUN, VERIFICATION, Answer, Strict
from mok_service.lifecycle import VerificationLevel, VerificationStatus, VerificationVerdict
from mok_service.spec import SEED_MAX, ExecutionSpec

NEW_VERIFICATION_EXAMPLE: Final[dict[str, Any]] = {"run": RUN, "level": "audit", "segments": 4, "seed": 7}


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


class VerificationItems(Answer):
    items: list[Verification]

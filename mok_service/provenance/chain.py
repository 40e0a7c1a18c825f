"""The step chain: what one optimizer step left, each body holding the digest of the one before.

A body holds only what the arithmetic determines, so equal runs have equal chain heads. Times, attempts and hosts are
kept beside it, unhashed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from mok_service.errors import Tampered
from mok_service.provenance.digest import Digest, canonical_digest

CHAIN_VERSION = "mok.chain/v1"
STEP_TYPE = "mok.step/v1"


def float_bits(value: float) -> str:
    """The bits of a binary32 value as eight hex digits, e.g. 1.0 -> `3f800000`. `value` must be exactly a binary32."""
    return struct.pack(">f", value).hex()


def float_from_bits(bits: str) -> float:
    """The inverse of `float_bits`."""
    value: float = struct.unpack(">f", bytes.fromhex(bits))[0]
    return value


@dataclass(frozen=True, slots=True)
class StateDigests:
    """The state after a step: separate digests for weights, optimizer state (moments, stored norm) and data cursor."""

    weights: Digest
    optimizer: Digest
    cursor: Digest

    def as_dict(self) -> dict[str, str]:
        return {"weights": str(self.weights), "optimizer": str(self.optimizer), "cursor": str(self.cursor)}

    @classmethod
    def from_dict(cls, value: dict[str, str]) -> Self:
        return cls(*(Digest.parse(value[key]) for key in ("weights", "optimizer", "cursor")))


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One link. Record 0 is the initial state (no loss, norm, tokens, batch or expert load)."""

    step: int
    previous: Digest
    state: StateDigests | None
    loss_bits: str | None = None         # binary32, eight hex digits
    grad_norm_bits: str | None = None    # binary32
    tokens: int | None = None            # labels that count, in the global batch
    batch: Digest | None = None          # of the global sample ids
    expert_load: Digest | None = None    # of the routed tokens per (layer, expert)
    # Not hashed:
    seconds: float = 0.0
    learning_rate: float = 0.0
    metrics: tuple[tuple[str, float], ...] = ()

    @property
    def loss(self) -> float | None:
        return None if self.loss_bits is None else float_from_bits(self.loss_bits)

    @property
    def grad_norm(self) -> float | None:
        return None if self.grad_norm_bits is None else float_from_bits(self.grad_norm_bits)

    def body(self) -> dict[str, Any]:
        """The hashed body."""
        return {
            "type": STEP_TYPE,
            "step": str(self.step),
            "previous": str(self.previous),
            "loss": self.loss_bits,
            "grad_norm": self.grad_norm_bits,
            "tokens": None if self.tokens is None else str(self.tokens),
            "batch": None if self.batch is None else str(self.batch),
            "expert_load": None if self.expert_load is None else str(self.expert_load),
            "state": None if self.state is None else self.state.as_dict(),
        }

    def head(self) -> Digest:
        """The digest of this body: what the next record's `previous` must be."""
        return canonical_digest(self.body())

    def as_dict(self) -> dict[str, Any]:
        """Body and unhashed fields, as they travel between worker, scheduler and database."""
        return {
            "body": self.body(), "head": str(self.head()), "seconds": self.seconds,
            "learning_rate": self.learning_rate, "metrics": dict(self.metrics),
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Self:
        """The inverse of `as_dict`. Raises Tampered when the stated head isn't the body's digest."""
        body = value["body"]
        record = cls(
            step=int(body["step"]),
            previous=Digest.parse(body["previous"]),
            state=None if body["state"] is None else StateDigests.from_dict(body["state"]),
            loss_bits=body["loss"],
            grad_norm_bits=body["grad_norm"],
            tokens=None if body["tokens"] is None else int(body["tokens"]),
            batch=None if body["batch"] is None else Digest.parse(body["batch"]),
            expert_load=None if body["expert_load"] is None else Digest.parse(body["expert_load"]),
            seconds=float(value.get("seconds", 0.0)),
            learning_rate=float(value.get("learning_rate", 0.0)),
            metrics=tuple(sorted(value.get("metrics", {}).items())),
        )
        if str(record.head()) != value["head"] or record.body() != body:
            raise Tampered(
                f"step record {record.step}: its body hashes to {record.head()}, but it is stored as {value['head']}",
                step=record.step, expected=value["head"], got=str(record.head()),
            )
        return record


def genesis(training: Digest, manifest: Digest, arithmetic: str, initial_weights: Digest) -> Digest:
    """What record 0 links to: chain version, job, data, arithmetic, initial weights."""
    return canonical_digest({
        "type": CHAIN_VERSION, "training": str(training), "manifest": str(manifest), "arithmetic": arithmetic,
        "initial_weights": str(initial_weights),
    })


def check_links(records: Iterable[StepRecord], previous: Digest, first_step: int = 0) -> Digest:
    """Follow the chain from `previous`; returns its head.

    Raises Tampered naming the step at the first missing step or broken link.
    """
    step = first_step
    for record in records:
        if record.step != step:
            raise Tampered(f"step record {step} is missing: found step {record.step} in its place", step=step)
        if record.previous != previous:
            raise Tampered(
                f"step record {step} links to {record.previous}, but the record before it is {previous}",
                step=step, expected=str(previous), got=str(record.previous),
            )
        previous, step = record.head(), step + 1
    return previous


def first_difference(expected: StepRecord, got: StepRecord) -> tuple[str, Any, Any] | None:
    """The first field in which two executions of a step differ: (field, expected, got), or None.

    Fields in the order in which a step computes them; `previous` last, since it only repeats an earlier difference.
    """
    a, b = expected.body(), got.body()
    for field in ("step", "batch", "tokens", "loss", "expert_load", "grad_norm"):
        if a[field] != b[field]:
            return field, a[field], b[field]
    for part in ("weights", "optimizer", "cursor"):
        left, right = (None if s is None else s[part] for s in (a["state"], b["state"]))
        if left != right:
            return part, left, right
    return None if a["previous"] == b["previous"] else ("previous", a["previous"], b["previous"])

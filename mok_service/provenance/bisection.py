"""Bisects by the service: which two executions are compared, and what a report says as a verdict. Values; no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from mok_service.provenance.verify import Finding

PLAN_TYPE: Final = "mok.bisect-plan/v1"


@dataclass(frozen=True, slots=True)
class PlannedSide:
    """One of the two executions: a run on record, or (`run` None) a replay; and what computes it again."""

    run: str | None
    head: str | None          # of the run's chain
    device: str
    threads: int
    micro_batches: int

    def document(self) -> dict[str, Any]:
        return {"run": self.run, "head": self.head, "device": self.device, "threads": self.threads,
                "micro_batches": self.micro_batches}

    @property
    def execution(self) -> dict[str, Any]:
        """The keys of an execution spec that say what computes it."""
        return {"device": self.device, "threads": self.threads, "micro_batches": self.micro_batches}


@dataclass(frozen=True, slots=True)
class BisectPlan:
    """The two sides, and the last step that both have on record (of a replay: that its run has)."""

    first: PlannedSide
    second: PlannedSide
    last_step: int

    def document(self) -> dict[str, Any]:
        """As it is stored, shown and signed."""
        return {"type": PLAN_TYPE, "first": self.first.document(), "second": self.second.document(), "last_step": self.last_step}

    @classmethod
    def from_document(cls, value: Mapping[str, Any]) -> Self:
        """The inverse of `document`."""
        return cls(PlannedSide(**value["first"]), PlannedSide(**value["second"]), value["last_step"])


@dataclass(frozen=True, slots=True)
class Doing:
    """What a bisect is at: it computes, replays or traces step `step`, of those up to `of`."""

    what: str
    step: int
    of: int

    def as_dict(self) -> dict[str, Any]:
        return {"what": self.what, "step": self.step, "of": self.of}


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What a bisect came to: its verdict, and its report (`mok.bisect/v1`) where it got as far as to compare."""

    finding: Finding
    report: dict[str, Any] | None


def finding_of(report: Mapping[str, Any]) -> Finding:
    """The verdict of a report (`mok.bisect/v1`): of a difference the operation or tensor of the state, and the first element's
    bits on either side."""
    operation, state = report["operation"], report["state"]
    tensors = [] if operation is None else [*operation["inputs"], *operation["outputs"]]
    tensor = tensors[0] if tensors else state
    field = operation["operation"] if operation is not None else None if state is None else state["name"] or state["argument"]
    bits = (None, None) if tensor is None else (tensor["element"]["first_bits"], tensor["element"]["second_bits"])
    return Finding(report["verdict"], report["message"], field, report["step"], *bits)

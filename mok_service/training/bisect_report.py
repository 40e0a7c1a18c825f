"""What a bisect reports: frozen values that become JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from mok_service.provenance.elements import Element

Verdict = Literal["REPRODUCED", "DIVERGED", "INCONCLUSIVE"]


@dataclass(frozen=True)
class TensorFinding:
    """A tensor that differs, and the first element of it that does."""

    argument: str              # of the operation; "weights", "first", "second" for a state
    name: str                  # in the model, where it is known
    differing: int
    elements: int
    element: Element

    def as_dict(self) -> dict[str, Any]:
        return {"argument": self.argument, "name": self.name, "differing": self.differing, "elements": self.elements,
                "element": self.element.as_dict()}  # fmt: skip


@dataclass(frozen=True)
class OperationFinding:
    """The first operation whose outputs differ. Where `inputs` is empty they're equal, so that it is this operation itself."""

    number: int
    of: int
    operation: str
    place: str
    outputs: tuple[TensorFinding, ...]
    inputs: tuple[TensorFinding, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "number": self.number, "of": self.of, "operation": self.operation, "place": self.place,
            "outputs": [t.as_dict() for t in self.outputs], "inputs": [t.as_dict() for t in self.inputs],
            "inputs_equal": not self.inputs,
        }  # fmt: skip


@dataclass
class Counts:
    """What it took."""

    heads: int = 0               # heads of the chain that were compared
    steps: int = 0               # computed again, both sides together
    operation_digests: int = 0   # of outputs, both sides together
    prefixes: int = 0            # prefix digests that were compared

    def as_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Report:
    """What a bisect found."""

    verdict: Verdict
    message: str
    first: str
    second: str
    step: int | None
    operation: OperationFinding | None
    state: TensorFinding | None    # first tensor of the state after the step that differs
    notes: tuple[str, ...]
    counts: Counts

    def as_dict(self) -> dict[str, Any]:
        return {
            "type": "mok.bisect/v1", "verdict": self.verdict, "message": self.message, "first": self.first, "second": self.second,
            "step": self.step, "operation": None if self.operation is None else self.operation.as_dict(),
            "state": None if self.state is None else self.state.as_dict(), "notes": list(self.notes),
            "counts": self.counts.as_dict(),
        }  # fmt: skip

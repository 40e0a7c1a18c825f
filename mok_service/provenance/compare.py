"""Two records beside each other: what may show in the bits, what may not, and the first step that differs. Pure; no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mok_service.provenance.chain import StepRecord, first_difference
from mok_service.provenance.record import code_drift

Outcome = Literal["equal", "different", "equal_so_far"]


@dataclass(frozen=True, slots=True)
class Change:
    """A field in which the two differ."""

    field: str
    first: Any
    second: Any

    def as_dict(self) -> dict[str, Any]:
        return {"field": self.field, "first": self.first, "second": self.second}


@dataclass(frozen=True, slots=True)
class RecordDifference:
    """How two records compare. `step` is the first that differs, or where none does the last that both have."""

    outcome: Outcome                # equal_so_far: equal in every step that both have, but one has more
    step: int | None                # None when one of them has no step records
    change: Change | None           # in that step
    # These may show in the bits.
    training: tuple[Change, ...]    # what was asked for
    data: tuple[Change, ...]
    code: tuple[str, ...]           # sentences
    # These may not: where the bits differ, none of them is an excuse.
    execution: tuple[Change, ...]
    environment: tuple[Change, ...]  # software, packages, hardware, variables, as the workers reported them
    layout: tuple[Change, ...]       # where it was placed
    attempts: tuple[Change, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome, "step": self.step, "change": None if self.change is None else self.change.as_dict(),
            "training": [change.as_dict() for change in self.training],
            "execution": [change.as_dict() for change in self.execution],
            "data": [change.as_dict() for change in self.data], "code": list(self.code),
            **{name: [change.as_dict() for change in getattr(self, name)] for name in ("environment", "layout", "attempts")},
        }


def compare_records(first: Mapping[str, Any], second: Mapping[str, Any]) -> RecordDifference:
    """Compare two records as `record.assemble` makes them."""
    outcome, step, change = _steps(_records(first), _records(second))
    return RecordDifference(
        outcome, step, change,
        training=changes("training", first["spec"]["training"], second["spec"]["training"]),
        execution=changes("execution", first["spec"]["execution"], second["spec"]["execution"]),
        data=changes("data", _data(first), _data(second)),
        code=tuple(code_drift({"code": first["code"]}, {"code": second["code"]})),
        environment=changes("environment", _environment(first), _environment(second)),
        layout=changes("layout", first["layout"]["physical"], second["layout"]["physical"]),
        attempts=changes("attempts", _attempts(first), _attempts(second)),
    )


def _steps(first: list[StepRecord], second: list[StepRecord]) -> tuple[Outcome, int | None, Change | None]:
    """A difference in the links alone is named only when there is no other: it follows from another one, or the genesis."""
    links: tuple[int, Change] | None = None
    for a, b in zip(first, second, strict=False):
        difference = first_difference(a, b)
        if difference is None:
            continue
        change = Change(*difference)
        if change.field != "previous":
            return "different", a.step, change
        links = links or (a.step, change)
    if links is not None:
        return "different", *links
    if not first or not second:
        return "equal_so_far", None, None
    return "equal" if len(first) == len(second) else "equal_so_far", min(len(first), len(second)) - 1, None


def _records(record: Mapping[str, Any]) -> list[StepRecord]:
    return [StepRecord.from_dict(row) for row in record["chain"]["records"]]


def _data(record: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest, its files by name; and its digest, which also tells of another order of the files."""
    if record["data"] is None:
        return {}
    manifest = dict(record["data"]["manifest"])
    files = {file["name"]: f"{file['size']} bytes, sha256:{file['sha256']}" for file in manifest.pop("files")}
    return {"digest": record["data"]["digest"], **manifest, "files": files}


def _environment(record: Mapping[str, Any]) -> dict[str, Any]:
    """The environment of the last attempt, a CPU's flags one by one."""
    environment = dict(record["environment"] or {})
    hardware = dict(environment.get("hardware") or {})
    cpu = dict(hardware.get("cpu") or {})
    if "flags" in cpu:
        hardware["cpu"] = {**cpu, "flags": dict.fromkeys(cpu["flags"], True)}
    return {**environment, "hardware": hardware}


def _attempts(record: Mapping[str, Any]) -> dict[str, Any]:
    """From which step each attempt went on, and how it ended."""
    return {str(attempt["attempt"]): {"from_step": attempt["from_step"], "end": attempt["end"], "message": attempt["message"]}
            for attempt in record["attempts"]}


def changes(name: str, first: Any, second: Any) -> tuple[Change, ...]:
    """The leaves in which two plain values differ, named `name.key...`."""
    return tuple(_differing(name, first, second))


def _differing(name: str, first: Any, second: Any) -> Iterator[Change]:
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in dict.fromkeys((*first, *second)):
            yield from _differing(f"{name}.{key}", first.get(key), second.get(key))
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for index, (a, b) in enumerate(zip(first, second, strict=True)):
            yield from _differing(f"{name}[{index}]", a, b)
    elif first != second:
        yield Change(name, first, second)

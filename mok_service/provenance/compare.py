"""Two records beside each other: what their jobs asked for, and the first step in which they differ. Pure; no I/O."""

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
    training: tuple[Change, ...]    # what was asked for
    execution: tuple[Change, ...]   # may differ: it doesn't show in the bits
    data: tuple[Change, ...]
    code: tuple[str, ...]           # sentences

    def as_dict(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome, "step": self.step, "change": None if self.change is None else self.change.as_dict(),
            "training": [change.as_dict() for change in self.training],
            "execution": [change.as_dict() for change in self.execution],
            "data": [change.as_dict() for change in self.data], "code": list(self.code),
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
    """The manifest, its files by name."""
    if record["data"] is None:
        return {}
    manifest = dict(record["data"]["manifest"])
    files = {file["name"]: f"{file['size']} bytes, sha256:{file['sha256']}" for file in manifest.pop("files")}
    return {**manifest, "files": files}


def changes(name: str, first: Any, second: Any) -> tuple[Change, ...]:
    """The leaves in which two plain values differ, named `name.key...`."""
    return tuple(_differing(name, first, second))


def _differing(name: str, first: Any, second: Any) -> Iterator[Change]:
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for key in dict.fromkeys((*first, *second)):
            yield from _differing(f"{name}.{key}", first.get(key), second.get(key))
    elif first != second:
        yield Change(name, first, second)

"""From rows to values."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar

from mok_service.db.ids import is_id
from mok_service.db.queries import Key
from mok_service.errors import InvalidSpec, NotFound
from mok_service.lifecycle import RunStatus, StopReason, VerificationStatus
from mok_service.provenance.audit import Plan
from mok_service.provenance.chain import StateDigests, StepRecord
from mok_service.provenance.checkpoint import CheckpointFile, CheckpointInfo
from mok_service.provenance.digest import Digest
from mok_service.runs.types import (
    Attempt,
    Event,
    LogLine,
    Node,
    Page,
    Progress,
    Run,
    StoredCheckpoint,
    StoredLog,
    StoredStep,
    Verification,
)
from mok_service.spec import ExecutionSpec

Row = Mapping[str, Any]
LIMIT_MAX: Final = 1000
# Why an execution failed that came to no conclusion about the run which it was to verify.
_SAYS_NOTHING: Final = frozenset({"out_of_memory", "attempts_exhausted", "queue_deadline", "run_deadline", "library_unusable",
                                  "bad_data", "internal"})
T = TypeVar("T")


def no_such_run(run_id: str) -> NotFound:
    """The error of an id that no run of the tenant has."""
    return NotFound(f"there is no run {run_id!r:.60}", run=run_id[:60])


def run_of(row: Row) -> Run:
    same = ("id", "tenant", "job_id", "kind", "reproduces", "status", "desired_state", "stop_reason", "message", "verdict",
            "attempt", "failures", "step", "steps", "head", "weights", "created_at", "updated_at", "started_at", "ended_at",
            "retry_at", "queue_deadline_at", "run_deadline_at")
    return Run(execution=ExecutionSpec.model_validate(row["execution"]), worker=row["lease_worker"], **{n: row[n] for n in same})


def attempt_of(row: Row) -> Attempt:
    same = ("id", "run_id", "attempt", "worker", "claimed_at", "started_at", "running_at", "ended_at", "message", "from_step",
            "from_head", "last_step", "environment", "placement")
    return Attempt(end=row["end_reason"], **{name: row[name] for name in same})


def record_of(row: Row) -> StepRecord:
    state = None if row["weights"] is None else StateDigests(row["weights"], row["optimizer"], row["cursor"])
    same = ("step", "previous", "loss_bits", "grad_norm_bits", "tokens", "batch", "expert_load", "seconds", "learning_rate")
    metrics = tuple(sorted((name, float(value)) for name, value in row["metrics"].items()))
    return StepRecord(state=state, metrics=metrics, **{name: row[name] for name in same})


def step_of(row: Row) -> StoredStep:
    return StoredStep(record_of(row), row["attempt"], row["created_at"])


def step_row(record: StepRecord, head: Digest) -> dict[str, Any]:
    """The columns that hold a record; `head` is its digest. Metrics that JSON can't hold are stored as text: "nan"."""
    same = ("step", "previous", "loss_bits", "grad_norm_bits", "tokens", "batch", "expert_load", "seconds", "learning_rate")
    state = record.state
    return {
        **{name: getattr(record, name) for name in same}, "head": head,
        "weights": None if state is None else state.weights, "optimizer": None if state is None else state.optimizer,
        "cursor": None if state is None else state.cursor,
        "metrics": {name: value if value - value == 0.0 else str(value) for name, value in record.metrics},
    }


def checkpoint_of(row: Row) -> StoredCheckpoint:
    files = tuple(CheckpointFile(f["name"], f["size"], f["sha256"]) for f in row["files"])
    state = StateDigests(row["weights"], row["optimizer"], row["cursor"])
    info = CheckpointInfo(row["step"], row["folder"], files, state, row["head"])
    return StoredCheckpoint(row["run_id"], info, row["attempt"], row["created_at"], row["deleted_at"])


def checkpoint_row(info: CheckpointInfo) -> dict[str, Any]:
    return {
        "step": info.step, "folder": info.folder, "size": sum(file.size for file in info.files), "head": info.head,
        "files": [{"name": f.name, "size": f.size, "sha256": f.sha256} for f in info.files],
        "weights": info.state.weights, "optimizer": info.state.optimizer, "cursor": info.state.cursor,
    }


def event_of(row: Row) -> Event:
    return Event(row["run_id"], row["number"], row["type"], row["payload"], row["created_at"])


def log_of(row: Row) -> StoredLog:
    line = LogLine(row["sequence"], row["created_at"], row["level"], row["message"], row["step"])
    return StoredLog(row["run_id"], row["number"], row["attempt"], line)


def verification_of(row: Row) -> Verification:
    same = ("id", "run_id", "executed_by", "level", "plan", "verdict", "field", "step", "expected", "got", "message", "report",
            "ended_at", "log_index")
    status = verification_status(row["verdict"], row["run_status"], row["run_stop_reason"])
    return Verification(at=row["created_at"], status=status, progress=_progress(row), **{name: row[name] for name in same})


def verification_status(verdict: str | None, status: RunStatus | None, stop_reason: StopReason | None) -> VerificationStatus:
    """Where a verification stands, by its verdict and the run that carries it out (None: the service did it by itself)."""
    if status == "failed" and stop_reason in _SAYS_NOTHING:
        return "failed"
    if verdict is not None:
        return "done"
    if status in ("queued", "paused", "cancelled"):
        return status
    return "running"


def _progress(row: Row) -> Progress | None:
    """In steps; None for a check."""
    if row["executed_by"] is None:
        return None
    if row["plan"] is None:
        return Progress(row["run_step"] or 0, row["run_steps"])
    if row["level"] == "bisect":
        last, at = row["plan"]["last_step"], row["progress"]
        if at is None:
            return Progress(last if row["verdict"] else 0, last)
        return Progress(at["of"] if row["verdict"] else max(0, at["step"] - 1), at["of"])
    plan = Plan.from_document(row["plan"])
    return Progress(plan.done(row["run_step"]), plan.steps)


def node_of(row: Row) -> Node:
    return Node(row["name"], row["capacity"], row["labels"], row["worker"], row["heartbeat_at"])


# ---- Pages -----------------------------------------------------------------------------------------------------------

def page_of(rows: Sequence[Row], limit: int, convert: Callable[[Row], T]) -> Page[T]:
    """A page of the first `limit` of up to limit + 1 rows."""
    shown = rows[:limit]
    more = len(rows) > limit
    cursor = encode_cursor((shown[-1]["created_at"], shown[-1]["id"])) if more else None
    return Page(tuple(convert(row) for row in shown), cursor)


def encode_cursor(key: Key) -> str:
    """An opaque text for a place in a list."""
    return base64.urlsafe_b64encode(f"{key[0].isoformat()} {key[1]}".encode()).decode().rstrip("=")


def decode_cursor(text: str | None) -> Key | None:
    """The inverse of `encode_cursor`. Raises InvalidSpec for anything that isn't a cursor of this service."""
    if text is None:
        return None
    try:
        at, item = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode("ascii").split(" ")
        time = datetime.fromisoformat(at)
        if time.utcoffset() != timedelta(0) or not is_id(item) or encode_cursor((time, item)) != text:
            raise ValueError(text)
    except ValueError:  # Unicode and base64 errors are ValueErrors
        raise InvalidSpec(f"cursor: {text!r:.100} isn't a cursor; allowed: next_cursor of the page before",
                          field="cursor") from None
    return time, item


def check_limit(limit: int) -> int:
    """The limit itself. Raises InvalidSpec when it isn't 1 to LIMIT_MAX."""
    if not 1 <= limit <= LIMIT_MAX:
        raise InvalidSpec(f"limit: {limit} isn't allowed; allowed: 1 to {LIMIT_MAX}", field="limit", value=limit)
    return limit

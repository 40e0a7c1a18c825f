"""An attempt inside its worker: drives the training in a thread of its own and answers the scheduler's questions.

It knows neither database nor Ray. What it has to tell is kept until the caller says that it is on file, so a lost reply costs
nothing; when too much is unread, the training waits. It never waits for the training while it answers.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Final, Literal, Protocol

from mok_service.errors import InvalidSpec, KernelError, LibraryUnusable, TrainingFailed, Unrunnable
from mok_service.kernels import abi
from mok_service.lifecycle import STOP_REASONS
from mok_service.provenance.bisection import Conclusion, Doing
from mok_service.provenance.chain import StepRecord
from mok_service.provenance.checkpoint import CheckpointInfo
from mok_service.provenance.manifest import DataManifest
from mok_workers.messages import LINES_A_REPLY_MAX, RECORDS_A_REPLY_MAX, Failure, Line, Payload, Reply, Seen, Started

UNREAD_RECORDS_MAX: Final = 1024   # then the training waits for its caller
UNREAD_LINES_MAX: Final = 1000     # further lines are dropped, and counted
LINE_LENGTH_MAX: Final = 4000

Stop = Literal["now", "checkpoint"]


class Control(Protocol):
    """What a training asks and tells between two steps."""

    def stop_wanted(self) -> Stop | None:
        """Whether to go no further: at once, or after committing a checkpoint of the present state."""

    def checkpoint(self, info: CheckpointInfo) -> None:
        """A checkpoint was committed."""

    def log(self, message: str, level: Literal["debug", "info", "warning", "error"] = "info", step: int | None = None) -> None:
        """A line for the run's log."""

    def doing(self, doing: Doing) -> None:
        """What a bisect is at."""

    def conclude(self, conclusion: Conclusion) -> None:
        """What a bisect came to."""


class Training(Protocol):
    """An opened training: data read, kernels loaded, checkpoint to start from chosen."""

    manifest: DataManifest
    environment: dict[str, Any]
    placement: dict[str, Any]
    resumed_from: int | None

    def checkpoints(self) -> list[CheckpointInfo]:
        """The committed checkpoints up to the one it starts from; after the last record, all of them."""

    def records(self) -> Iterator[StepRecord]:
        """Executes one step a record, from the one after `resumed_from`."""


Open = Callable[[Payload, Control], Training]


class Abandoned(Exception):
    """Raised inside the training's thread: nobody wants what it is doing."""


class Attempt:
    """One attempt. `opens` and the clocks are passed in, so that tests run it without kernels and without waiting."""

    def __init__(
        self, payload: Payload, opens: Open, *, monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._payload, self._opens, self._monotonic, self._now = payload, opens, monotonic, now
        self._changed = threading.Condition()
        self._started: Started | None = None
        self._records: list[StepRecord] = []
        self._lines: list[Line] = []
        self._line_count = self._dropped = 0
        self._checkpoints: dict[int, CheckpointInfo] = {}
        self._stop: Stop | None = None
        self._status: Literal["running", "done", "stopped", "failed"] = "running"
        self._final: CheckpointInfo | None = None
        self._doing: Doing | None = None
        self._conclusion: Conclusion | None = None
        self._failure: Failure | None = None
        self._deadline = monotonic() + payload.lease_seconds
        self._thread = threading.Thread(target=self._run, name=payload.name, daemon=True)

    # ---- the scheduler's side --------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def advance(
        self, seen: Seen, *, max_records: int = RECORDS_A_REPLY_MAX, max_seconds: float = 0.0, lease_seconds: float | None = None
    ) -> Reply:
        """What came after `seen`; waits up to `max_seconds` for something to come. Prolongs the time until `expired`."""
        with self._changed:
            self._deadline = self._monotonic() + (self._payload.lease_seconds if lease_seconds is None else lease_seconds)
            self._forget(seen)
            self._changed.wait_for(lambda: not self._reply(seen, max_records).empty, timeout=max_seconds)
            return self._reply(seen, max_records)

    def stop(self, *, checkpoint: bool) -> None:
        """Go no further than the step being computed; with `checkpoint`, commit the state after it first."""
        with self._changed:
            self._stop = "checkpoint" if checkpoint and self._stop != "now" else "now"
            self._changed.notify_all()

    def expired(self) -> bool:
        """Whether nobody has asked for longer than the lease: the attempt must end, since another may run in its place."""
        with self._changed:
            return self._monotonic() > self._deadline

    def join(self, timeout: float) -> bool:
        """Waits for the training's thread; whether it has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _forget(self, seen: Seen) -> None:
        self._records = [r for r in self._records if r.step > seen.step]
        self._lines = [line for line in self._lines if line.sequence >= seen.lines]
        self._changed.notify_all()  # the training may be waiting for room

    def _reply(self, seen: Seen, max_records: int) -> Reply:
        records = tuple(r for r in self._records if r.step > seen.step)[:max_records]
        told = self._lines if self._started is not None else []  # before it started there is no place to store them
        lines = tuple(line for line in told if line.sequence >= seen.lines)[:LINES_A_REPLY_MAX]
        on_file = max(seen.step, -1 if self._payload.last_step is None else self._payload.last_step)
        reached = max(records[-1].step, on_file) if records else on_file
        checkpoints = tuple(c for step, c in sorted(self._checkpoints.items()) if seen.checkpoint < step <= reached)
        all_of_it = len(records) == len(self._records) and len(lines) == len(told)
        ended = self._status if all_of_it else "running"
        return Reply(
            None if seen.started else self._started, records, lines, checkpoints, ended,
            self._final if ended == "done" else None, self._failure if ended == "failed" else None,
            self._doing if self._started is not None and self._doing != seen.doing else None,
            self._conclusion if ended == "done" else None,
        )

    # ---- the training's side ---------------------------------------------------------------------------------------------

    def stop_wanted(self) -> Stop | None:
        with self._changed:
            return self._stop

    def checkpoint(self, info: CheckpointInfo) -> None:
        with self._changed:
            self._checkpoints[info.step] = info
            self._changed.notify_all()
        self.log(f"checkpoint after step {info.step}: {info.size:,} bytes", step=info.step)

    def log(self, message: str, level: Literal["debug", "info", "warning", "error"] = "info", step: int | None = None) -> None:
        with self._changed:
            if len(self._lines) >= UNREAD_LINES_MAX:
                self._dropped += 1
                return
            if self._dropped:
                self._append_line(f"{self._dropped} log lines were dropped: nobody read them in time", "warning", None)
                self._dropped = 0
            self._append_line(message, level, step)
            self._changed.notify_all()

    def doing(self, doing: Doing) -> None:
        with self._changed:
            self._doing = doing
            self._changed.notify_all()

    def conclude(self, conclusion: Conclusion) -> None:
        with self._changed:
            self._conclusion = conclusion

    def _append_line(self, message: str, level: Literal["debug", "info", "warning", "error"], step: int | None) -> None:
        self._lines.append(Line(self._line_count, self._now(), level, message[:LINE_LENGTH_MAX], step))
        self._line_count += 1

    def _run(self) -> None:
        try:
            done, final = self._train()
            assert done or self.stop_wanted() is not None, "what nobody stopped reaches its last step"
        except Abandoned:
            self._end("stopped")
        except Exception as error:
            failure = classify(error)
            trace = traceback.format_exc() if failure.reason is None else failure.message
            self.log(trace[-LINE_LENGTH_MAX:], "error")
            self._end("failed", failure=failure)
        else:
            self._end("done" if done else "stopped", final=final)

    def _train(self) -> tuple[bool, CheckpointInfo | None]:
        """Whether it came to its end, and the final checkpoint, which an audit or a bisect doesn't have."""
        payload = self._payload
        training = self._opens(payload, self)
        with self._changed:
            self._checkpoints.update((c.step, c) for c in training.checkpoints())
            self._started = Started(training.environment, training.placement, training.manifest, training.resumed_from)
            self._changed.notify_all()
        if training.resumed_from is not None:
            self.log(f"resumed from the checkpoint after step {training.resumed_from}", step=training.resumed_from)
        reached = payload.last_step
        for record in training.records():
            self._put(record)
            reached = record.step
        if payload.bisect is not None:
            return self._conclusion is not None, None
        final = next((c for c in training.checkpoints() if c.step == payload.final_step), None)
        return (final is not None if payload.segments is None else reached == payload.final_step), final

    def _put(self, record: StepRecord) -> None:
        with self._changed:
            self._records.append(record)
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._records) < UNREAD_RECORDS_MAX or self._stop is not None)
            if self._stop == "now":
                raise Abandoned

    def _end(
        self, status: Literal["done", "stopped", "failed"], *, final: CheckpointInfo | None = None, failure: Failure | None = None
    ) -> None:
        with self._changed:
            if final is not None:
                self._checkpoints[final.step] = final
            self._status, self._final, self._failure = status, final, failure
            self._changed.notify_all()


def classify(error: Exception) -> Failure:
    """What a failed training means for its run: fail for good (`reason` set), or try again."""
    message = f"{type(error).__name__}: {error}" if not isinstance(error, TrainingFailed) else error.message
    if isinstance(error, TrainingFailed):
        reason = error.detail.get("reason", error.code)
        return Failure("failed", message, reason if reason in STOP_REASONS else "internal", error.detail.get("finding"))
    if isinstance(error, LibraryUnusable):
        return Failure("failed", error.message, "library_unusable")
    if isinstance(error, InvalidSpec | Unrunnable):
        return Failure("failed", error.message, "bad_data")
    if _is_out_of_memory(error):
        return Failure("out_of_memory", message)
    return Failure("failed", message)


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, KernelError):
        return error.detail.get("status") == abi.OUT_OF_MEMORY
    # torch raises a plain RuntimeError for main memory, OutOfMemoryError for a GPU's.
    return (
        isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "not enough memory" in str(error))
    )

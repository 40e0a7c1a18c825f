"""The Ray actor: a thin shell around `Attempt`. One process, one attempt at a time; it is never restarted.

When an attempt came to its end the process may execute another one, if nothing that it was loaded from has changed meanwhile:
what an attempt reports of its code is then true of a process that loaded the code earlier. See docs/decisions/0011.

It needs no answer from Ray to end: when nobody has asked for longer than the attempt's lease, or, while it has none, for longer
than it was told, it leaves by itself.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import psutil

from mok_service.environment import code, packages
from mok_service.errors import KernelError
from mok_workers.attempt import Attempt, Control, Open, Training
from mok_workers.messages import Payload, Question, Refusal, Reply, Resting

EXIT_LEASE_EXPIRED: Final = 75
EXIT_IDLE: Final = 76
WATCH_SECONDS: Final = 0.25
CALLS_AT_ONCE_MAX: Final = 6     # a waiting `advance` must not keep `stop` out
TIDY_SECONDS_MAX: Final = 5.0    # for the thread of an attempt that has said its last word
UNASKED_SECONDS_MAX: Final = 120.0

Measure = Callable[[], object]


def open_here(payload: Payload, control: Control) -> Training:
    """`opening.open_training`, imported where it trains: torch takes 200 MB, and the scheduler's process has no use for it."""
    from mok_workers.opening import open_training

    return open_training(payload, control)


def measure_here() -> object:
    """What this process would load from the disk now: sources, native libraries, installed packages, by digest and version."""
    return code(), packages()


def load_here() -> None:
    """Loads what attempts need, before one waits for it. What can't be loaded is for the attempt to report."""
    from mok_service.kernels import load_backend
    from mok_workers import auditing, bisecting

    assert auditing is not None and bisecting is not None
    with suppress(KernelError):
        load_backend("cpu", threads=1)


class TrainActor:
    """What Ray makes of it is in cluster.py: max_restarts = 0, max_task_retries = 0, threads for CALLS_AT_ONCE_MAX calls.

    Its calls name the attempt that they are about: a late one finds another, and does nothing.
    """

    def __init__(self, measure: Measure, load: Callable[[], None]) -> None:
        self._measure, self._measured = measure, measure()
        self._turn = threading.Lock()
        self._attempt: Attempt | None = None
        self._name = ""
        self._served = 0
        self._leave_at = time.monotonic() + UNASKED_SECONDS_MAX
        threading.Thread(target=self._watch, name="lease", daemon=True).start()
        load()
        gc.freeze()  # what was loaded stays: looking through it after each attempt would take longer than a small attempt

    def begin(self, payload: Payload, opens: Open, question: Question) -> Reply | Refusal:
        """Start an attempt, and answer as `advance`. A Refusal: another process must do it, and this one has done nothing."""
        with self._turn:
            if not self._tidied():
                return Refusal("the attempt before it hasn't ended")
            if self._measure() != self._measured:
                return Refusal("its sources, libraries or packages have changed since it loaded them")
            self._name, self._attempt = payload.name, Attempt(payload, _told(opens, self._served))
            self._served += 1
            self._attempt.start()
        return self.advance(payload.name, question)

    def advance(self, name: str, question: Question) -> Reply:
        """See `Attempt.advance`."""
        return self._found(name).advance(
            question.seen, max_records=question.max_records, max_seconds=question.max_seconds,
            lease_seconds=question.lease_seconds,
        )

    def stop(self, name: str, checkpoint: bool) -> None:
        """See `Attempt.stop`."""
        self._found(name).stop(checkpoint=checkpoint)

    def rest(self, name: str, seconds: float) -> Resting | None:
        """Give back what the attempt of this name held, and wait for another one: up to `seconds`, then leave.

        None when it wasn't the last one, or hasn't ended. Asked again it tells again, and waits anew.
        """
        with self._turn:
            if name != self._name or not self._tidied():
                return None
            self._leave_at = time.monotonic() + seconds
        memory = psutil.virtual_memory()
        return Resting(psutil.Process().memory_info().rss, memory.available / memory.total)

    def leave(self, name: str) -> None:
        """End this process, if it executes the attempt of this name."""
        if name == self._name and self._attempt is not None:
            os._exit(EXIT_LEASE_EXPIRED)

    def _found(self, name: str) -> Attempt:
        attempt = self._attempt
        if attempt is None or name != self._name:
            raise LookupError(f"{name} isn't executed here")
        return attempt

    def _tidied(self) -> bool:
        """Whether no attempt is left: one that has ended is let go, with the memory that it had."""
        if self._attempt is None:
            return True
        if not self._attempt.join(TIDY_SECONDS_MAX):
            return False
        self._leave_at = time.monotonic() + UNASKED_SECONDS_MAX
        self._attempt = None
        gc.collect()
        with suppress(AttributeError):  # only glibc keeps freed memory, and has this to give it back
            ctypes.CDLL(None).malloc_trim(0)
        return True

    def _watch(self) -> None:
        while True:
            time.sleep(WATCH_SECONDS)
            attempt = self._attempt
            if attempt is not None and attempt.expired():
                os._exit(EXIT_LEASE_EXPIRED)  # not sys.exit: the training's thread may be inside a kernel
            if attempt is None and time.monotonic() > self._leave_at:
                os._exit(EXIT_IDLE)


def _told(opens: Open, served: int) -> Open:
    """Opens a training whose placement also says how many attempts its process has executed before."""
    def open_told(payload: Payload, control: Control) -> Training:
        training = opens(payload, control)
        training.placement = {**training.placement, "attempts_before": served}
        return training

    return open_told

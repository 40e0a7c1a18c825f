"""Processes for attempts: started when they are needed or before, and kept for a while once their attempt came to its end.

An idle process holds no device: what has room is for the scheduler to say, and what is placed is held by the attempts' groups. It
does hold memory, so there are few of them, they leave after a while, and all of them leave where memory is short.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

from mok_service.settings import Settings
from mok_workers.messages import Lost, Resting

log = logging.getLogger("mok.pool")

UNSEEN_SECONDS_MAX: Final = 60.0     # an idle process that isn't asked for so long, leaves
PAUSE_SECONDS: Final = 10.0          # after one that rested was lost or had to leave, before another is made ready on its node
MEMORY_AVAILABLE_MIN: Final = 0.1    # the part of a machine's memory below which no process is kept idle on it


@dataclass(frozen=True, slots=True)
class Limits:
    """How many idle processes there are, and how long: see docs/settings.md."""

    ready: int = 0               # on each node, from the start on and for ever
    kept_max: int = 4            # on each node, `ready` ones too; 0: a process executes one attempt
    seconds: float = 300.0       # how long one that isn't among the `ready` is kept
    attempts_max: int = 100      # that a process executes
    resident_bytes_max: int = 1 << 30

    @classmethod
    def of(cls, settings: Settings) -> Self:
        return cls(
            settings.actors_ready, max(settings.actors_ready, settings.actors_kept_max), settings.actor_idle_seconds,
            settings.actor_runs_max, round(settings.actor_gib_max * (1 << 30)),
        )


class Actors(Protocol):
    """What a pool needs of Ray. No call of it waits."""

    def make(self, node: str) -> Any:
        """A new `TrainActor` on this node, bound to no device."""

    def rest(self, actor: Any, name: str, seconds: float) -> Any:
        """Call `TrainActor.rest`."""

    def answer(self, call: Any) -> Resting | Lost | None:
        """What a call returned; None while there is nothing. A rest that was none is Lost."""

    def kill(self, actor: Any) -> None: ...


NONE_KEPT: Final = Limits(kept_max=0)


@dataclass(eq=False)
class Worker:
    """A process. `name`: of the last attempt that it began."""

    actor: Any
    node: str
    name: str = ""
    attempts: int = 0            # that it has executed
    idle_since: float = 0.0
    call: Any = None             # the open question whether it still rests

    @property
    def kept(self) -> bool:
        """Whether it was there before the attempt: when such a one is dead, its attempt never began."""
        return self.call is not None


class Pool:
    """The idle processes of one scheduler. `monotonic` is passed in, for tests."""

    def __init__(self, actors: Actors, limits: Limits, monotonic: Callable[[], float]) -> None:
        self._actors, self._limits, self._monotonic = actors, limits, monotonic
        self.idle: list[Worker] = []         # the one that came last is taken first, so that the others' time runs out
        self._trouble: dict[str, float] = {}  # when a node's last one had to go

    def take(self, node: str) -> Worker:
        """A process on this node for an attempt: an idle one, else a new one."""
        here = self._on(node)
        if not here:
            return self.fresh(node)
        self.idle.remove(here[-1])
        return here[-1]

    def fresh(self, node: str) -> Worker:
        """A new process on this node."""
        return Worker(self._actors.make(node), node)

    def give(self, worker: Worker) -> None:
        """Keep the process of an attempt that came to its end, or end it."""
        worker.attempts += 1
        if worker.attempts >= self._limits.attempts_max or len(self._on(worker.node)) >= self._limits.kept_max:
            self.end(worker)
        else:
            self._keep(worker)

    def end(self, worker: Worker) -> None:
        """End a process, whatever it does."""
        self._actors.kill(worker.actor)

    def clear(self, why: str) -> None:
        """End all that are idle."""
        for worker in list(self.idle):
            self._drop(worker, why)

    def tend(self, nodes: Sequence[str]) -> None:
        """Hear every idle process, end those whose time is over, and make those that shall be ready on each of these nodes."""
        for worker in list(self.idle):
            why = self._hear(worker) if worker.node in nodes else "its node is gone"
            if why is not None:
                self._drop(worker, why)
        for node in nodes:
            here = self._on(node)
            for worker in here[: max(0, len(here) - self._limits.ready)]:
                if self._monotonic() - worker.idle_since >= self._limits.seconds:
                    self._drop(worker, None)
            if self._monotonic() - self._trouble.get(node, float("-inf")) >= PAUSE_SECONDS:
                for _ in range(self._limits.ready - len(here)):
                    self._keep(self.fresh(node))

    def _keep(self, worker: Worker) -> None:
        self._ask(worker)
        worker.idle_since = self._monotonic()
        self.idle.append(worker)

    def _on(self, node: str) -> list[Worker]:
        return [worker for worker in self.idle if worker.node == node]

    def _ask(self, worker: Worker) -> None:
        worker.call = self._actors.rest(worker.actor, worker.name, UNSEEN_SECONDS_MAX)

    def _hear(self, worker: Worker) -> str | None:
        """Why a process can't be kept; None when it can."""
        answer = self._actors.answer(worker.call)
        if isinstance(answer, Lost):
            return answer.message
        if answer is None:
            return None
        if answer.resident_bytes > self._limits.resident_bytes_max:
            return f"it keeps {answer.resident_bytes:,} bytes"
        if answer.available < MEMORY_AVAILABLE_MIN:
            return f"memory is short: {answer.available:.0%} are available"
        self._ask(worker)
        return None

    def _drop(self, worker: Worker, why: str | None) -> None:
        if why is not None:
            log.info("ended an idle process on %s: %s", worker.node, why)
            self._trouble[worker.node] = self._monotonic()
        self.idle.remove(worker)
        self.end(worker)

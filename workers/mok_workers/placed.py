"""Attempts that Ray executes: a group that holds the devices, and a process."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import psutil

from mok_workers.actor import CALLS_AT_ONCE_MAX, Measure, TrainActor
from mok_workers.attempt import Open
from mok_workers.messages import Lost, Payload, Question, Refusal, Reply, Resting, Seen
from mok_workers.pool import Pool, Worker
from mok_workers.supervisor import runs

log = logging.getLogger("mok.cluster")

P = ParamSpec("P")
R = TypeVar("R")

ACTOR_NAMES: Final = "mok-actor-"   # all of ours, so that any scheduler of a cluster finds them
WAKING_ANSWERS: Final = 4           # the scheduler is woken for an attempt's first answers: a small run is over by then


class ClusterTrouble(Exception):
    """The cluster failed to do what it was asked for, whatever run it was asked for: it may be gone, or another one by now."""


def cluster_trouble(method: Callable[P, R]) -> Callable[P, R]:
    """What Ray raises is told as ClusterTrouble. (What a worker raises is an answer, not an exception.)"""

    @wraps(method)
    def told(*args: P.args, **kwargs: P.kwargs) -> R:
        from ray.exceptions import RayError

        try:
            return method(*args, **kwargs)
        except (RayError, ConnectionError, TimeoutError) as error:
            raise ClusterTrouble(f"{type(error).__name__}: {_sentence(error)}") from error

    return told


@dataclass(frozen=True)
class RayActors:
    """See `mok_workers.pool.Actors`."""

    measure: Measure
    load: Callable[[], None]

    def make(self, node: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return self.actor(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))

    def actor(self, **options: Any) -> Any:
        import ray

        return ray.remote(TrainActor).options(
            name=ACTOR_NAMES + secrets.token_hex(8), max_restarts=0, max_task_retries=0,
            max_concurrency=CALLS_AT_ONCE_MAX, **options,
        ).remote(self.measure, self.load)

    def rest(self, actor: Any, name: str, seconds: float) -> Any:
        return actor.rest.remote(name, seconds)

    def answer(self, call: Any) -> Resting | Lost | None:
        if not answered(call):
            return None
        found: Resting | Lost | None = result_of(call)
        return found or Lost("failed", "it doesn't rest")

    def kill(self, actor: Any) -> None:
        import ray

        ray.kill(actor, no_restart=True)


def answered(call: Any) -> bool:
    import ray

    return bool(ray.wait([call], timeout=0)[0])


def result_of(call: Any) -> Any:
    """What an answered call returned; Lost when it failed."""
    import ray
    from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

    try:
        return ray.get(call)
    except RayTaskError as error:
        return Lost("failed", f"the worker failed to answer: {error.cause}")
    except RayError as error:
        memory = isinstance(error, OutOfMemoryError) or "NODE_OUT_OF_MEMORY" in str(error)
        return Lost("out_of_memory" if memory else "worker_lost", _sentence(error))


class RayHandle:
    """One attempt: its group, and the process that was found for it. See `mok_workers.cluster.Handle`."""

    def __init__(
        self, payload: Payload, opens: Open, group: Any, pool: Pool, limits: tuple[int, float], *, worker: Worker | None = None,
        nodes: Sequence[str] = (), news: Callable[[], None],
    ) -> None:
        """`worker`: one that is bound to the group's devices, and ends with the attempt; None: one of the pool, which holds none.

        `nodes`: those that have CPUs. `news` is called, by any thread, when one of the first answers is there.
        """
        self._payload, self._opens, self._group, self._pool, self._limits = payload, opens, group, pool, limits
        self._worker, self._pooled, self._nodes, self._news = worker, worker is None, nodes, news
        self._call: Any = None
        self._calls = 0
        self._process: psutil.Process | None = None  # of the worker, when it is on this machine
        self._memory_kills = memory_kills()
        self._begun = self._done = self._ended = self._dead = False

    @cluster_trouble
    def ask(self, seen: Seen, lease_seconds: float) -> None:
        if self._call is not None:
            return
        if self._worker is None:
            node = self._node()
            if node is None:
                return
            self._worker = self._pool.take(node)
        question = Question(seen, *self._limits, lease_seconds)
        if self._begun:
            self._call = self._worker.actor.advance.remote(self._payload.name, question)
        else:
            self._worker.name = self._payload.name
            self._call = self._worker.actor.begin.remote(self._payload, self._opens, question)
        self._calls += 1
        if self._calls <= WAKING_ANSWERS:
            self._call.future().add_done_callback(lambda _: self._news())

    def _node(self) -> str | None:
        """Where the process has to be: on the only node, or on the one that the group came to, once it has."""
        from ray.util.placement_group import placement_group_table

        if len(self._nodes) == 1:
            return self._nodes[0]
        row = placement_group_table(self._group)  # empty once the cluster has forgotten it
        return str(row["bundles_to_node_id"][0]) if row.get("state") == "CREATED" else None

    @cluster_trouble
    def poll(self) -> Reply | Lost | None:
        answer = self._answer()
        if isinstance(answer, Reply):
            self._begun, self._done = True, answer.status == "done"
            self._memory_kills = memory_kills()
            if answer.started is not None:
                self._process = _local_process(answer.started.placement)
        elif answer is not None and not self._begun and self._another(answer):
            return None
        return Lost("worker_lost", f"its process refused: {answer.reason}") if isinstance(answer, Refusal) else answer

    def _another(self, answer: Refusal | Lost) -> bool:
        """Whether another process shall begin the attempt, since this one has done nothing of it."""
        worker = self._worker
        assert worker is not None
        if not self._pooled or not (isinstance(answer, Refusal) or (self._dead and worker.kept)):
            return False
        why = answer.reason if isinstance(answer, Refusal) else answer.message
        log.info("%s gets a new process: %s", self._payload.name, why)
        self._pool.end(worker)
        self._worker, self._dead = self._pool.fresh(worker.node), False
        return True

    def _answer(self) -> Reply | Refusal | Lost | None:
        """What the open call returned, Lost when the process is dead, None while there is nothing."""
        if self._call is None or not answered(self._call):
            return None
        answer: Reply | Refusal | Lost | None = result_of(self._call)
        self._call = None
        if isinstance(answer, Lost) and answer.end != "failed":
            self._dead = True
            if self._process is not None and memory_kills() > self._memory_kills:
                answer = replace(answer, end="out_of_memory")  # the kernel killed something since this worker was last heard of
            if answer.end == "out_of_memory":
                self._pool.clear("a run ran out of memory")
        return answer

    @cluster_trouble
    def stop(self) -> None:
        assert self._worker is not None, "it has answered"
        self._worker.actor.stop.remote(self._payload.name, True)

    @cluster_trouble
    def release(self) -> None:
        assert self._done and self._worker is not None, "it came to its end"
        if not self._pooled:
            self.end()
        elif not self._ended:
            self._ended = self._dead = True  # dead to this attempt: it has said its last word
            self._process = None
            try:
                self._pool.give(self._worker)
            finally:
                self._remove()

    @cluster_trouble
    def end(self) -> None:
        if not self._ended:
            self._ended = True
            if self._worker is None:
                self._dead = True
            else:
                self._pool.end(self._worker)
            self._remove()

    def _remove(self) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._group)

    @cluster_trouble
    def gone(self) -> bool:
        from ray.util.placement_group import placement_group_table

        assert self._ended, "end it first"
        if not self._dead:  # a call fails once the process is dead, and not before
            if self._call is None:
                assert self._worker is not None
                self._call = self._worker.actor.stop.remote(self._payload.name, False)
            self._answer()
            return False
        if self._process is not None and runs(self._process):
            return False
        return str(placement_group_table(self._group).get("state", "REMOVED")) == "REMOVED"


def _sentence(error: Exception) -> str:
    """Ray's message on one line, without what is of no use to anyone."""
    lines = (line.strip() for line in str(error).partition(" Some common causes")[0].splitlines())
    kept = [line for line in lines if line and not line.startswith(("class_name:", "actor_id:", "namespace:", "name:"))]
    return " ".join(kept)[:1000]


def memory_kills() -> int:
    """How many processes the kernel of this machine has killed for memory since it started."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return 0


def _local_process(placement: Mapping[str, Any]) -> psutil.Process | None:
    if placement.get("host") != socket.gethostname():
        return None
    with suppress(psutil.Error):
        return psutil.Process(placement["pid"])
    return None

"""The simulated cluster: machines that keep what killed workers hold for a while, workers that compute on a virtual clock, and a
network between them and their scheduler that loses, delays and repeats what is said."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, wraps
from math import inf
from typing import Any, Concatenate, Final, Literal, ParamSpec, TypeVar

from mok_service.placement import NodeSize
from mok_service.provenance.chain import StateDigests, StepRecord, float_bits, genesis
from mok_service.provenance.checkpoint import CheckpointFile, CheckpointInfo
from mok_service.provenance.digest import Digest, sha256
from mok_service.provenance.manifest import DataManifest, ManifestFile
from mok_service.spec import JobSpec, parse_job, resolve, training_digest
from mok_workers.cluster import ClusterLost
from mok_workers.messages import Failure, Lost, Payload, Reply, Seen, Started
from mok_workers.placed import ClusterTrouble

P = ParamSpec("P")
R = TypeVar("R")
MANIFEST: Final = DataManifest("files", (ManifestFile("a.txt", 3, "ab" * 32),), "bytes", 4)
CHECKPOINT_STEPS: Final = 2
TROUBLE: Final = 0.002  # how often a call of the cluster fails before it did anything, and again after it did all
Doom = Literal["none", "crash", "memory", "error", "nan", "data"]


@lru_cache(maxsize=256)
def job_of(steps: int, seed: int) -> JobSpec:
    return resolve(parse_job({
        "training": {
            "name": "simulated", "seed": seed, "model": {"preset": "tiny"}, "data": {"source": "python-stdlib"},
            "digest_interval": 2, "sequence_length": 8, "batch": {"sequences": 2, "group_sequences": 1}, "steps": steps,
        },
        "execution": {"checkpoint_interval": CHECKPOINT_STEPS, "threads": 1, "micro_batches": 1},
    }))


@lru_cache(maxsize=4096)
def state(seed: int, step: int) -> StateDigests:
    weights, optimizer, cursor = (sha256(f"{kind} {seed} {step}".encode()) for kind in "woc")
    return StateDigests(weights, optimizer, cursor)


@lru_cache(maxsize=256)
def chain(steps: int, seed: int) -> tuple[StepRecord, ...]:
    """What the job computes, on whatever machine."""
    training = job_of(steps, seed).training
    first = genesis(Digest.parse(training_digest(training)), MANIFEST.digest(), training.arithmetic, state(seed, 0).weights)
    records = [StepRecord(0, first, state(seed, 0))]
    for step in range(1, steps + 1):
        digested = step % training.digest_interval == 0 or step == steps
        records.append(StepRecord(
            step, records[-1].head(), state(seed, step) if digested else None, float_bits(1.0 / step), float_bits(2.0), 16,
            sha256(b"batch"), sha256(b"load"), seconds=1.0, learning_rate=1e-3,
        ))
    return tuple(records)


@lru_cache(maxsize=1024)
def checkpoint(steps: int, seed: int, step: int) -> CheckpointInfo:
    files = (CheckpointFile("model.safetensors", 8, "cd" * 32),)
    return CheckpointInfo(step, f"step-{step:08d}", files, state(seed, step), chain(steps, seed)[step].head())


@dataclass
class Worker:
    """One attempt on a machine. What it has done is a function of the time; nothing wakes it up."""

    payload: Payload
    pace: float                           # seconds a step
    doom: Doom
    deaf: bool                            # ignores a wish to stop
    resumed_from: int | None
    node: str | None = None               # None while it waits for room on its node; until then nothing happens to it
    ready_at: float = inf                 # on the machines' clock, which no one sets
    doom_at: float = inf
    leaves_at: float = inf                # nobody asked for so long
    stop_at: float | None = None
    killed_at: float | None = None
    freed_at: float | None = None         # after it was killed

    @property
    def training(self) -> dict[str, Any]:
        training: dict[str, Any] = self.payload.job["training"]
        return training

    @property
    def first(self) -> int:
        return 0 if self.resumed_from is None else self.resumed_from + 1

    def holds(self, now: float) -> bool:
        """Whether it still has its devices."""
        if self.freed_at is not None:
            return now < self.freed_at
        return self.died(now) is None

    def died(self, now: float) -> Lost | None:
        """Why there is no process any more."""
        if self.killed_at is not None:
            return Lost("worker_lost", "the worker was killed")
        if self.doom in ("crash", "memory") and now >= self.doom_at:
            return Lost("out_of_memory" if self.doom == "memory" else "worker_lost", f"it died of {self.doom}")
        return Lost("worker_lost", "nobody asked for longer than its lease") if now >= self.leaves_at else None

    def reached(self, now: float) -> int:
        """The last step that it has computed; first - 1 before any."""
        last = min(now, self.doom_at) if self.doom != "none" else now
        if self.stop_at is not None and not self.deaf:
            last = min(last, self.stop_at + self.pace)
        if last < self.ready_at:
            return self.first - 1
        return int(min(self.training["steps"], self.first - 1 + (last - self.ready_at) // self.pace))

    def answer(self, seen: Seen, now: float) -> Reply | None:
        """What it has to tell, as `Attempt.advance` would; None for nothing."""
        steps, seed, reached = self.training["steps"], self.training["seed"], self.reached(now)
        failed = self.doom in ("error", "nan", "data") and now >= self.doom_at
        if now < self.ready_at and not failed:
            return None
        records = tuple(chain(steps, seed)[max(seen.step + 1, self.first):reached + 1])
        infos = tuple(info for info in self.committed(now) if info.step > seen.checkpoint)
        status, final, failure = self._status(reached, now, failed)
        started = None if seen.started or now < self.ready_at else Started({"code": {"version": "0"}}, {"rank": 0}, MANIFEST,
                                                                          self.resumed_from)
        reply = Reply(started, records, (), infos, status, final, failure)
        return None if reply.empty else reply

    def _status(self, reached: int, now: float, failed: bool) -> tuple[Any, CheckpointInfo | None, Failure | None]:
        steps, seed = self.training["steps"], self.training["seed"]
        if reached == steps:
            return "done", checkpoint(steps, seed, steps), None
        if failed:
            reasons: dict[str, Any] = {"nan": "non_finite", "data": "bad_data"}
            return "failed", None, Failure("failed", f"it failed of {self.doom}", reasons.get(self.doom))
        stopped = self.stop_at is not None and not self.deaf and now >= self.stop_at + self.pace
        return ("stopped" if stopped else "running"), None, None

    def committed(self, now: float) -> list[CheckpointInfo]:
        """The checkpoints that it has written."""
        steps, seed, reached = self.training["steps"], self.training["seed"], self.reached(now)
        at = {step for step in range(max(self.first, 1), reached + 1) if step % CHECKPOINT_STEPS == 0 or step == steps}
        if self.stop_at is not None and not self.deaf and now >= self.stop_at + self.pace and reached >= max(1, self.first):
            at.add(reached)
        return [checkpoint(steps, seed, step) for step in sorted(at)]


@dataclass
class Machines:
    """What is there, and who holds it, whichever scheduler placed it."""

    choose: random.Random
    nodes: list[NodeSize]
    away: list[NodeSize] = field(default_factory=list)         # lost, and may come back
    now: float = 0.0
    faulty: bool = True
    workers: dict[str, Worker] = field(default_factory=dict)
    stored: dict[str, set[int]] = field(default_factory=dict)  # steps of a run's checkpoints on the shared disk
    dooms: dict[str, set[Doom]] = field(default_factory=dict)   # what happened to a run's workers
    placed: Callable[[Worker], None] = lambda worker: None      # is shown each one, right after

    def settle(self) -> None:
        """Checkpoints reach the disk, and devices become free."""
        for name, worker in list(self.workers.items()):
            if worker.node is None and worker.killed_at is None:
                self._seat(worker)
            end = worker.killed_at if worker.killed_at is not None else self.now
            self.stored[run_of(name)].update(info.step for info in worker.committed(min(end, self.now, worker.leaves_at)))
            if worker.died(self.now) is not None:
                self.dooms[run_of(name)].add(worker.doom)
            if not worker.holds(self.now):
                del self.workers[name]

    def place(self, payload: Payload) -> Worker:
        assert payload.name not in self.workers, f"{payload.name} is placed twice"
        run_id, choose = run_of(payload.name), self.choose
        at_most = -1 if payload.last_step is None else payload.last_step
        usable = [step for step in self.stored.setdefault(run_id, set()) if step <= at_most]
        doom: Doom = "none"
        if self.faulty and choose.random() < 0.3:
            doom = choose.choice(("crash", "crash", "memory", "error", "error", "nan", "data"))
        worker = Worker(payload, choose.choice((0.3, 1.0, 3.0)), doom, self.faulty and choose.random() < 0.1,
                        max(usable, default=None))
        self.dooms.setdefault(run_id, set())
        if doom in ("error", "nan", "data"):
            self.dooms[run_id].add(doom)
        self.workers[payload.name] = worker
        self._seat(worker)
        self.placed(worker)
        return worker

    def left(self, node: NodeSize) -> NodeSize:
        """What nobody holds of a node."""
        for worker in self.workers.values():
            if worker.node == node.name and worker.holds(self.now):
                node = node.less(worker.payload.devices)
        return node

    def _seat(self, worker: Worker) -> None:
        """Begin a worker on the node that its payload names, once there is room for it."""
        if any(node.name == worker.payload.node and self.left(node).ranks(worker.payload.devices) for node in self.nodes):
            worker.node = worker.payload.node
            worker.ready_at = self.now + self.choose.choice((0.2, 1.0, 4.0))
            worker.doom_at = self.now + self.choose.uniform(0.0, 12.0)
            worker.leaves_at = self.now + worker.payload.lease_seconds

    def kill(self, worker: Worker) -> None:
        if worker.killed_at is None:
            worker.killed_at = self.now
            slow = self.faulty and worker.node is not None
            worker.freed_at = self.now + (self.choose.choice((0.0, 0.0, 1.0, 5.0, 100.0)) if slow else 0.0)

    def lose(self, node: NodeSize) -> None:
        """A node goes, and what runs on it."""
        self.settle()
        self.nodes.remove(node)
        self.away.append(node)
        for worker in self.workers.values():
            if worker.node == node.name:
                worker.killed_at = self.now if worker.killed_at is None else worker.killed_at
                worker.freed_at = self.now

    def restore(self, node: NodeSize, cpus: int) -> None:
        """A node that was lost comes back, perhaps with other CPUs."""
        self.away.remove(node)
        self.nodes.append(replace(node, cpus=cpus))


def run_of(name: str) -> str:
    return name.rsplit("-", 1)[0]


class Hands:
    """What a scheduler has of the machines."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines


def may_fail(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A call that at times fails, having done nothing or all of it."""

    @wraps(method)
    def called(self: Hands, *args: P.args, **kwargs: P.kwargs) -> R:
        draw = self._machines.choose.random() if self._machines.faulty else 1.0
        if draw < TROUBLE:
            raise ClusterTrouble("nothing was done")
        result = method(self, *args, **kwargs)
        if draw < 2 * TROUBLE:
            raise ClusterTrouble("the answer was lost")
        return result

    return called


class SimulatedHandle(Hands):
    """See `mok_workers.cluster.Handle`. Answers come late, twice, or never."""

    def __init__(self, machines: Machines, worker: Worker) -> None:
        super().__init__(machines)
        self._worker = worker
        self._question: Seen | None = None
        self._arrives = 0.0
        self._again: Reply | None = None

    @may_fail
    def ask(self, seen: Seen, lease_seconds: float) -> None:
        if self._question is not None or self._worker.node is None:
            return
        choose, now = self._machines.choose, self._machines.now
        self._question = seen
        fate = choose.random() if self._machines.faulty else 1.0
        self._arrives = now + (choose.uniform(1.0, 8.0) if fate < 0.15 else 0.0)
        if fate < 0.03:
            self._arrives = inf  # lost: the worker will leave, since nobody asks
        elif self._worker.died(now) is None:
            self._worker.leaves_at = now + lease_seconds

    @may_fail
    def poll(self) -> Reply | Lost | None:
        machines = self._machines
        if (again := self._again) is not None:
            self._again = None
            return again
        lost = self._worker.died(machines.now)
        if lost is not None:
            return lost
        if self._question is None or machines.now < self._arrives:
            return None
        reply = self._worker.answer(self._question, machines.now)
        if reply is None:
            return None
        self._question = None
        if machines.faulty and machines.choose.random() < 0.1 and reply.status == "running":
            self._again = reply
        return reply

    @may_fail
    def stop(self) -> None:
        if not (self._machines.faulty and self._machines.choose.random() < 0.05) and self._worker.stop_at is None:
            self._worker.stop_at = self._machines.now

    @may_fail
    def release(self) -> None:
        self.end()

    @may_fail
    def end(self) -> None:
        self._machines.settle()
        self._machines.kill(self._worker)

    @may_fail
    def gone(self) -> bool:
        return not self._worker.holds(self._machines.now)


class SimulatedCluster(Hands):
    """See `mok_workers.cluster.Cluster`."""

    def start(self) -> None:
        pass

    def nodes(self) -> Sequence[NodeSize]:
        if not self._machines.nodes:
            raise ClusterLost("no node is alive")
        return list(self._machines.nodes)

    @may_fail
    def place(self, payload: Payload) -> SimulatedHandle:
        return SimulatedHandle(self._machines, self._machines.place(payload))

    def names(self) -> set[str]:
        self._machines.settle()
        return set(self._machines.workers)

    def end(self, name: str) -> None:
        if name in self._machines.workers:
            self._machines.kill(self._machines.workers[name])

    def tend(self) -> None:
        pass

    def close(self) -> None:
        pass

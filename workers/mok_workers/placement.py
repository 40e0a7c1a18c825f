"""Which devices take which run: pure functions over values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mok_service.spec import ExecutionSpec
from mok_workers.messages import Devices


@dataclass(frozen=True, slots=True)
class NodeSize:
    """What a node has in all, or what is left of it."""

    name: str
    cpus: int
    gpus: int

    def less(self, devices: Devices) -> NodeSize:
        return replace(self, cpus=self.cpus - devices.cpus, gpus=self.gpus - devices.gpus)

    def holds(self, devices: Devices) -> bool:
        return devices.cpus <= self.cpus and devices.gpus <= self.gpus


def devices_of(execution: ExecutionSpec, node: NodeSize) -> Devices:
    """What a run takes of a node.

    On CPUs: as many as it has threads, but never more than there are (more threads than CPUs is allowed, and changes no bit);
    0 threads take the whole node. On GPUs: its device and one CPU for the host's side, or as many as it names.
    """
    if execution.device == "cuda":
        return Devices("cuda", min(execution.threads or 1, max(1, node.cpus)), execution.count)
    return Devices("cpu", min(execution.threads, node.cpus) or node.cpus, 0)


def place(execution: ExecutionSpec, free: Sequence[NodeSize], whole: Sequence[NodeSize]) -> tuple[str, Devices] | None:
    """The node that takes a run, and what it takes there; None while none has room.

    Among the nodes with room, one without GPUs is preferred for a run that needs none, then the fullest, then the first by name.
    `free` and `whole` name the same nodes: what is left, and what there is.
    """
    sizes = {node.name: node for node in whole}
    fitting = [node for node in free if node.holds(devices_of(execution, sizes[node.name]))]
    if not fitting:
        return None
    wasted = {node.name: execution.device == "cpu" and sizes[node.name].gpus > 0 for node in fitting}
    best = min(fitting, key=lambda node: (wasted[node.name], node.gpus, node.cpus, node.name))
    return best.name, devices_of(execution, sizes[best.name])


def free_after(active: Iterable[ExecutionSpec], whole: Sequence[NodeSize]) -> list[NodeSize] | None:
    """What is left when these runs are placed in this order; None when they don't all fit."""
    free = list(whole)
    for execution in active:
        placed = place(execution, free, whole)
        if placed is None:
            return None
        free = [node.less(placed[1]) if node.name == placed[0] else node for node in free]
    return free


def fits(candidate: ExecutionSpec, active: Iterable[ExecutionSpec], whole: Sequence[NodeSize]) -> bool:
    """Whether a run has room beside those that are active."""
    return free_after([*active, candidate], whole) is not None

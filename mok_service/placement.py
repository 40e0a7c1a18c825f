"""Which devices take which run: pure functions over values. A run of several devices gets all of them, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mok_service.spec import ExecutionSpec


@dataclass(frozen=True, slots=True)
class Devices:
    """What an attempt holds of one node."""

    kind: Literal["cpu", "cuda"]
    cpus: int
    gpus: int

    def times(self, ranks: int) -> Devices:
        return replace(self, cpus=self.cpus * ranks, gpus=self.gpus * ranks)


@dataclass(frozen=True, slots=True)
class NodeSize:
    """What a node has in all, or what is left of it."""

    name: str
    cpus: int
    gpus: int

    def less(self, devices: Devices) -> NodeSize:
        return replace(self, cpus=self.cpus - devices.cpus, gpus=self.gpus - devices.gpus)

    def ranks(self, devices: Devices) -> int:
        """How many times it holds these devices."""
        of_each = [(self.cpus, devices.cpus), (self.gpus, devices.gpus)]
        return max(0, min(have // wanted for have, wanted in of_each if wanted))


@dataclass(frozen=True, slots=True)
class Part:
    """What a run gets of one node."""

    node: str
    ranks: int
    devices: Devices


@dataclass(frozen=True, slots=True)
class Held:
    """What an active run holds. `node`: where, as its attempt's row says; None: not on record, so anywhere."""

    execution: ExecutionSpec
    node: str | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """That a run has room, and on which node; None: on several, or wherever."""

    node: str | None = None


def devices_of(execution: ExecutionSpec, node: NodeSize) -> Devices:
    """What one rank of a run takes of a node.

    On CPUs: as many as it has threads, but never more than there are (more threads than CPUs is allowed, and changes no bit);
    0 threads take the whole node. On GPUs: one, and one CPU for the host's side, or as many as it names.
    """
    if execution.device == "cuda":
        return Devices("cuda", min(execution.threads or 1, max(1, node.cpus)), 1)
    return Devices("cpu", min(execution.threads, node.cpus) or max(1, node.cpus), 0)


def place(execution: ExecutionSpec, free: Sequence[NodeSize], whole: Sequence[NodeSize]) -> tuple[Part, ...] | None:
    """The nodes that take a run, and what it takes of each; None while there isn't room for all of it.

    One node takes all of it if one can: one without GPUs is preferred for a run that needs none, then the fullest, then the
    first by name. Otherwise the fewest nodes do. `free` and `whole` name the same nodes: what is left, and what there is.
    """
    sizes = {node.name: node for node in whole}
    rank = {node.name: devices_of(execution, sizes[node.name]) for node in free}
    room = {node.name: node.ranks(rank[node.name]) for node in free}
    if sum(room.values()) < execution.count:
        return None

    def wasted(node: NodeSize) -> bool:
        return execution.device == "cpu" and sizes[node.name].gpus > 0

    for_all = [node for node in free if room[node.name] >= execution.count]
    if for_all:
        nodes = [min(for_all, key=lambda node: (wasted(node), node.gpus, node.cpus, node.name))]
    else:
        nodes = sorted(free, key=lambda node: (-room[node.name], wasted(node), node.name))
    parts, missing = [], execution.count
    for node in nodes:
        ranks = min(room[node.name], missing)
        if ranks:
            parts.append(Part(node.name, ranks, rank[node.name].times(ranks)))
            missing -= ranks
    return tuple(parts)


def place_all(
    wanted: Sequence[ExecutionSpec], whole: Sequence[NodeSize], free: Sequence[NodeSize] | None = None
) -> list[tuple[Part, ...]] | None:
    """Where each of these runs goes, in their order; None when they don't all fit. `free`: what is left, if not all.

    The most demanding are placed first, whatever order they come in: whether runs that hold devices have room must not depend
    on who came first, on a clock that was set back, or on who has ended between them.
    """
    free, found = list(whole if free is None else free), dict[int, tuple[Part, ...]]()
    for index in sorted(range(len(wanted)), key=lambda index: _modesty(wanted[index])):
        placed = place(wanted[index], free, whole)
        if placed is None:
            return None
        found[index] = placed
        taken = {part.node: part.devices for part in placed}
        free = [node.less(taken[node.name]) if node.name in taken else node for node in free]
    return [found[index] for index in range(len(wanted))]


def _modesty(execution: ExecutionSpec) -> tuple[bool, int, bool, int]:
    """The least first: GPUs are on few nodes, and 0 threads take a whole one."""
    return execution.device != "cuda", -execution.count, execution.threads != 0, -execution.threads


def left(active: Sequence[Held], whole: Sequence[NodeSize]) -> list[NodeSize]:
    """What is free of each node beside the runs whose node is on record; a node that is gone holds none of them."""
    free = {node.name: node for node in whole}
    for node in whole:
        for held in active:
            if held.node == node.name:
                devices = devices_of(held.execution, node).times(held.execution.count)
                free[node.name] = free[node.name].less(devices)
    return list(free.values())


def room_beside(candidate: ExecutionSpec, active: Sequence[Held], whole: Sequence[NodeSize]) -> Room | None:
    """Where a run has room beside those that are active; None when it has none."""
    anywhere = [held.execution for held in active if held.node is None]
    placed = place_all([*anywhere, candidate], whole, left(active, whole))
    if placed is None:
        return None
    nodes = [part.node for part in placed[-1]]
    return Room(nodes[0] if len(nodes) == 1 else None)

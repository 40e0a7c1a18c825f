"""Placement over values."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mok_service.placement import Devices, Held, NodeSize, Part, Room, devices_of, left, place, place_all, room_beside
from mok_service.spec import ExecutionSpec

LAPTOP = NodeSize("laptop", 2, 0)
SERVER = NodeSize("server", 16, 2)


def spec(**fields: Any) -> ExecutionSpec:
    return ExecutionSpec(**fields)


def fits(candidate: ExecutionSpec, active: list[ExecutionSpec], whole: list[NodeSize]) -> bool:
    """Whether it has room beside runs whose nodes aren't on record."""
    return room_beside(candidate, [Held(execution) for execution in active], whole) is not None


@pytest.mark.parametrize(("fields", "node", "expected"), [
    ({}, LAPTOP, Devices("cpu", 2, 0)),
    ({"threads": 1}, LAPTOP, Devices("cpu", 1, 0)),
    ({"threads": 3}, LAPTOP, Devices("cpu", 2, 0)),
    ({"device": "cuda"}, SERVER, Devices("cuda", 1, 1)),
    ({"device": "cuda", "threads": 4}, SERVER, Devices("cuda", 4, 1)),
    ({"device": "cuda", "count": 2}, SERVER, Devices("cuda", 1, 1)),
])
def test_what_a_rank_takes(fields: dict[str, Any], node: NodeSize, expected: Devices) -> None:
    assert devices_of(spec(**fields), node) == expected


def test_a_run_without_threads_has_the_machine_to_itself() -> None:
    assert fits(spec(), [], [LAPTOP])
    assert not fits(spec(), [spec(threads=1)], [LAPTOP]) and not fits(spec(threads=1), [spec()], [LAPTOP])
    assert fits(spec(threads=1), [spec(threads=1)], [LAPTOP])
    assert not fits(spec(threads=1), [spec(threads=1)] * 2, [LAPTOP])


def test_no_node_takes_what_it_does_not_have() -> None:
    assert not fits(spec(), [], [])
    assert not fits(spec(device="cuda"), [], [LAPTOP])
    assert not fits(spec(device="cuda", count=3), [], [SERVER])
    assert fits(spec(device="cuda"), [spec(device="cuda")], [SERVER])
    assert not fits(spec(device="cuda"), [spec(device="cuda")] * 2, [SERVER])


def test_a_cpu_run_keeps_off_the_gpus_where_it_can() -> None:
    assert place(spec(threads=2), [SERVER, LAPTOP], [SERVER, LAPTOP]) == (Part("laptop", 1, Devices("cpu", 2, 0)),)
    busy = LAPTOP.less(Devices("cpu", 1, 0))
    assert place(spec(threads=3), [SERVER, busy], [SERVER, LAPTOP]) == (Part("server", 1, Devices("cpu", 3, 0)),)


def test_runs_are_packed_and_what_is_left_adds_up() -> None:
    whole = [NodeSize("a", 4, 1), NodeSize("b", 4, 1)]
    assert place_all([spec(device="cuda", threads=2)] * 2, whole) == [
        (Part(name, 1, Devices("cuda", 2, 1)),) for name in ("a", "b")]
    assert place_all([spec(device="cuda")] * 3, whole) is None


def test_whether_all_fit_does_not_depend_on_who_came_first() -> None:
    """On nodes of 3 and 2 CPUs, runs of 2, 2 and 1 threads have room, but not if the small one is placed first."""
    whole = [NodeSize("a", 3, 0), NodeSize("b", 2, 0)]
    for wanted in itertools.permutations([spec(threads=2), spec(threads=2), spec(threads=1)]):
        placed = place_all(wanted, whole)
        assert placed is not None
        assert [(of.threads, part.devices.cpus) for of, (part,) in zip(wanted, placed, strict=True)] == [
            (of.threads, of.threads) for of in wanted]


def test_a_gang_gets_all_its_devices_or_none() -> None:
    whole = [NodeSize("a", 8, 2), NodeSize("b", 8, 4), NodeSize("c", 8, 4)]
    assert place(spec(device="cuda", count=4), whole, whole) == (Part("b", 4, Devices("cuda", 4, 4)),)
    assert place(spec(device="cuda", count=6), whole, whole) == (
        Part("b", 4, Devices("cuda", 4, 4)), Part("c", 2, Devices("cuda", 2, 2)),
    ), "the fewest nodes"
    assert place(spec(device="cuda", count=11), whole, whole) is None
    assert place_all([spec(device="cuda"), spec(device="cuda", count=10)], whole) is None
    assert place_all([spec(device="cuda"), spec(device="cuda", count=9)], whole) == [
        (Part("a", 1, Devices("cuda", 1, 1)),),
        (Part("b", 4, Devices("cuda", 4, 4)), Part("c", 4, Devices("cuda", 4, 4)), Part("a", 1, Devices("cuda", 1, 1))),
    ], "the larger one first, on whole nodes"
    assert place(spec(count=3), whole, whole) == tuple(Part(name, 1, Devices("cpu", 8, 0)) for name in "abc")
    assert place(spec(count=4), whole, whole) is None


def test_what_is_free_lies_where_the_runs_are() -> None:
    whole = [NodeSize("a", 2, 0), NodeSize("b", 2, 0)]
    apart = [Held(spec(threads=1), "a"), Held(spec(threads=1), "b")]
    assert left(apart, whole) == [NodeSize("a", 1, 0), NodeSize("b", 1, 0)]
    assert room_beside(spec(threads=2), apart, whole) is None
    assert room_beside(spec(threads=1), apart, whole) == Room("a")
    assert room_beside(spec(threads=2), apart[1:], whole) == Room("a")
    assert room_beside(spec(threads=2), [Held(spec(threads=1)), apart[1]], whole) == Room("a"), "it may be beside the other"
    assert room_beside(spec(threads=2), [*apart[1:], Held(spec(), "gone")], whole) == Room("a"), "it holds nothing"
    assert room_beside(spec(count=2), [], whole) == Room(None), "on both"


NODE_SIZES = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=4).map(
    lambda sizes: [NodeSize(f"n{number}", *size) for number, size in enumerate(sizes)])
SPECS = st.builds(ExecutionSpec, device=st.sampled_from(["cpu", "cuda"]), count=st.integers(1, 6), threads=st.integers(0, 7))


@given(NODE_SIZES, st.lists(SPECS, max_size=8))
def test_whatever_is_placed_was_free(whole: list[NodeSize], wanted: list[ExecutionSpec]) -> None:
    free = {node.name: node for node in whole}
    for execution in wanted:
        placed = place(execution, list(free.values()), whole)
        assert fits(execution, [], whole) or placed is None
        for part in placed or ():
            free[part.node] = free[part.node].less(part.devices)
            assert free[part.node].cpus >= 0 and free[part.node].gpus >= 0
        if placed is not None:
            assert sum(part.ranks for part in placed) == execution.count
            assert execution.device == "cpu" or sum(part.devices.gpus for part in placed) == execution.count


@given(NODE_SIZES, st.lists(SPECS, max_size=8), st.randoms())
def test_the_order_of_the_runs_changes_nothing(whole: list[NodeSize], wanted: list[ExecutionSpec], chance: random.Random) -> None:
    mixed = list(wanted)
    chance.shuffle(mixed)
    placed, again = place_all(wanted, whole), place_all(mixed, whole)
    assert (placed is None) == (again is None)
    left = {node.name: node for node in whole}
    for part in itertools.chain.from_iterable(placed or ()):
        left[part.node] = left[part.node].less(part.devices)
    assert all(node.cpus >= 0 and node.gpus >= 0 for node in left.values())


@given(NODE_SIZES, st.lists(SPECS, max_size=12))
def test_runs_that_start_one_after_the_other_have_what_they_hold(whole: list[NodeSize], wanted: list[ExecutionSpec]) -> None:
    active = list[Held]()
    for execution in (each.model_copy(update={"count": 1}) for each in wanted):
        room = room_beside(execution, active, whole)
        if room is None:
            assert not any(node.ranks(devices_of(execution, size)) for node, size in zip(left(active, whole), whole, strict=True))
        else:
            active.append(Held(execution, room.node))
    assert all(node.cpus >= 0 and node.gpus >= 0 for node in left(active, whole))

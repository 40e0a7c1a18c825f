"""Placement over values."""

from __future__ import annotations

from typing import Any

import pytest

from mok_service.spec import ExecutionSpec
from mok_workers.messages import Devices
from mok_workers.placement import NodeSize, devices_of, fits, free_after, place

LAPTOP = NodeSize("laptop", 2, 0)
SERVER = NodeSize("server", 16, 2)


def spec(**fields: Any) -> ExecutionSpec:
    return ExecutionSpec(**fields)


@pytest.mark.parametrize(("fields", "node", "expected"), [
    ({}, LAPTOP, Devices("cpu", 2, 0)),
    ({"threads": 1}, LAPTOP, Devices("cpu", 1, 0)),
    ({"threads": 3}, LAPTOP, Devices("cpu", 2, 0)),
    ({"device": "cuda"}, SERVER, Devices("cuda", 1, 1)),
    ({"device": "cuda", "threads": 4}, SERVER, Devices("cuda", 4, 1)),
    ({"device": "cuda", "count": 2}, SERVER, Devices("cuda", 1, 2)),
])
def test_what_a_run_takes(fields: dict[str, Any], node: NodeSize, expected: Devices) -> None:
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
    assert place(spec(threads=2), [SERVER, LAPTOP], [SERVER, LAPTOP]) == ("laptop", Devices("cpu", 2, 0))
    busy = LAPTOP.less(Devices("cpu", 1, 0))
    assert place(spec(threads=3), [SERVER, busy], [SERVER, LAPTOP]) == ("server", Devices("cpu", 3, 0))


def test_runs_are_packed_and_what_is_left_adds_up() -> None:
    whole = [NodeSize("a", 4, 1), NodeSize("b", 4, 1)]
    free = free_after([spec(device="cuda", threads=2), spec(device="cuda", threads=2)], whole)
    assert free == [NodeSize("a", 2, 0), NodeSize("b", 2, 0)]
    assert free_after([spec(device="cuda")] * 3, whole) is None

"""The order of the queue and what may pass it, over values: priorities, fair shares, room kept, no starvation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mok_service.placement import NodeSize, Room, room_beside
from mok_service.runs.queue import (
    AGING_SECONDS,
    HALF_LIFE_SECONDS,
    OVERHEAD_SECONDS,
    Busy,
    Choice,
    Fits,
    Limits,
    Shares,
    Use,
    Waiting,
    choose,
    order,
    reserve,
)
from mok_service.spec import ExecutionSpec

NOW = datetime(2026, 6, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


def waiting(name: str, tenant: str = "t", *, age: float = 0.0, queued: float | None = None, **execution: int) -> Waiting:
    """A run that was submitted `age` seconds ago, and came into the queue `queued` seconds ago."""
    at = NOW - timedelta(seconds=age)
    return Waiting(name, tenant, ExecutionSpec(**execution), at, at if queued is None else NOW - timedelta(seconds=queued))


def busy(name: str, tenant: str = "t", *, since: float = 0.0, ends: float | None = None, **execution: int) -> Busy:
    end = None if ends is None else NOW + timedelta(seconds=ends)
    return Busy(name, tenant, ExecutionSpec(**execution), NOW - timedelta(seconds=since), end)


def names(ordered: Sequence[Waiting]) -> list[str]:
    return [run.id for run in ordered]


def room(devices: int) -> Fits:
    """A cluster of so many devices."""
    return lambda run, active: Room() if run.count + sum(held.execution.count for held in active) <= devices else None


# ---- The order -------------------------------------------------------------------------------------------------------

def test_priority_then_age() -> None:
    queued = [waiting("young", age=1), waiting("urgent", priority=9), waiting("old", age=2), waiting("later", age=3, priority=-1)]
    assert names(order(queued, [], Shares(), NOW)) == ["urgent", "old", "young", "later"]


def test_tenants_take_turns_whoever_came_first() -> None:
    queued = [waiting(f"a{n}", "a", age=100 - n) for n in range(3)] + [waiting(f"b{n}", "b", age=9 - n) for n in range(3)]
    assert names(order(queued, [], Shares(), NOW)) == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_weights_are_shares() -> None:
    queued = [waiting(f"{tenant}{n}", tenant, age=50 - n) for tenant in "ab" for n in range(12)]
    first = names(order(queued, [], Shares({"a": Limits(weight=3.0)}), NOW))[:8]
    assert sum(name.startswith("a") for name in first) == 6


def test_who_holds_devices_and_who_used_them_lately_goes_later() -> None:
    queued = [waiting("a", "a", age=9), waiting("b", "b", age=5), waiting("c", "c", age=1)]
    use = {"b": Use(0.0, NOW).plus(1, NOW - HOUR, NOW)}
    assert names(order(queued, [busy("x", "a")], Shares(use=use), NOW)) == ["c", "b", "a"]
    later = NOW + timedelta(seconds=20 * HALF_LIFE_SECONDS)
    assert names(order([replace(run, queued_at=later) for run in queued], [], Shares(use=use), later)) == ["a", "c", "b"]


def test_steady_use_of_a_device_counts_for_one_device() -> None:
    use = Use(0.0, NOW - 100 * HOUR).plus(1, NOW - 100 * HOUR, NOW)
    assert use.used * 0.693147 / HALF_LIFE_SECONDS == pytest.approx(1.0, rel=1e-3)
    assert Use(8.0, NOW).plus(0, NOW, NOW - HOUR) == Use(8.0, NOW), "a clock that was set back adds nothing, and takes nothing"


def test_a_priority_that_isnt_served_rises() -> None:
    def first(waited: float, turn: float | None = None) -> str:
        queued = [waiting("low", queued=waited), waiting("high", priority=2)]
        turns = {} if turn is None else {0: NOW - timedelta(seconds=turn)}
        return names(order(queued, [], Shares(turns=turns), NOW))[0]

    assert first(3 * AGING_SECONDS - 1) == "high" and first(3 * AGING_SECONDS) == "low"
    assert first(3 * AGING_SECONDS, turn=10.0) == "high", "it has just had its turn"


def test_age_doesnt_undo_fair_shares() -> None:
    backlog = [waiting(f"a{n}", "a", age=90_000, queued=90_000) for n in range(5)]
    assert names(order([*backlog, waiting("b", "b")], [busy("x", "a")], Shares(), NOW))[0] == "b"


# ---- What may pass ---------------------------------------------------------------------------------------------------

BIG = waiting("big", age=9, count=4)


def test_the_first_that_fits_starts_and_the_room_of_one_that_waits_is_kept() -> None:
    assert choose([BIG], [], room(4), Shares(), NOW) == Choice(BIG, None)
    small = waiting("small")
    assert choose([BIG, small], [busy("x", count=3, ends=60)], room(4), Shares(), NOW) is None, "it could delay the big one"


def test_what_ends_before_the_room_is_free_may_pass() -> None:
    active, small = [busy("x", count=3, ends=3600)], waiting("small", run_deadline_seconds=600)
    assert choose([BIG, small], active, room(4), Shares(), NOW) == Choice(small, BIG)
    soon = [busy("x", count=3, ends=600 + OVERHEAD_SECONDS - 1)]
    assert choose([BIG, small], soon, room(4), Shares(), NOW) is None
    unknown = [busy("x", count=3)]
    assert choose([BIG, small], unknown, room(4), Shares(), NOW) is None, "nobody knows when the big one could start"


def test_what_fits_beside_it_may_pass() -> None:
    active, small = [busy("x", count=3, ends=60), busy("y", ends=900)], waiting("small")
    assert choose([BIG, small], active, room(6), Shares(), NOW) == Choice(small, BIG)
    assert choose([BIG, replace(small, execution=ExecutionSpec(count=2))], active, room(6), Shares(), NOW) is None


def test_what_passes_leaves_the_node_alone_that_is_kept() -> None:
    """The big one gets the node that `y` leaves. A small one would start on `a`, by its name."""
    big, small, nodes = waiting("big", threads=2), waiting("small", threads=1), [NodeSize("a", 2, 0), NodeSize("b", 2, 0)]
    for left, choice in (("a", None), ("b", Choice(small, big, "a"))):
        active = [replace(busy("x", threads=1), node="b" if left == "a" else "a"),
                  replace(busy("y", ends=60, threads=1), node=left)]
        assert choose([big, small], active, lambda run, held: room_beside(run, held, nodes), Shares(), NOW) == choice


def test_what_never_fits_holds_up_nobody() -> None:
    small = waiting("small")
    assert choose([BIG, small], [], room(3), Shares(), NOW) == Choice(small, None)


def test_a_tenant_at_its_quota_holds_up_nobody() -> None:
    shares = Shares({"a": Limits(runs_max=1), "b": Limits(devices_max=2), "c": Limits(checkpoint_bytes_max=10)}, stored={"c": 10})
    queued = [waiting("a", "a"), waiting("b", "b", count=2), waiting("c", "c"), waiting("d", "d")]
    active = [busy("x", "a"), busy("y", "b")]
    assert choose(queued, active, room(9), shares, NOW) == Choice(queued[3], None)
    assert choose(queued, [], room(9), shares, NOW) == Choice(queued[0], None)


def test_nobody_takes_the_quota_of_one_that_waits_for_devices() -> None:
    active, small = [busy("x", "other", count=3, ends=60)], waiting("small")
    assert choose([BIG, small], active, room(5), Shares({"t": Limits(runs_max=2)}), NOW) == Choice(small, BIG)
    assert choose([BIG, small], active, room(5), Shares({"t": Limits(runs_max=1)}), NOW) is None


# ---- Properties ------------------------------------------------------------------------------------------------------

RUNS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(-3, 3), st.integers(1, 4), st.integers(0, 5000)), max_size=12).map(
    lambda rows: [waiting(f"r{n}", tenant, age=age, priority=priority, count=count)
                  for n, (tenant, priority, count, age) in enumerate(rows)])
ENDS = st.one_of(st.none(), st.integers(1, 5000))
ACTIVE = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 2), st.integers(0, 5000), ENDS), max_size=4).map(
    lambda rows: [busy(f"x{n}", tenant, since=since, ends=ends, count=count)
                  for n, (tenant, count, since, ends) in enumerate(rows)])


@given(RUNS, ACTIVE)
def test_the_order_is_one_order_however_the_rows_come(queued: list[Waiting], active: list[Busy]) -> None:
    expected = order(queued, active, Shares(), NOW)
    assert sorted(names(expected)) == sorted(names(queued))
    assert order(queued[::-1], active[::-1], Shares(), NOW) == expected


@given(RUNS, ACTIVE, st.integers(4, 8))
def test_who_passes_takes_no_room_from_whom_it_passes(queued: list[Waiting], active: list[Busy], devices: int) -> None:
    """If those that are active end when they are expected to, the run that was passed starts when it would have started."""
    choice = choose(order(queued, active, Shares(), NOW), active, room(devices), Shares(), NOW)
    if choice is None or choice.passed is None:
        return
    before = reserve(choice.passed, active, room(devices))
    end = NOW + timedelta(seconds=choice.run.execution.run_deadline_seconds)
    passing = Busy(choice.run.id, choice.run.tenant, choice.run.execution, NOW, end)
    after = reserve(choice.passed, [*active, passing], room(devices))
    assert after.at == before.at or (before.at is not None and after.at is not None and after.at <= before.at)


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_nobody_starves(data: st.DataObject) -> None:
    """A stream of urgent small runs of others never ends, and one unimportant run that wants the whole cluster still starts."""
    big = replace(waiting("big", "poor", count=3), execution=ExecutionSpec(count=3, priority=-2))
    queued, active, shares, now = [big], list[Busy](), Shares(), NOW
    for number in range(400):
        now += timedelta(seconds=data.draw(st.sampled_from((20, 60))) if number < 20 else 60)
        active = [run for run in active if run.expected_end is not None and run.expected_end > now]
        urgent = ExecutionSpec(priority=number % 3, run_deadline_seconds=300)
        queued.append(Waiting(f"s{number}", "abc"[number % 3], urgent, now, now))
        while (choice := choose(order(queued, active, shares, now), active, room(3), shares, now)) is not None:
            run = choice.run
            if run is big:
                return
            queued.remove(run)
            active.append(Busy(run.id, run.tenant, run.execution, now, now + timedelta(seconds=100 + 37 * (number % 5))))
            if choice.passed is None:
                shares = replace(shares, turns={**shares.turns, run.execution.priority: now})
        queued = queued[:40]  # more than a claim looks at
    pytest.fail("the big run never started")

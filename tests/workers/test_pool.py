"""Which processes are kept for further attempts, for how long, and when they are let go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from mok_service.settings import Settings
from mok_workers.messages import Lost, Resting
from mok_workers.pool import PAUSE_SECONDS, Limits, Pool

SMALL = Resting(200 << 20, 0.5)
NODE, OTHER = "node", "other"


@dataclass
class FakeActors:
    """Actors are numbers. `says`: what the next answer of one will be; nothing for one that is silent."""

    made: list[str] = field(default_factory=list)
    asked: list[tuple[int, str]] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)
    says: dict[int, Resting | Lost] = field(default_factory=dict)

    def make(self, node: str) -> Any:
        self.made.append(node)
        return len(self.made) - 1

    def rest(self, actor: Any, name: str, seconds: float) -> Any:
        assert actor not in self.killed
        self.asked.append((actor, name))
        return actor

    def answer(self, call: Any) -> Resting | Lost | None:
        return self.says.pop(call, None)

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


@dataclass
class Clock:
    now: float = 0.0


@pytest.fixture
def actors() -> FakeActors:
    return FakeActors()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(actors: FakeActors, clock: Clock) -> Callable[..., Pool]:
    return lambda **limits: Pool(actors, Limits(**limits), lambda: clock.now)


def test_the_process_that_came_last_is_taken_first_and_only_on_its_node(actors: FakeActors, make: Callable[..., Pool]) -> None:
    pool = make()
    first, second = pool.take(NODE), pool.take(NODE)
    assert not first.kept
    for worker in (first, second):
        worker.name = f"run-{worker.actor}"
        pool.give(worker)
    assert actors.asked == [(0, "run-0"), (1, "run-1")], "each is told to tidy up after its attempt"
    elsewhere = pool.take(OTHER)
    assert elsewhere not in (first, second) and actors.made == [NODE, NODE, OTHER]
    assert pool.take(NODE) is second and second.kept
    assert pool.take(NODE) is first and pool.take(NODE).actor == 3


def test_what_exceeds_the_limits_is_ended(actors: FakeActors, make: Callable[..., Pool]) -> None:
    pool = make(kept_max=1, attempts_max=2)
    one, two = pool.take(NODE), pool.take(NODE)
    pool.give(one)
    pool.give(two)
    assert actors.killed == [two.actor], "one more than are kept"
    assert pool.take(NODE) is one
    pool.give(one)
    assert actors.killed == [two.actor, one.actor] and not pool.idle, "it executed as many attempts as it may"


def test_none_is_kept_where_none_shall_be(actors: FakeActors, make: Callable[..., Pool]) -> None:
    pool = make(kept_max=0)
    pool.give(worker := pool.take(NODE))
    assert actors.killed == [worker.actor] and not pool.idle


def test_an_idle_process_is_let_go_after_its_time(actors: FakeActors, clock: Clock, make: Callable[..., Pool]) -> None:
    pool = make(seconds=300.0)
    early, late = pool.take(NODE), pool.take(NODE)
    pool.give(early)
    clock.now = 100.0
    pool.give(late)
    clock.now = 299.0
    pool.tend([NODE])
    assert not actors.killed
    clock.now = 300.0
    pool.tend([NODE])
    assert actors.killed == [early.actor] and pool.idle == [late]
    clock.now = 400.0
    pool.tend([NODE])
    assert actors.killed == [early.actor, late.actor]


@pytest.mark.parametrize("answer", [
    Resting((1 << 30) + 1, 0.5), Resting(200 << 20, 0.09), Lost("worker_lost", "it died"), Lost("failed", "it doesn't rest"),
])
def test_a_process_that_keeps_too_much_or_is_dead_goes(
    answer: Resting | Lost, actors: FakeActors, make: Callable[..., Pool]
) -> None:
    pool = make()
    bad, good = pool.take(NODE), pool.take(NODE)
    for worker in (bad, good):
        pool.give(worker)
    actors.says = {bad.actor: answer, good.actor: Resting(1 << 30, 0.1)}
    pool.tend([NODE])
    assert actors.killed == [bad.actor] and pool.idle == [good]
    assert actors.asked[-1] == (good.actor, ""), "it's asked again, or it would leave"


def test_processes_of_a_node_that_is_gone_are_forgotten(actors: FakeActors, make: Callable[..., Pool]) -> None:
    pool = make()
    pool.give(worker := pool.take(NODE))
    pool.tend([OTHER])
    assert actors.killed == [worker.actor] and not pool.idle


def test_when_a_run_lacks_memory_all_idle_ones_go(actors: FakeActors, make: Callable[..., Pool]) -> None:
    pool = make()
    used, idle = pool.take(NODE), pool.take(NODE)
    pool.give(idle)
    pool.clear("a run ran out of memory")
    assert actors.killed == [idle.actor] and not pool.idle
    pool.give(used)
    assert pool.idle == [used]


def test_as_many_as_wanted_are_ready_for_ever(actors: FakeActors, clock: Clock, make: Callable[..., Pool]) -> None:
    pool = make(ready=1, kept_max=2, seconds=10.0)
    pool.tend([NODE, OTHER])
    pool.tend([NODE, OTHER])
    assert actors.made == [NODE, OTHER], "before anything asked for them"
    clock.now = 1000.0
    pool.tend([NODE, OTHER])
    assert not actors.killed, "these stay"
    taken = pool.take(NODE)
    assert taken.kept, "it has been there before"
    pool.tend([NODE, OTHER])
    assert actors.made == [NODE, OTHER, NODE], "another takes its place"
    pool.give(taken)
    clock.now = 1010.0
    pool.tend([NODE, OTHER])
    assert actors.killed == [2], "the oldest of those that are more than ready"


def test_one_that_dies_at_its_start_is_replaced_but_not_at_once(
    actors: FakeActors, clock: Clock, make: Callable[..., Pool]
) -> None:
    pool = make(ready=1)
    pool.tend([NODE])
    actors.says = {0: Lost("worker_lost", "it died")}
    pool.tend([NODE])
    clock.now = PAUSE_SECONDS - 1.0
    pool.tend([NODE])
    assert actors.made == [NODE]
    clock.now = PAUSE_SECONDS
    pool.tend([NODE])
    assert actors.made == [NODE, NODE] and [worker.actor for worker in pool.idle] == [1]


def test_the_limits_are_the_settings() -> None:
    assert Limits.of(Settings()) == Limits()
    given = Settings(actors_ready=6, actors_kept_max=0, actor_idle_seconds=5.0, actor_runs_max=7, actor_gib_max=0.5)
    assert Limits.of(given) == Limits(6, 6, 5.0, 7, 1 << 29), "what is ready is kept"

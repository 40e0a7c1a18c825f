"""The scheduler and what users want: cancelling, pausing, deadlines; devices are free before anything says so."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

from mok_service import runs
from mok_service.errors import Conflict, LibraryUnusable
from mok_service.provenance.chain import StepRecord
from mok_workers.attempt import Control
from mok_workers.cluster import InProcessHandle
from mok_workers.messages import Payload
from mok_workers.scheduler import Scheduler
from tests.workers.fakes import FakeTraining, Opens
from tests.workers.world import MakeWorld, World


def test_cancelled_between_claim_and_start_no_worker_ever_exists(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = world.submit()
    mark_starting = runs.mark_starting

    def cancelled_just_before(*arguments: object) -> None:
        runs.cancel(world.db, run_id)
        mark_starting(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(runs, "mark_starting", cancelled_just_before)
    run = world.ended(run_id)
    assert run.status == "cancelled" and world.cluster.placed == [] and world.scheduler.idle


@pytest.mark.parametrize("step", [-1, 0, 2, 3])
def test_cancelled_only_once_the_devices_are_free(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    world = make_world(opens=Opens({step + 1: "wait"}, gate=True))
    run_id = world.submit()
    world.until(lambda: bool(world.cluster.handles))
    if step >= 0:
        world.until(lambda: world.run(run_id).step == step)
    held = True
    gone = InProcessHandle.gone
    monkeypatch.setattr(InProcessHandle, "gone", lambda self: not held and gone(self))
    runs.cancel(world.db, run_id)
    for _ in range(5):
        world.tick()
        assert world.run(run_id).status == "stopping"
    held = False
    assert isinstance(world.opens, Opens) and world.opens.go is not None
    world.opens.go.set()
    assert world.ended(run_id).status == "cancelled" and not world.cluster.handles
    assert world.ends(run_id) == ["stopped"]


def test_cancelled_while_it_writes_a_checkpoint(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 14: what was being written is on no record, and the devices are free."""
    writing, go, commit = threading.Event(), threading.Event(), FakeTraining._commit

    def slowly(training: FakeTraining, record: StepRecord) -> None:
        writing.set()
        assert go.wait(60)
        commit(training, record)

    monkeypatch.setattr(FakeTraining, "_commit", slowly)
    world = make_world()
    run_id = world.submit()
    world.until(writing.is_set)
    runs.cancel(world.db, run_id)
    world.until(lambda: world.handle(run_id).lost is not None)
    assert world.run(run_id).status == "stopping"
    go.set()
    assert world.ended(run_id).status == "cancelled" and not world.cluster.handles
    assert runs.checkpoints(world.db, run_id) == [] and world.ends(run_id) == ["stopped"]


def test_a_worker_that_cannot_be_seen_to_end_holds_no_run_for_ever(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = world.submit(steps=1000)
    world.stored(run_id, 0)
    monkeypatch.setattr(InProcessHandle, "gone", lambda self: False)
    runs.cancel(world.db, run_id)
    world.wait(world.settings.stop_seconds_max)
    assert world.run(run_id).status == "cancelled"


@pytest.mark.parametrize("step", [1, 3, 4])
def test_pausing_keeps_the_state_and_resuming_goes_on(make_world: MakeWorld, step: int) -> None:
    opens = Opens({step: "wait"}, gate=True)
    world = make_world(opens=opens)
    run_id = world.submit(checkpoint_interval=4)
    world.stored(run_id, step - 1)
    runs.pause(world.db, run_id)
    world.tick()
    assert world.run(run_id).status == "stopping" and opens.go is not None
    opens.go.set()
    world.until(lambda: world.run(run_id).status == "paused")
    assert world.run(run_id).step == step and not world.cluster.handles and world.scheduler.idle
    assert [c.info.step for c in runs.checkpoints(world.db, run_id)] == [step]
    for _ in range(5):
        world.tick()
    assert world.run(run_id).status == "paused" and not world.cluster.handles
    runs.resume(world.db, run_id)
    world.ended(run_id)
    world.assert_whole(run_id)
    assert world.cluster.placed[-1].last_step == step and world.ends(run_id) == ["stopped", "finished"]


def test_a_pause_between_two_looks_drops_no_record(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's first answer has everything, and the user pauses just before it is put on file."""
    run_id = world.submit()
    mark_running = runs.mark_running

    def paused_just_before(*arguments: object) -> object:
        with suppress(Conflict):
            runs.pause(world.db, run_id)
        return mark_running(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(runs, "mark_running", paused_just_before)
    world.until(lambda: bool(world.cluster.handles))
    world.cluster.handles[f"{run_id}-1"].attempt.join(10.0)
    world.until(lambda: world.run(run_id).status in ("paused", "failed", "succeeded"))
    monkeypatch.undo()
    if world.run(run_id).status == "paused":
        runs.resume(world.db, run_id)
    world.ended(run_id)
    world.assert_whole(run_id)


def test_without_a_native_library_a_run_fails_once_and_clearly(make_world: MakeWorld) -> None:
    def opens(payload: Payload, control: Control) -> FakeTraining:
        raise LibraryUnusable("libmok.so was built from other sources; run `make install`")

    world = make_world(opens=opens)
    run = world.ended(run_id := world.submit(max_attempts=3))
    assert (run.status, run.stop_reason, world.ends(run_id)) == ("failed", "library_unusable", ["failed"])
    assert run.message == "libmok.so was built from other sources; run `make install`"


def test_another_schedulers_attempts_on_the_same_cluster_are_left_alone(make_world: MakeWorld) -> None:
    world = make_world(opens=Opens({3: "wait"}, gate=True))
    run_id = world.submit(threads=1)
    world.stored(run_id, 2)
    other = Scheduler(world.db, world.cluster, world.settings, worker="other", boot_id="other")
    other.tick(world.now)
    assert world.handle(run_id).lost is None
    assert isinstance(world.opens, Opens) and world.opens.go is not None
    world.opens.go.set()
    world.ended(run_id)
    world.assert_whole(run_id)


def test_a_worker_too_slow_to_pause_is_ended_by_the_deadline(make_world: MakeWorld) -> None:
    opens = Opens({4: "wait"}, gate=True)
    world = make_world(opens=opens)
    run_id = world.submit()
    world.stored(run_id, 3)
    runs.pause(world.db, run_id)
    for _ in range(5):
        world.tick()
    assert world.run(run_id).status == "stopping"
    world.wait(world.settings.stop_seconds_max)
    assert opens.go is not None
    opens.go.set()
    world.until(lambda: world.run(run_id).status == "paused")
    runs.resume(world.db, run_id)
    world.ended(run_id)
    world.assert_whole(run_id)


def test_a_run_deadline_ends_the_worker(make_world: MakeWorld) -> None:
    opens = Opens({3: "wait"}, gate=True)
    world = make_world(opens=opens)
    run_id = world.submit(run_deadline_seconds=60)
    world.stored(run_id, 2)
    world.wait(60)
    assert opens.go is not None
    opens.go.set()
    run = world.ended(run_id)
    assert (run.status, run.stop_reason) == ("failed", "run_deadline") and not world.cluster.handles

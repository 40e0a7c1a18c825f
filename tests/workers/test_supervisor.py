"""The supervisor on real processes: whatever dies, nothing is left, and the exit status says why."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mok_workers.supervisor import RESTARTS_MAX, runs

SECONDS_MAX = 60.0
Start = Callable[[str], "Program"]


class Program:
    """A supervised program and what it told when it was ready."""

    def __init__(self, mode: str, folder: Path) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "tests.workers.supervised", mode, str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        self.seen = [psutil.Process(self.process.pid)]

    def ready(self, but: tuple[int, ...] = ()) -> dict[str, Any]:
        """What a child (none of `but`) told."""
        found: list[dict[str, Any]] = []

        def told() -> bool:
            reports = [json.loads(path.read_text()) for path in self.folder.glob("ready-*.json")]
            found[:] = [report for report in reports if report["child"] not in but]
            return bool(found)

        until(told)
        self.seen += [psutil.Process(found[0]["child"]), psutil.Process(found[0]["orphan"])]
        assert all(map(runs, self.seen[-2:]))
        return found[0]

    def gone(self) -> bool:
        return not any(map(runs, self.seen))


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not reached():
        assert time.monotonic() < deadline, "it never came to be"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Program] = []

    def program(mode: str) -> Program:
        made.append(Program(mode, tmp_path))
        return made[-1]

    yield program
    for found in made:
        for process in found.seen:
            if runs(process):
                process.kill()
        found.process.wait(SECONDS_MAX)
        assert found.process.stdout is not None
        found.process.stdout.close()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGHUP, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_the_child_and_what_it_left(start: Start, number: signal.Signals, status: int) -> None:
    program = start("wait")
    program.ready()
    program.process.send_signal(number)
    assert program.process.wait(SECONDS_MAX) == status
    assert program.gone(), "it ends after everything else"


def test_a_killed_child_is_replaced_once_everything_of_it_is_gone(start: Start) -> None:
    program = start("wait")
    first = program.ready()
    psutil.Process(first["child"]).kill()
    second = program.ready(but=(first["child"],))
    assert not runs(program.seen[1]) and not runs(program.seen[2])
    assert first["orphan"] != second["orphan"]
    program.process.terminate()
    assert program.process.wait(SECONDS_MAX) == 0 and program.gone()


def test_a_killed_supervisor_takes_its_child_along(start: Start) -> None:
    program = start("wait")
    program.ready()
    program.process.kill()
    until(lambda: not runs(program.seen[1]))


def test_a_child_that_does_not_stop_is_killed(start: Start) -> None:
    program = start("deaf")
    program.ready()
    program.process.terminate()
    assert program.process.wait(SECONDS_MAX) == 0 and program.gone()


def test_a_second_signal_ends_all_patience(start: Start) -> None:
    program = start("stubborn")
    program.ready()
    program.process.send_signal(signal.SIGINT)
    program.process.send_signal(signal.SIGHUP)
    assert program.process.wait(SECONDS_MAX) in (130, 0) and program.gone()  # two signals at once may come in any order


def test_a_failure_is_told_and_not_tried_again(start: Start, tmp_path: Path) -> None:
    program = start("fail")
    assert program.process.wait(SECONDS_MAX) == 1
    assert program.process.stdout is not None
    assert program.process.stdout.read() == b"ValueError: the disk is upside down\n"
    assert (tmp_path / "starts").read_text() == "x"


def test_a_child_that_always_dies_is_given_up(start: Start, tmp_path: Path) -> None:
    program = start("die")
    assert program.process.wait(SECONDS_MAX) == 1
    assert len((tmp_path / "starts").read_text()) == 1 + RESTARTS_MAX
    assert program.process.stdout is not None
    *again, last = program.process.stdout.read().decode().splitlines()
    assert again == ["the process died; it is started again"] * RESTARTS_MAX and "giving up" in last


def test_processes_that_were_there_before_are_left_alone(start: Start) -> None:
    program = start("neighbour")
    report = program.ready()
    children = psutil.Process(program.process.pid).children()
    (neighbour,) = (p for p in children if p.pid not in (report["child"], report["orphan"]))
    program.process.terminate()
    assert program.process.wait(SECONDS_MAX) == 0
    assert runs(neighbour)
    neighbour.kill()

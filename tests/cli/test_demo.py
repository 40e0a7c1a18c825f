"""`mok demo` and `mok api` as processes: the last line, the exit status, and that no process is left."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from mok_workers.supervisor import runs
from tests.cli.test_command import ROOT, environment
from tests.cli.test_train import SPEC
from tests.training.jobs import TEXT

SECONDS_MAX = 120.0


class Process:
    """A command in a process group of its own, and every process that it was seen to have."""

    def __init__(self, *arguments: str | Path) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "mok_service.cli", *map(str, arguments)], cwd=ROOT, start_new_session=True, text=True,
            env=environment() | {"MOK_DATA_ROOTS": str(TEXT)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        self.seen: set[psutil.Process] = set()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS_MAX
        while not condition():
            self.look()
            assert self.popen.poll() is None, self.popen.communicate()[0]
            assert time.monotonic() < deadline, "it didn't happen"
            time.sleep(0.05)

    def look(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self.seen |= set(psutil.Process(self.popen.pid).children(recursive=True))

    def end(self) -> tuple[int, str]:
        """Exit status and output, once it and all of its processes have ended."""
        while self.popen.poll() is None:
            self.look()
            time.sleep(0.2)
        output = self.popen.communicate(timeout=SECONDS_MAX)[0]
        left = [process for process in self.seen if runs(process)]
        assert left == []
        return self.popen.returncode, output


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def make(*arguments: str | Path) -> Process:
        started.append(Process(*arguments))
        return started[-1]

    yield make
    for process in started:
        if process.popen.poll() is None:
            os.killpg(process.popen.pid, signal.SIGKILL)
            process.popen.wait()


def test_the_demo_reproduces_and_leaves_no_process(start: Callable[..., Process], tmp_path: Path) -> None:
    spec, folder = tmp_path / "job.json", tmp_path / "data"
    spec.write_text(json.dumps(SPEC))
    demo = start("demo", spec, "--data-dir", folder)
    status, output = demo.end()
    assert status == 0, output
    last = output.splitlines()[-1]
    digest = re.fullmatch(r"REPRODUCED (sha256:[0-9a-f]{64})", last)
    assert digest and output.count(f"weights {digest[1]}\n") == 2 and "step 4/4" in output
    assert len(demo.seen) > 3 and not (folder / "server.json").exists()
    shown = subprocess.run(
        [sys.executable, "-m", "mok_service.cli", "show", "latest", "--data-dir", folder, "--json"], cwd=ROOT, env=environment(),
        capture_output=True, text=True, check=True,
    )
    assert json.loads(shown.stdout)["run"]["verdict"] == "REPRODUCED"


@pytest.mark.parametrize(("number", "when"), [
    (signal.SIGINT, "server.json"), (signal.SIGTERM, "checkpoints/*/step-*"),  # while Ray starts, and while the model trains
])
def test_an_interrupted_demo_leaves_no_process(
    start: Callable[..., Process], tmp_path: Path, number: signal.Signals, when: str
) -> None:
    spec, folder = tmp_path / "job.json", tmp_path / "data"
    spec.write_text(json.dumps({**SPEC, "training": {**SPEC["training"], "steps": 100_000}}))
    demo = start("demo", spec, "--data-dir", folder)
    demo.wait_until(lambda: any(folder.glob(when)))
    os.killpg(demo.popen.pid, number)
    status, output = demo.end()
    assert status == 130 and "Traceback" not in output
    assert not (folder / "server.json").exists()


def test_an_api_process_serves_and_stops_with_a_stream_open(start: Callable[..., Process], tmp_path: Path) -> None:
    process = start("api", "--data-dir", tmp_path / "data", "--port", "0")
    assert process.popen.stdout is not None
    told = ""
    while not (found := re.search(r"http://127\.0\.0\.1:\d+", told)):
        line = process.popen.stdout.readline()
        assert line, told
        told += line
    url = found[0]
    assert httpx.get(f"{url}/healthz").status_code == 200
    assert httpx.get(f"{url}/readyz").json()["error"]["detail"] == {"scheduler": "never"}  # an API alone runs nothing
    run = httpx.post(f"{url}/v1/jobs", json=SPEC).json()["run"]["id"]
    with httpx.stream("GET", f"{url}/v1/runs/{run}/events", headers={"Accept": "text/event-stream"}, timeout=60) as stream:
        lines = stream.iter_lines()
        assert next(lines) == "retry: 1000"
        first = next(line for line in lines if line.startswith("data:"))
        assert run in first
        process.popen.terminate()
        assert not [line for line in lines if line], "the stream ends in order"
    assert process.end()[0] == 0

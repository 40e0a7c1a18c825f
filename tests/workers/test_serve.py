"""`serve` as people start it: one process that brings the whole service up, and takes all of it away again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from mok_service.errors import Conflict
from mok_workers.serve import clean_environment, listen, lock_folder
from mok_workers.supervisor import runs

SECONDS_MAX = 100.0
PROGRAM = """
import sys
from pathlib import Path
from mok_service.errors import MokError
from mok_service.settings import load_settings
from mok_workers.serve import serve
try:
    sys.exit(serve(load_settings(data_dir=Path(sys.argv[1])), sys.argv[2]))
except MokError as error:
    sys.exit(f"refused: {error.message}")
"""


def program(folder: Path, app: str = "tests.workers.stub_app:StubApp") -> subprocess.Popen[str]:
    # The folder may be anything; the paths on which Python looks for modules must survive a change of the working folder.
    secrets = {"DATABASE_URL": "postgresql://user:hunter2@host/name", "MOK_SIGNING_KEY": str(folder / "own.pem")}
    environment = {**os.environ, **secrets}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), app], env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )


def until(reached: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not reached():
        assert time.monotonic() < deadline, f"it never came to be: {what}"
        time.sleep(0.02)  # this is another program's time, not ours


def is_raylet(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # it may end while it is looked at
        return process.name() == "raylet"
    return False


def test_the_whole_service_comes_up_refuses_a_second_one_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    service = program(folder)
    seen: list[psutil.Process] = [psutil.Process(service.pid)]
    try:
        until(lambda: (folder / "server.json").exists() or service.poll() is not None, "server.json")
        server = json.loads((folder / "server.json").read_text())
        assert server["pid"] == service.pid and server["boot"].startswith("boot_") and folder.stat().st_mode & 0o077 == 0
        with urllib.request.urlopen(server["url"] + "/anything", timeout=30) as answer:
            shown = json.load(answer)
        assert shown["database"] == "sqlite" and shown["data_dir"] == str(folder) and shown["pid"] != service.pid
        assert not {name for name in shown["names"] if "DATABASE" in name or "KEY" in name}
        assert (folder / "own.pem").stat().st_mode & 0o777 == 0o600 and not (folder / "keys").exists()

        second = program(folder)
        assert f"process id {service.pid}" in second.communicate(timeout=SECONDS_MAX)[0] and second.returncode == 1

        until(lambda: any(map(is_raylet, psutil.Process(service.pid).children(recursive=True))), "Ray")
        seen += psutil.Process(service.pid).children(recursive=True)
        service.terminate()
        assert service.wait(SECONDS_MAX) == 0
        assert [p for p in seen if runs(p)] == []
        assert not (folder / "server.json").exists() and not (folder / "ray").exists()
        assert (folder / "logs" / "service.log").stat().st_mode & 0o077 == 0
    finally:
        for process in seen:
            if runs(process):
                process.kill()
        out = service.communicate()[0]
    assert out.startswith(f"MoK service at {server['url']}")


def test_a_service_that_cannot_start_says_why(tmp_path: Path) -> None:
    service = program(tmp_path, "tests.workers.stub_app:Missing")
    out = service.communicate(timeout=SECONDS_MAX)[0]
    assert service.returncode == 1 and "has no attribute 'Missing'" in out and not (tmp_path / "server.json").exists()


def test_a_port_that_is_taken_is_named() -> None:
    with listen("127.0.0.1", 0) as (listening, url):
        port = listening.getsockname()[1]
        assert url == f"http://127.0.0.1:{port}"
        with pytest.raises(Conflict, match=f"port {port}"), listen("127.0.0.1", port):
            pass


def test_a_folder_has_one_service_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "data"
    with lock_folder(folder):
        holder = (folder / "serve.lock").read_text()
        assert holder == f"{os.getpid()}\n"
        with pytest.raises(Conflict, match=f"process id {os.getpid()};"), lock_folder(folder):
            pass
        assert (folder / "serve.lock").read_text() == holder, "being refused changes nothing"
    with lock_folder(folder):
        pass


def test_only_the_allow_list_stays_and_paths_keep_their_meaning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "path", ["", "lib", *sys.path])
    for name in ("MOK_DATABASE_URL", "AWS_SECRET_ACCESS_KEY", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("PYTHONPATH", f"src{os.pathsep}/b")
    clean_environment()
    assert dict(os.environ) == {"PATH": "/bin", "PYTHONPATH": f"{tmp_path / 'src'}{os.pathsep}/b"}
    assert sys.path[:2] == [str(tmp_path), str(tmp_path / "lib")]

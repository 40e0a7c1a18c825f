"""A whole installation from its real programs, for tests, chaos and benchmarks: PostgreSQL, a Ray cluster that was started by
itself, `mok api` and `mok worker` processes; or `mok serve` alone. Everything is a `Program` that can be killed and started
again, on 127.0.0.1, in folders of its own.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import httpx
import psutil

from mok_workers.cluster import ALLOWED_VARIABLES, RAY_VARIABLES

ROOT: Final = Path(__file__).parents[2]
SECONDS_MAX: Final = 120.0
RAY_NODE_BYTES: Final = 100 << 20
# Seconds: a lost scheduler is noticed soon, and little is waited for.
QUICK: Final = {
    "MOK_LEASE_SECONDS": "6", "MOK_HEARTBEAT_SECONDS": "1", "MOK_TICK_SECONDS": "0.2", "MOK_RETRY_SECONDS": "0.2",
    "MOK_SHUTDOWN_SECONDS_MAX": "8", "MOK_REQUESTS_PER_SECOND": "100000", "MOK_REQUESTS_BURST": "1000000",
}
# A model so small that a step takes milliseconds.
MODEL: Final[dict[str, Any]] = {
    "hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_size": 8, "experts": 4, "top_k": 2,
    "expert_intermediate_size": 16, "vocabulary_size": 260,
}


def job(seed: int, steps: int = 6, **execution: Any) -> dict[str, Any]:
    """A small job that trains for real."""
    return {
        "training": {
            "name": f"small-{seed}", "seed": seed, "steps": steps, "sequence_length": 16, "digest_interval": 1, "model": MODEL,
            "batch": {"sequences": 2}, "data": {"source": "python-stdlib", "max_bytes": 20_000},
        },
        "execution": {"threads": 1, "checkpoint_interval": 2, "max_attempts": 100, **execution},
    }


def until(reached: Callable[[], Any], what: str, seconds_max: float = SECONDS_MAX) -> Any:
    """What `reached` gives once it is true. Other programs' time is waited for, not ours."""
    deadline = time.monotonic() + seconds_max
    while not (found := reached()):
        assert time.monotonic() < deadline, f"it never came to be: {what}"
        time.sleep(0.05)
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def plain_environment() -> dict[str, str]:
    """What every program gets: the allow-list, and where this checkout's packages are."""
    kept = {name: value for name, value in os.environ.items() if name in ALLOWED_VARIABLES}
    paths = os.pathsep.join(str(ROOT / part) for part in (".", "api", "workers"))
    return {**kept, "PYTHONPATH": paths, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}


def _die_with_parent() -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


@dataclass
class Program:
    """A program in a session of its own; what it says goes to a file."""

    words: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    name: str
    process: subprocess.Popen[bytes] | None = None
    user: int | None = None

    def start(self) -> None:
        """Start it, after what may be left of its session's first group of processes."""
        assert not self.running, f"{self.name} runs"
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.words, env=dict(self.environment), cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=_die_with_parent, user=self.user,
            )

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """It and all its descendants, it first."""
        if not self.running:
            return []
        assert self.process is not None
        with suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            return [own, *own.children(recursive=True)]
        return []

    def kill(self) -> None:
        """As if its machine had lost power: it and every descendant at once, the parents first so that none starts another."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        self.wait()

    def stop(self) -> int:
        """In order; its exit status."""
        if self.process is None:
            return 0
        if self.running:
            self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def wait(self) -> None:
        if self.process is not None:
            self.process.wait(60)


@dataclass
class RayHead:
    """A Ray cluster of one node on this machine, with a token, that no service owns."""

    folder: Path
    cpus: int
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.token = self.folder / "token"
        self.token.write_text(secrets.token_hex(32))
        self.token.chmod(0o600)
        environment = {**plain_environment(), **RAY_VARIABLES, "RAY_AUTH_TOKEN_PATH": str(self.token)}
        words = [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={self.port}",
            "--disable-usage-stats",
            f"--temp-dir={self.folder / 'r'}", f"--num-cpus={self.cpus}", "--num-gpus=0", "--include-dashboard=false",
            f"--object-store-memory={RAY_NODE_BYTES}",
        ]
        self.program = Program(words, environment, self.folder, "ray")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        before = self.program.log.stat().st_size if self.program.log.exists() else 0
        self.program.start()
        until(lambda: b"Ray runtime started" in self.program.log.read_bytes()[before:] or not self.program.running, "Ray")
        assert self.program.running, self.program.log.read_text()[-3000:]


def mok(folder: Path, name: str, words: Sequence[str], **settings: str) -> Program:
    """`mok WORDS` with a data folder of its own."""
    environment = {**plain_environment(), **QUICK, "MOK_DATA_DIR": str(folder / name), **settings}
    return Program([sys.executable, "-m", "mok_service.cli", *words], environment, folder, name)


@dataclass
class Api:
    """One API process."""

    program: Program
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.program.start()

    def ready(self) -> None:
        until(lambda: self._answers() or not self.program.running, f"{self.program.name} answers")
        assert self.program.running, self.program.log.read_text()[-3000:]

    def _answers(self) -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(self.url + "/healthz", timeout=10.0).status_code == 200
        return False


def api(folder: Path, name: str, verb: str = "api", **settings: str) -> Api:
    """`mok api` (or `mok serve`) on a free port, with a data folder of its own."""
    port = free_port()
    return Api(mok(folder, name, [verb, "--port", str(port)], **settings), port)


class Installation:
    """The production form: a database by its URL, one Ray cluster, several API processes, several schedulers."""

    def __init__(
        self, folder: Path, database_url: str, *, apis: int, schedulers: int, cpus: int,
        scheduler_settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.folder, self.database_url = folder, database_url
        self.ray = RayHead(folder / "ray", cpus)
        shared = {"MOK_DATABASE_URL": database_url, "MOK_CHECKPOINT_DIR": str(folder / "checkpoints")}
        self.apis = [api(folder, f"api-{number}", **shared) for number in range(apis)]
        # One key for all: a record's attestation doesn't depend on who signed it first.
        joins = {**shared, **scheduler_settings, "MOK_RAY_ADDRESS": self.ray.address, "MOK_RAY_TOKEN": str(self.ray.token),
                 "MOK_SIGNING_KEY": str(folder / "signing.pem")}
        self.schedulers = [mok(folder, f"scheduler-{number}", ["worker"], **joins) for number in range(schedulers)]

    def __enter__(self) -> Installation:
        try:
            for api in self.apis:  # at once, on whatever the database is
                api.start()
            self.ray.start()
            for scheduler in self.schedulers:
                scheduler.start()
            for api in self.apis:
                api.ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for program in (*self.schedulers, *(api.program for api in self.apis), self.ray.program):
            with suppress(subprocess.TimeoutExpired):
                program.stop()


def submit(url: str, spec: Mapping[str, Any]) -> str:
    """A job; the id of its run."""
    answer = httpx.post(url + "/v1/jobs", json=spec, timeout=60.0)
    assert answer.status_code == 201, answer.text
    run: str = answer.json()["run"]["id"]
    return run


def get(url: str, path: str) -> Any:
    answer = httpx.get(url + path, timeout=60.0)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ended(url: str, runs: Sequence[str], seconds_max: float = SECONDS_MAX) -> list[dict[str, Any]]:
    """The runs, once all have ended."""
    def all_of_them() -> list[dict[str, Any]] | None:
        found = [get(url, f"/v1/runs/{run}") for run in runs]
        return found if all(run["ended_at"] is not None for run in found) else None

    found: list[dict[str, Any]] = until(all_of_them, "every run ends", seconds_max)
    return found


@contextmanager
def installation(folder: Path, database_url: str, *, apis: int = 2, schedulers: int = 2, cpus: int = 2) -> Iterator[Installation]:
    with Installation(folder, database_url, apis=apis, schedulers=schedulers, cpus=cpus) as running:
        yield running

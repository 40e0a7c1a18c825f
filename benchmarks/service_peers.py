"""The nearest thing that Ray Jobs and MLflow do, for benchmarks/service.py: `python service_peers.py ray|mlflow FOLDER`, run by
an interpreter that has them. The last line that it prints is JSON: what was measured, by name."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def percentiles(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f} / {statistics.quantiles(seconds, n=20)[18] * 1e3:.1f} ms"


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def start(words: list[str], folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with (folder / "log").open("wb") as log:
        whole = {**os.environ, **environment}
        return subprocess.Popen(words, cwd=folder, env=whole, stdout=log, stderr=log, start_new_session=True)


def memory(process: subprocess.Popen[bytes]) -> str:
    own = psutil.Process(process.pid)
    return f"{sum(one.memory_full_info().pss for one in (own, *own.children(recursive=True))) / 1e6:.0f} MB"


def until_answered(url: str) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def ray_jobs(folder: Path) -> dict[str, str]:
    """A job is a process that prints a line, on one CPU."""
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_USAGE_STATS_ENABLED": "0"})
    port, dashboard = free_port(), free_port()
    head = start([
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}",
        f"--dashboard-port={dashboard}", "--disable-usage-stats",
        f"--temp-dir={folder / 'r'}", "--num-cpus=2", "--num-gpus=0", "--include-dashboard=true",
        "--object-store-memory=104857600",
    ], folder, {})
    try:
        return _ray_measured(head, dashboard)
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        head.wait(60)


def _ray_measured(head: subprocess.Popen[bytes], dashboard: int) -> dict[str, str]:
    from ray.job_submission import JobSubmissionClient

    client: Any = None
    deadline = time.monotonic() + 120
    while client is None:
        try:
            client = JobSubmissionClient(f"http://127.0.0.1:{dashboard}")
            client.list_jobs()
        except Exception:
            client = None
            assert time.monotonic() < deadline and head.poll() is None, "Ray Jobs doesn't answer"
            time.sleep(0.5)
    time.sleep(10)
    found = {"whole service, idle, PSS": memory(head)}
    entry = f"{sys.executable} -c \"print('first')\""

    def submit() -> str:
        return str(client.submit_job(entrypoint=entry, entrypoint_num_cpus=1))

    def until_done(job: str) -> None:
        while client.get_job_status(job).value not in ("SUCCEEDED", "FAILED"):
            time.sleep(0.02)
        assert client.get_job_status(job).value == "SUCCEEDED", client.get_job_logs(job)

    def first() -> tuple[float, float]:
        began = time.perf_counter()
        job = submit()
        answered = time.perf_counter() - began
        while "first" not in client.get_job_logs(job):
            time.sleep(0.02)
        took = time.perf_counter() - began
        until_done(job)
        return answered, took

    runs = [first() for _ in range(6)][1:]
    found["submit (create a run): p50 / p95"] = percentiles([answered for answered, _ in runs])
    found["submit to first step on record (first output), median"] = f"{statistics.median(took for _, took in runs):.2f} s"
    began = time.perf_counter()
    for job in [submit() for _ in range(20)]:
        until_done(job)
    found["tiny jobs finished a second (20)"] = f"{20 / (time.perf_counter() - began):.2f}"
    return found


def mlflow(folder: Path) -> dict[str, str]:
    """A run is a row; a step record is one metric of a batch of 256."""
    port = free_port()
    server = start([
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}", "--artifacts-destination", str(folder / "artifacts"),
    ], folder, {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"})
    try:
        until_answered(f"http://127.0.0.1:{port}/health")
        return _mlflow_measured(server, port)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def _mlflow_measured(server: subprocess.Popen[bytes], port: int) -> dict[str, str]:
    import http.client

    time.sleep(10)
    found = {"whole service, idle, PSS": memory(server)}

    def caller() -> Callable[[str, dict[str, Any]], Any]:
        connection = http.client.HTTPConnection("127.0.0.1", port)

        def call(path: str, body: dict[str, Any]) -> Any:
            connection.request("POST", f"/api/2.0/mlflow/{path}", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            assert answer.status == 200, text
            return json.loads(text)
        return call

    call = caller()
    create = {"experiment_id": "0", "start_time": 1, "run_name": "small"}
    found["submit (create a run): p50 / p95"] = percentiles([timed(lambda: call("runs/create", create)) for _ in range(300)][50:])

    def some(count: int) -> None:
        mine = caller()
        for _ in range(count):
            mine("runs/create", create)

    took = timed(lambda: list(ThreadPoolExecutor(16).map(some, [40] * 16)))
    found["submits a second, 16 connections"] = f"{640 / took:.0f}"
    call = caller()  # the server has closed the one that was silent meanwhile
    run = call("runs/create", create)["run"]["info"]["run_id"]
    batches = [{"run_id": run, "metrics": [{"key": "loss", "value": 1.0, "timestamp": step, "step": step}
                                           for step in range(first, first + 256)]} for first in range(0, 256 * 40, 256)]
    took = timed(lambda: [call("runs/log-batch", batch) for batch in batches])
    found["step records (metrics) appended a second"] = f"{256 * 40 / took:,.0f}"
    search = {"experiment_ids": ["0"], "max_results": 50, "order_by": ["attributes.start_time DESC"]}
    searched = [timed(lambda: call("runs/search", search)) for _ in range(50)]
    found["newest 50 of about 1,000 runs: p50 / p95"] = percentiles(searched)
    return found


if __name__ == "__main__":
    where = Path(sys.argv[2])
    where.mkdir(parents=True)
    print(json.dumps({"ray": ray_jobs, "mlflow": mlflow}[sys.argv[1]](where)))

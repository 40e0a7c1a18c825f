"""The verb demo: the whole service at work on a tiny model, in about a minute."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from mok_service.cli.options import DATA_DIR, DataDir, own_key

EXAMPLE: Final = Path("examples") / "tiny_moe.yaml"
START_SECONDS_MAX: Final = 120.0
STOP_SECONDS_MAX: Final = 40.0
PR_SET_PDEATHSIG: Final = 1
POLL_SECONDS: Final = 0.1


def add_to(app: typer.Typer) -> None:
    """Add this verb to the command."""
    app.command(epilog="Example: mok demo")(demo)


def demo(
    spec: Annotated[Path | None, typer.Argument(metavar="[SPEC]", help="A job spec; default: examples/tiny_moe.yaml.")] = None,
    data_dir: DataDir = DATA_DIR,
) -> None:
    """Train a tiny model, train it again, compare the bits.

    Starts the service, submits the job over REST, reruns it, compares every step, and stops the service.

    The last line is REPRODUCED and the digest of the weights. The runs stay in the data folder: see mok runs, mok show latest.
    """
    from mok_service.cli.jobs import read_spec
    from mok_service.client import Client
    from mok_service.render import show

    job = read_spec(spec or _example())
    with running_service(data_dir) as url, Client(url, api_key=own_key()) as client:
        show(f"service at {url}, data folder {data_dir}")
        submitted = client.submit(job.model_dump_json(exclude_unset=True))
        show(f"job {submitted['job']['id']}  {submitted['job']['digest']}")
        first = _finished(client, submitted["run"], "run  ")
        show(f"weights {first['weights']}")
        second = _finished(client, client.create_run(first["job"], reproduces=first["id"]), "rerun")
        show(f"weights {second['weights']}")
        _compare(client, first, second)
    show(f"REPRODUCED {second['weights']}")


@contextmanager
def running_service(data_dir: Path) -> Iterator[str]:
    """The address of the service that holds the data folder; one is started, and stopped in the end, if there is none."""
    from mok_service.client import find_url

    url = find_url(None, data_dir)
    if url is not None:
        yield url
        return
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = data_dir / "serve.log"
    with log.open("wb") as output:
        # Apart from us, so that Ctrl-C reaches only us, and we stop the service in order.
        service = subprocess.Popen(
            [sys.executable, "-m", "mok_service.cli", "serve", "--data-dir", str(data_dir), "--port", "0"],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=_stop_with_parent if sys.platform == "linux" else None,
        )
    try:
        yield _wait_until_ready(service, data_dir, log)
    finally:
        stop(service)


def stop(service: subprocess.Popen[bytes]) -> None:
    """End the service, which ends whatever it started. A second Ctrl-C doesn't keep it from that."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    service.terminate()
    try:
        service.wait(STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        service.kill()
        service.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop_with_parent() -> None:
    """The service is told to stop when this program is killed (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_until_ready(service: subprocess.Popen[bytes], data_dir: Path, log: Path) -> str:
    from mok_service.client import find_url
    from mok_service.errors import ServiceUnreachable

    deadline = time.monotonic() + START_SECONDS_MAX
    while time.monotonic() < deadline:
        url = find_url(None, data_dir)
        if url is not None:
            return url
        if service.poll() is not None:
            raise ServiceUnreachable(f"the service ended with status {service.returncode}: {_tail(log)}", log=str(log))
        time.sleep(POLL_SECONDS)
    raise ServiceUnreachable(f"the service wasn't ready after {START_SECONDS_MAX:g} seconds: {_tail(log)}", log=str(log))


def _finished(client: Any, run: dict[str, Any], label: str) -> dict[str, Any]:
    """The run once it has succeeded. Raises TrainingFailed when it doesn't."""
    from mok_service.cli.following import follow
    from mok_service.errors import TrainingFailed

    ended = follow(client, run, label=label)
    if ended["status"] != "succeeded" and ended["verdict"] is None:
        raise TrainingFailed(f"run {ended['id']} {ended['status']}: {ended['message']}", reason=ended["stop_reason"])
    return ended


def _compare(client: Any, first: dict[str, Any], second: dict[str, Any]) -> None:
    """Every step record of both runs, compared here, and the service's own verdict. Exits 3 when they differ."""
    from mok_service.cli.following import newest_verdict, tell_verdict
    from mok_service.provenance.compare import compare_records
    from mok_service.render import difference_lines, show

    difference = compare_records(client.provenance(first["id"]), client.provenance(second["id"]))
    for line in difference_lines(difference):
        show(line)
    verdict = newest_verdict(client, second)
    if verdict is not None and verdict["verdict"] != "REPRODUCED":
        tell_verdict(verdict, as_json=False)
    if verdict is None or difference.outcome != "equal":
        raise typer.Exit(3)


def _example() -> Path:
    """The example in the working folder, else in the checkout that this program is run from."""
    return EXAMPLE if EXAMPLE.is_file() else Path(__file__).parents[2] / EXAMPLE


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"

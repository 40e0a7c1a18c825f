"""A supervised program for test_supervisor.py: `python -m tests.workers.supervised MODE FOLDER`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from mok_workers.supervisor import Report, Supervisor, Tell


def orphan() -> int:
    """A process whose parent is gone, in a session of its own: what Ray's agents are once their raylet is dead."""
    program = "import subprocess; print(subprocess.Popen(['sleep', '1000'], start_new_session=True, stdout=-3).pid)"
    return int(subprocess.check_output([sys.executable, "-c", program]))


def main(mode: str, folder: Path) -> int:
    def body(tell: Tell) -> int:
        with (folder / "starts").open("a") as file:
            file.write("x")
        if mode == "fail":
            raise ValueError("the disk is upside down")
        if mode == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: None if mode in ("deaf", "stubborn") else stop.set())
        tell({"ready": True, "child": os.getpid(), "orphan": orphan()})
        stop.wait()
        return 0

    def ready(report: Report) -> None:
        partial = folder / "partial"
        partial.write_text(json.dumps(report))
        partial.rename(folder / f"ready-{report['child']}.json")

    def error(report: Report) -> None:
        print(report["error"], flush=True)

    if mode == "neighbour":
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return Supervisor(body, stop_seconds_max=0.5 if mode == "deaf" else 600.0, ready=ready, error=error).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))

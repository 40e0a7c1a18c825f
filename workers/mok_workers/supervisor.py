"""A supervisor: one child that does the work, started again when it dies, and no process left behind.

The supervisor does nothing that could fail: it holds the listening socket, waits, and ends what is left by process id.
Linux gives it the orphans of its descendants (child subreaper): so it finds Ray's agents, which outlive a killed driver.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, NoReturn

import psutil

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SWEEP_SECONDS_MAX: Final = 10.0
RESTARTS_MAX: Final = 5           # within RESTART_WINDOW_SECONDS; then it isn't worth another
RESTART_WINDOW_SECONDS: Final = 60.0

Report = dict[str, Any]
Tell = Callable[[Report], None]
Body = Callable[[Tell], int]  # the child's work: returns its exit status, and reports at most {"ready": ...} and {"error": ...}


class Supervisor:
    """`run` it in a process that has no threads: it forks."""

    def __init__(self, body: Body, *, stop_seconds_max: float, ready: Tell, error: Tell) -> None:
        """`ready` and `error` are called here with what the child reports. A child that reports an error isn't started again."""
        self._body, self._stop_seconds_max, self._ready, self._error = body, stop_seconds_max, ready, error
        self._stopped_by: int | None = None
        self._kill_at: float | None = None
        self._failed = False

    def run(self) -> int:
        """Until a signal stops it. 0 after SIGTERM or SIGHUP, 130 after SIGINT, 1 when the child failed for good."""
        not_ours = {(p.pid, p.create_time()) for p in psutil.Process().children(recursive=True)}
        become_subreaper()
        restarts: list[float] = []
        with _wakeups() as wakeup:
            while True:
                self._watch(*self._spawn(wakeup), wakeup)
                sweep(not_ours)
                if self._stopped_by is not None:
                    return 130 if self._stopped_by == signal.SIGINT else 0
                if self._failed:
                    return 1
                restarts = [at for at in restarts if at > time.monotonic() - RESTART_WINDOW_SECONDS]
                if len(restarts) >= RESTARTS_MAX:
                    times, window = len(restarts) + 1, RESTART_WINDOW_SECONDS
                    self._error({"error": f"the process died {times} times within {window:g} s: giving up"})
                    return 1
                restarts.append(time.monotonic())
                self._error({"error": "the process died; it is started again"})

    def _spawn(self, wakeup: int) -> tuple[int, int]:
        """(process id, pipe that it reports on)"""
        parent = os.getpid()
        reports, theirs = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            os.close(theirs)
            return pid, reports
        status = 1
        try:
            os.close(reports)
            os.close(wakeup)
            _become_child(parent)
            status = self._body(lambda report: _write(theirs, report))
        except BaseException as error:
            _write(theirs, {"error": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(status)  # nothing of the parent's (handlers, buffers) is this process's business

    def _watch(self, pid: int, reports: int, wakeup: int) -> None:
        """Returns when the child is dead. Passes signals on, and kills it when it takes too long to stop."""
        unread = b""
        with selectors.DefaultSelector() as selector:
            selector.register(reports, selectors.EVENT_READ)
            selector.register(wakeup, selectors.EVENT_READ)
            while True:
                patience = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
                for key, _ in selector.select(patience):
                    if key.fd == reports:
                        piece = os.read(reports, 65536)
                        if not piece:
                            selector.unregister(reports)
                        unread = self._read_reports(unread + piece)
                    else:
                        for number in os.read(wakeup, 4096):
                            self._signalled(number, pid)
                if self._kill_at is not None and time.monotonic() >= self._kill_at:
                    os.kill(pid, signal.SIGKILL)
                    self._kill_at = None
                if pid in reap_children():
                    break
        with suppress(BlockingIOError):
            os.set_blocking(reports, False)
            self._read_reports(unread + os.read(reports, 65536))  # its last words
        os.close(reports)

    def _signalled(self, number: int, child: int) -> None:
        if number not in STOP_SIGNALS:
            return
        if self._stopped_by is None:
            self._stopped_by = number
            self._kill_at = time.monotonic() + self._stop_seconds_max
            os.kill(child, signal.SIGTERM)
        else:  # asked twice: no more patience
            self._kill_at = time.monotonic()

    def _read_reports(self, text: bytes) -> bytes:
        *lines, rest = text.split(b"\n")
        for line in lines:
            report = json.loads(line)
            if "error" in report:
                self._failed = True
                self._error(report)
            else:
                self._ready(report)
        return rest


@contextmanager
def _wakeups() -> Iterator[int]:
    """A file descriptor that becomes readable when a signal comes: the signals' numbers are its bytes."""
    wakeup, write = os.pipe()
    os.set_blocking(write, False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in (*STOP_SIGNALS, signal.SIGCHLD)}
    previous = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield wakeup
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(wakeup)
        os.close(write)


def _become_child(parent: int) -> None:
    """A session of its own, so that Ctrl-C reaches only the supervisor; it is told when the supervisor dies."""
    signal.set_wakeup_fd(-1)
    for number in (*STOP_SIGNALS, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()
    become_subreaper()
    if sys.platform == "linux":
        _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def _write(pipe: int, report: Report) -> None:
    with suppress(BrokenPipeError):
        os.write(pipe, json.dumps(report).encode() + b"\n")


# ---- Processes -------------------------------------------------------------------------------------------------------

def become_subreaper() -> None:
    """Orphans among the descendants become children of this process, instead of the system's."""
    if sys.platform == "linux":
        _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def runs(process: psutil.Process) -> bool:
    """Whether a process (and not another one of the same number) still does anything."""
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def reap_children() -> set[int]:
    """Takes note of every child that has ended; their process ids."""
    ended = set[int]()
    with suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            ended.add(pid)
    return ended


def sweep(not_ours: set[tuple[int, float]] | None = None) -> int:
    """Kills every descendant by its process id, until there is none; how many it killed. `not_ours` are left alone."""
    killed = set[int]()
    deadline = time.monotonic() + SWEEP_SECONDS_MAX
    while time.monotonic() < deadline:
        left = [p for p in psutil.Process().children(recursive=True) if (p.pid, p.create_time()) not in (not_ours or ())]
        if not left:
            break
        for process in left:
            with suppress(psutil.Error):
                process.kill()
                killed.add(process.pid)
        psutil.wait_procs(left, timeout=0.2)
        reap_children()
    return len(killed)


def leave(status: int) -> NoReturn:
    """End this process at once, after what it started."""
    sweep()
    os._exit(status)

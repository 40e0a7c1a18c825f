"""`mok serve` and `mok worker`: the service on one machine, supervised.

The child of `serve` holds the API (uvicorn, main thread) and the scheduler (a thread, owner of Ray), on one database. They meet
nowhere else. The application is named, not imported: the workers know nothing of the API.
"""

from __future__ import annotations

import fcntl
import http.client
import importlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import psutil

from mok_service import logs, tracing
from mok_service.access import refuse_without_keys
from mok_service.db.session import Database, upgrade
from mok_service.errors import Conflict, MokError
from mok_service.provenance.keys import SigningKey, signing_key
from mok_service.retention import Retention
from mok_service.settings import Settings
from mok_service.training.s3 import allowed_variables
from mok_service.webhooks import Outbox
from mok_workers.actor import open_here
from mok_workers.cluster import ALLOWED_VARIABLES, RayCluster, put_away
from mok_workers.pool import Limits
from mok_workers.scheduler import Scheduler
from mok_workers.signing import Signer
from mok_workers.supervisor import Report, Supervisor, Tell, leave, runs

log = logging.getLogger("mok.serve")

LOCK_FILE: Final = "serve.lock"
SERVER_FILE: Final = "server.json"
LOG_FILE: Final = "logs/service.log"
RAY_FOLDER: Final = "ray"
RAY_LOGS: Final = "logs/ray"
LOG_BYTES_MAX: Final = 10 << 20    # an older log is set aside when the service starts
LOCK_SECONDS_MAX: Final = 5.0      # for a service that is gone but for its child
READY_SECONDS_MAX: Final = 60.0
BACKLOG: Final = 1024

Ready = Callable[[str], None]


def serve(settings: Settings, app: str, ready: Ready | None = None) -> int:
    """Run API, scheduler and workers until a signal; returns the exit status (see `Supervisor.run`).

    `app` is "module:function" of the application: it is called with the database and the settings. `ready` is called with the
    URL once it answers. Raises Conflict when another service holds the folder. At an address that other machines reach it fails
    as long as there is no API key.
    """
    with lock_folder(settings.data_dir), listen(settings.host, settings.port) as (listening, url):
        server_file = settings.data_dir / SERVER_FILE

        def body(tell: Tell) -> int:
            return Service(settings, tell).run(app, listening, url)

        def on_ready(report: Report) -> None:
            write_atomically(server_file, {"url": url, "pid": os.getpid(), "boot": report["boot"]})
            (ready or tell_url)(url)

        try:
            return supervise(settings, body, on_ready)
        finally:
            server_file.unlink(missing_ok=True)


def work(settings: Settings, ready: Ready | None = None) -> int:
    """Run a scheduler with its workers alone, on a database that APIs elsewhere serve. Raises Conflict as `serve` does."""
    with lock_folder(settings.data_dir):
        return supervise(
            settings, lambda tell: Service(settings, tell).run_scheduler(), lambda report: (ready or tell_name)(report["worker"])
        )


def supervise(settings: Settings, body: Callable[[Tell], int], ready: Tell) -> int:
    def error(report: Report) -> None:
        print(f"mok: {report['error']}", file=sys.stderr, flush=True)

    # The child gives up by itself first, and has a little longer to end its processes.
    patience = settings.shutdown_seconds_max + 2.0
    try:
        return Supervisor(body, stop_seconds_max=patience, ready=ready, error=error).run()
    finally:
        put_away(settings.data_dir / RAY_FOLDER, settings.data_dir / RAY_LOGS)


def tell_url(url: str) -> None:
    print(f"MoK service at {url}; Ctrl-C stops it", flush=True)


def tell_name(worker: str) -> None:
    print(f"worker {worker} is ready; Ctrl-C stops it", flush=True)


# ---- The child -------------------------------------------------------------------------------------------------------

class Service:
    """What the supervised child does. One object a boot."""

    def __init__(self, settings: Settings, tell: Tell) -> None:
        self._settings, self._tell = settings, tell
        self._boot = f"boot_{secrets.token_hex(8)}"
        # On an embedded database nobody else schedules; on a shared one, a scheduler's name is its host and folder.
        self._worker = f"{socket.gethostname()}:{settings.data_dir}"
        self._stop, self._up, self._news = threading.Event(), threading.Event(), threading.Event()
        self._status = 0
        self._key: SigningKey | None = None
        self._on_stop: list[Callable[[], None]] = []

    def run(self, app: str, listening: socket.socket, url: str) -> int:
        """API and scheduler, until SIGTERM or until one of them fails."""
        import uvicorn

        db = self._prepare()
        self._refuse_without_keys(db)
        application = load(app)(db, self._settings)
        config = uvicorn.Config(
            application, loop="uvloop", http=getattr(application.state, "http", "httptools"), log_config=None, access_log=False,
            server_header=False, proxy_headers=False,  # whose address is believed is for the application to say
            timeout_graceful_shutdown=max(1, round(self._settings.shutdown_seconds_max / 2)),
        )
        server = uvicorn.Server(config)
        server.capture_signals = nothing  # type: ignore[method-assign]  # signals are ours: see _prepare

        def stop_api() -> None:
            streams = getattr(application.state, "streams", None)  # event streams would keep the server waiting
            if streams is not None:
                streams.stopping.set()
            server.should_exit = True

        self._on_stop.append(stop_api)
        if self._stop.is_set():
            return self._leave()
        scheduler = threading.Thread(target=self._schedule, args=(db,), name="scheduler", daemon=True)
        scheduler.start()
        threading.Thread(target=self._announce, args=(url,), name="ready", daemon=True).start()
        server.run(sockets=[listening])
        self.stop()
        if self._up.is_set():  # else Ray is still starting: nothing runs on it, and its processes are ended like any other
            scheduler.join(self._settings.shutdown_seconds_max)
        return self._leave()

    def run_scheduler(self) -> int:
        """The scheduler alone."""
        db = self._prepare()
        self._on_stop.append(lambda: None if self._up.is_set() else leave(0))
        self._schedule(db, lambda: self._tell({"ready": True, "worker": self._worker}))
        return self._leave()

    def stop(self) -> None:
        """Has everything stop, at the latest after `shutdown_seconds_max`."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._news.set()
        deadline = threading.Timer(self._settings.shutdown_seconds_max, lambda: leave(1))
        deadline.daemon = True
        deadline.start()
        for action in self._on_stop:
            action()

    def _prepare(self) -> Database:
        settings = self._settings
        log_to(settings.data_dir / LOG_FILE, settings.log_format)
        signal.signal(signal.SIGTERM, lambda *_: self.stop())
        tracing.start("mok-service")  # reads variables that nobody else shall have
        clean_environment(allowed_variables(settings))
        os.chdir(settings.data_dir)  # Ray puts the working folder on its workers' path: here is no module
        try:
            self._key = signing_key(settings.key_file())
            upgrade(settings.database())
            return Database(settings.database())
        except MokError as error:
            self._fail(error.message)
            raise
        except Exception as error:
            log.exception("the database can't be used")
            self._fail(f"the database can't be used: {type(error).__name__}")
            raise

    def _refuse_without_keys(self, db: Database) -> None:
        try:
            refuse_without_keys(db, self._settings)
        except MokError as error:
            self._fail(error.message)
            raise

    def _schedule(self, db: Database, ready: Callable[[], None] = lambda: None) -> None:
        try:
            settings = self._settings
            cluster = RayCluster(
                settings.data_dir / RAY_FOLDER, open_here, logs=settings.data_dir / RAY_LOGS,
                address=settings.ray_address, token=settings.ray_token, variables=allowed_variables(settings),
                kept=Limits.of(settings), news=self._news.set,
            )
            alone = db.dialect == "sqlite"
            scheduler = Scheduler(
                db, cluster, settings, worker=self._worker, boot_id=self._boot, alone=alone, news=self._news
            )

            assert self._key is not None
            signer, pause = Signer(db, self._key), settings.tick_seconds
            threading.Thread(target=signer.run_forever, args=(self._stop, pause), name="signer", daemon=True).start()
            outbox = Outbox(db, settings)
            threading.Thread(target=outbox.run_forever, args=(self._stop, max(pause, 1.0)), name="outbox", daemon=True).start()
            keeper = Retention(db, settings)
            threading.Thread(target=keeper.run_forever, args=(self._stop,), name="retention", daemon=True).start()

            def up() -> None:
                self._up.set()
                ready()

            scheduler.run_forever(self._stop, up)
        except Exception as error:
            log.exception("the scheduler failed")
            self._status = 1
            if not self._up.is_set():  # it won't do better the next time
                self._fail(f"the scheduler failed: {type(error).__name__}: {error}")
        self.stop()

    def _announce(self, url: str) -> None:
        """Tell the supervisor once the API answers."""
        deadline = time.monotonic() + READY_SECONDS_MAX
        while not self._stop.is_set():
            if answers(url):
                self._tell({"ready": True, "boot": self._boot})
                return
            if time.monotonic() > deadline:
                self._fail(f"the API didn't answer within {READY_SECONDS_MAX:g} s")
                self.stop()
            self._stop.wait(0.02)

    def _fail(self, message: str) -> None:
        self._status = 1
        self._tell({"error": f"{message} (see {self._settings.data_dir / LOG_FILE})"})

    def _leave(self) -> NoReturn:
        leave(self._status)


def load(app: str) -> Callable[[Database, Settings], Any]:
    """The application's factory, by "module:function"."""
    module, _, name = app.partition(":")
    factory: Callable[[Database, Settings], Any] = getattr(importlib.import_module(module), name)
    return factory


def answers(url: str) -> bool:
    """Whether GET /healthz is answered with 200."""
    address = url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=5.0)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def clean_environment(also: frozenset[str] = frozenset()) -> None:
    """From here on, this process and all that it starts see only the allow-list and `also`; the settings were read before."""
    for name in os.environ.keys() - ALLOWED_VARIABLES - also:
        del os.environ[name]
    if "PYTHONPATH" in os.environ:
        entries = os.environ["PYTHONPATH"].split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in entries if entry)
    sys.path[:] = [os.path.abspath(entry) for entry in sys.path]


def log_to(path: Path, style: Literal["text", "json"] = "text") -> None:
    """Everything that this process and Ray say goes to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > LOG_BYTES_MAX:
        path.replace(path.with_name(path.name + ".1"))
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    logs.configure(style)


@contextmanager
def nothing() -> Iterator[None]:
    yield


# ---- The folder and the address --------------------------------------------------------------------------------------

@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Only one service has a data folder. The lock is the kernel's: it ends with the process and its child, however they end.

    Raises Conflict naming the process that has it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + LOCK_SECONDS_MAX
        while not _try_lock(file):
            holder = os.pread(file, 32, 0).decode().strip()
            if _runs(holder) or time.monotonic() > deadline:  # a child that lost its supervisor ends by itself, soon
                raise Conflict(
                    f"the data folder {folder} is in use by the service with process id {holder or 'unknown'}; "
                    "stop it, or choose another folder with --data-dir", data_dir=str(folder), pid=holder,
                )
            time.sleep(0.05)
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(file)


def _runs(pid: str) -> bool:
    with suppress(ValueError, psutil.Error):
        return runs(psutil.Process(int(pid)))
    return False


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def listen(host: str, port: int) -> Iterator[tuple[socket.socket, str]]:
    """A listening socket and its URL. Raises Conflict when the port is taken."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(address)
        except OSError as error:
            raise Conflict(f"port {port} of {host} can't be had: {error.strerror}", host=host, port=port) from error
        listening.listen(BACKLOG)
        shown = f"[{address[0]}]" if family == socket.AF_INET6 else address[0]
        yield listening, f"http://{shown}:{listening.getsockname()[1]}"


def write_atomically(path: Path, value: dict[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(value) + "\n")
    partial.replace(path)

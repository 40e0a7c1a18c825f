"""Where attempts run, behind a small interface: a Ray of our own, or threads of this process (for tests)."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from mok_service.environment import VARIABLES, gpus, usable_cores
from mok_service.placement import NodeSize
from mok_workers.actor import Measure, load_here, measure_here
from mok_workers.attempt import Attempt, Open
from mok_workers.messages import RECORDS_A_REPLY_MAX, Lost, Payload, Reply, Seen
from mok_workers.placed import ACTOR_NAMES, RayActors, RayHandle, cluster_trouble
from mok_workers.pool import NONE_KEPT, Limits, Pool, Worker

NAMESPACE: Final = "mok"                # schedulers of one cluster find each other's placement groups by name
NODE_ID_LABEL: Final = "ray.io/node-id"  # Ray labels each node with its id
OBJECT_STORE_BYTES: Final = 100 << 20   # replies are small; Ray's own least is 75 MiB
TEMP_LENGTH_MAX: Final = 40             # Ray adds 64 characters to reach its sockets, and AF_UNIX ends at 107

# All of the environment that Ray and its workers see: they inherit it whole, and Ray shows it to whoever asks.
ALLOWED_VARIABLES: Final = frozenset({
    *VARIABLES, "PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV",
    "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "CUDA_HOME", "NVIDIA_DRIVER_CAPABILITIES", "MOK_LIBRARY", "MOK_CUDA_LIBRARY",
    "MOK_ALLOW_STALE_LIBRARY",
})
RAY_VARIABLES: Final = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # A killed raylet is seen after about 4 s instead of 14; a machine that is merely busy isn't taken for dead.
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    # A driver that lost Ray's control store ends after this time, and is started anew by its supervisor.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
    # GPUs are numbered as NVML numbers them, so that a recorded UUID is that of the device used.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}


class ClusterLost(Exception):
    """The cluster is gone as a whole: only a new one helps."""


class Handle(Protocol):
    """One placed attempt. No call of it waits. Each may raise ClusterTrouble; asking again is right then."""

    def ask(self, seen: Seen, lease_seconds: float) -> None:
        """Ask what came after `seen`, unless a question is open. The attempt ends by itself after `lease_seconds` without one."""

    def poll(self) -> Reply | Lost | None:
        """The answer, once it is there."""

    def stop(self) -> None:
        """Ask the attempt to stop after the step it is computing, with a checkpoint."""

    def release(self) -> None:
        """After the answer that it is done: give its devices back. Its process may execute other attempts."""

    def end(self) -> None:
        """End the attempt's process and give its devices back; also when it is gone already."""

    def gone(self) -> bool:
        """After `release` or `end`: whether nothing of the attempt runs any more, and the devices are free."""


class Cluster(Protocol):
    def start(self) -> None: ...

    def nodes(self) -> Sequence[NodeSize]:
        """What is there in all, by live node; each has a name of its own. Raises ClusterLost when there is none."""

    def place(self, payload: Payload) -> Handle:
        """Make a placement group named after the attempt on the node that it names, one of the last answer of `nodes`, and find
        a process for it. Doesn't wait for either. Raises ClusterTrouble."""

    def names(self) -> set[str]:
        """The attempts that hold devices, whoever placed them."""

    def end(self, name: str) -> None:
        """Give back what the attempt of this name holds, and end its process."""

    def tend(self) -> None:
        """Look after the processes that have no attempt; to be called every few seconds."""

    def close(self) -> None:
        """End everything."""


# ---- Ray -------------------------------------------------------------------------------------------------------------

class RayCluster:
    """A Ray of our own on this machine: own folder, own token, no dashboard, nothing in its environment but the allow-list.
    Or, with an address, a cluster that was started elsewhere and that other schedulers may use too: it needs a node on this
    machine, and what its workers see of an environment is its own matter.

    `start` must be called by a thread that lives until `close`: the kernel ends Ray's processes with the thread that made them.
    """

    def __init__(
        self, folder: Path, opens: Open, *, logs: Path | None = None, records_max: int = RECORDS_A_REPLY_MAX,
        seconds_max: float = 1.0, address: str | None = None, token: Path | None = None,
        variables: frozenset[str] = frozenset(), kept: Limits = NONE_KEPT, news: Callable[[], None] = lambda: None,
        measure: Measure = measure_here, load: Callable[[], None] = load_here,
    ) -> None:
        """`folder`: where Ray may keep its files, if the path is short enough; its logs end up in `logs`.

        An attempt answers when it has something to tell, at the latest after `seconds_max`, with at most `records_max` records.
        Workers see `variables` besides the allow-list. `kept`: which processes are there without an attempt; they `load` what
        attempts need, and execute none once `measure` differs from what it was. `news` is called, by any thread, when the
        scheduler shall look at once.
        """
        self._variables = variables
        self._folder, self._opens, self._logs, self._limits = folder, opens, logs, (records_max, seconds_max)
        self._address, self._token, self._news = address, token, news
        self._actors = RayActors(measure, load)
        self._pool = Pool(self._actors, kept, time.monotonic)
        self._cpu_nodes: list[str] = []
        self._ids: dict[str, str] = {}  # Ray's, by the names that `nodes` told last

    def start(self) -> None:
        if self._address is not None:
            self._join(self._address)
            return
        temp = temp_folder(self._folder)
        # What the process itself needs to talk to its Ray stays; all else comes back after Ray's processes have started.
        own = {**RAY_VARIABLES, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        with only_allowed_environment(self._variables):
            os.environ.update(own)
            import ray

            ray.init(
                address="local", _temp_dir=str(temp / "r"), include_dashboard=False, log_to_driver=False,
                configure_logging=False, num_cpus=usable_cores(), num_gpus=len(gpus()), object_store_memory=OBJECT_STORE_BYTES,
            )
        os.environ.update(own)

    def _join(self, address: str) -> None:
        assert self._token is not None, "the settings ask for it"
        os.environ.update({**RAY_VARIABLES, "RAY_AUTH_TOKEN_PATH": str(self._token)})
        import ray

        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)

    def nodes(self) -> Sequence[NodeSize]:
        import ray

        alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        if not alive:
            raise ClusterLost("no node of the Ray cluster is alive")
        self._cpu_nodes = [node["NodeID"] for node in alive if node["Resources"].get("CPU", 0)]
        names = names_of([(node["NodeManagerHostname"], node["NodeID"]) for node in alive])
        self._ids = {name: node["NodeID"] for name, node in zip(names, alive, strict=True)}
        return [
            NodeSize(name, int(node["Resources"].get("CPU", 0)), int(node["Resources"].get("GPU", 0)))
            for name, node in zip(names, alive, strict=True)
        ]

    @cluster_trouble
    def place(self, payload: Payload) -> Handle:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        devices, worker = payload.devices, None
        group = placement_group(
            [{"CPU": devices.cpus, "GPU": devices.gpus}], strategy="STRICT_PACK", name=payload.name,
            bundle_label_selector=[{NODE_ID_LABEL: self._ids[payload.node]}],
        )
        if devices.gpus:  # Ray shows a process the GPUs that it was bound to when it started
            worker = Worker(self._actors.actor(
                num_cpus=devices.cpus, num_gpus=devices.gpus, scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
            ), "")
        return RayHandle(
            payload, self._opens, group, self._pool, self._limits, worker=worker, nodes=self._cpu_nodes, news=self._news
        )

    def names(self) -> set[str]:
        from ray.util.placement_group import placement_group_table

        return {group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"}

    def end(self, name: str) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        with suppress(ValueError):  # there is no such group any more
            remove_placement_group(ray.util.get_placement_group(name))
        for actor in ray.util.list_named_actors():
            if actor.startswith(ACTOR_NAMES):
                with suppress(ValueError):  # it's gone
                    ray.get_actor(actor).leave.remote(name)

    def tend(self) -> None:
        self._pool.tend(self._cpu_nodes)

    def close(self) -> None:
        import ray

        ray.shutdown()
        put_away(self._folder, self._logs)


def names_of(nodes: Sequence[tuple[str, str]]) -> list[str]:
    """A name for each node, given its host's and Ray's id of it: the host's, with the id where Ray has several on that host."""
    hosts = Counter(host for host, _ in nodes)
    return [host if hosts[host] == 1 else f"{host}-{node_id}" for host, node_id in nodes]


def temp_path(wanted: Path) -> Path:
    """Where Ray keeps its files: `wanted`, or a place in the system's temporary folder when that path is too long."""
    if len(str(wanted / "r")) <= TEMP_LENGTH_MAX:
        return wanted
    name = hashlib.sha256(str(wanted).encode()).hexdigest()[:8]
    base = Path(tempfile.gettempdir())
    return (base if len(str(base)) <= TEMP_LENGTH_MAX - 28 else Path("/tmp")) / f"mok-ray-{os.getuid()}-{name}"


def temp_folder(wanted: Path) -> Path:
    """`temp_path` as an empty folder that only this user may enter. Ray opens its own folder to everybody, so it gets one inside.

    Raises FileExistsError when somebody else has a folder of this name.
    """
    path = temp_path(wanted)
    shutil.rmtree(path, ignore_errors=True)  # what a killed service left
    path.mkdir(mode=0o700, parents=True)
    return path


def put_away(wanted: Path, logs: Path | None) -> None:
    """Remove Ray's files. The logs of the last session are kept in `logs`: a worker's last words are there."""
    path = temp_path(wanted)
    sessions = sorted(found for found in path.glob("r/session_*/logs") if not found.parent.is_symlink())
    if logs is not None and sessions:
        shutil.rmtree(logs, ignore_errors=True)
        logs.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(sessions[-1], logs)
    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def only_allowed_environment(also: frozenset[str] = frozenset()) -> Iterator[None]:
    """While it lasts, this process, and what it starts, has only the variables of the allow-list, and `also`."""
    saved = dict(os.environ)
    for name in saved.keys() - ALLOWED_VARIABLES - also:
        del os.environ[name]
    try:
        yield
    finally:
        for name in os.environ.keys() - saved.keys():
            del os.environ[name]
        os.environ.update(saved)


# ---- Threads ---------------------------------------------------------------------------------------------------------

@dataclass
class InProcessHandle:
    """A handle on an attempt in this process. Tests make it deaf (`lost`) to act as a killed worker."""

    attempt: Attempt
    forget: Callable[[], None]
    question: tuple[Seen, float] | None = None
    lost: Lost | None = None

    def ask(self, seen: Seen, lease_seconds: float) -> None:
        if self.question is None:
            self.question = seen, lease_seconds

    def poll(self) -> Reply | Lost | None:
        if self.question is None or self.lost is not None:
            return self.lost
        reply = self.attempt.advance(self.question[0], lease_seconds=self.question[1])
        if reply.empty:
            return None
        self.question = None
        return reply

    def stop(self) -> None:
        self.attempt.stop(checkpoint=True)

    def kill(self) -> None:
        """What SIGKILL does to a worker: nothing more is heard of it."""
        self.lost = Lost("worker_lost", "the worker was killed")
        self.attempt.stop(checkpoint=False)

    def release(self) -> None:
        self.end()

    def end(self) -> None:
        self.kill()

    def gone(self) -> bool:
        ended = self.attempt.join(0.0)
        if ended:
            self.forget()
        return ended


class InProcessCluster:
    """Runs attempts in threads of this process. For tests, and for nothing else."""

    def __init__(self, nodes: Sequence[NodeSize], opens: Open) -> None:
        self._nodes, self._opens = nodes, opens
        self.handles: dict[str, InProcessHandle] = {}
        self.placed: list[Payload] = []

    def start(self) -> None:
        pass

    def nodes(self) -> Sequence[NodeSize]:
        return self._nodes

    def place(self, payload: Payload) -> InProcessHandle:
        assert payload.name not in self.handles, f"{payload.name} is placed twice"
        self.placed.append(payload)
        attempt = Attempt(payload, self._opens)
        handle = InProcessHandle(attempt, lambda: self._forget(payload.name))
        self.handles[payload.name] = handle
        attempt.start()
        return handle

    def _forget(self, name: str) -> None:
        self.handles.pop(name, None)

    def names(self) -> set[str]:
        return set(self.handles)

    def end(self, name: str) -> None:
        self.handles[name].end()

    def tend(self) -> None:
        pass

    def close(self) -> None:
        for handle in self.handles.values():
            handle.end()
        for handle in list(self.handles.values()):
            handle.attempt.join(10.0)
        self.handles.clear()

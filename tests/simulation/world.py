"""The real scheduler, use cases and SQL under a virtual clock, with everything going wrong that may. One seed is one world.

What is real: `Scheduler`, `mok_service.jobs` and `runs`, every statement, transactions. What is simulated: time, machines,
workers, the network between workers and schedulers, the users, and when the database answers.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, event
from sqlalchemy.exc import OperationalError

from mok_service import jobs, runs
from mok_service.db.session import Database
from mok_service.errors import Conflict, MokError, QuotaExceeded, QuotaForbids, Unrunnable
from mok_service.placement import NodeSize
from mok_service.runs.types import Lease, Run
from mok_service.settings import Settings
from mok_service.spec import ExecutionSpec
from mok_workers.cluster import ClusterLost
from mok_workers.scheduler import DATABASE_TROUBLE, Scheduler
from tests.simulation import properties
from tests.simulation.machines import Machines, SimulatedCluster, job_of

START: Final = datetime(2026, 12, 1, tzinfo=UTC)
FAULTY_ROUNDS: Final = 12
RUNS_MAX: Final = 4
QUIET_ROUNDS_MAX: Final = 400
TENANTS: Final = ("local", "ada", "ben")
HARDWARE: Final[dict[str, Any]] = {"host": "elsewhere", "gpus": []}


class Killed(BaseException):
    """The scheduler's process ends here."""


@dataclass
class Faults:
    """What a scheduler's next transactions meet: an action, so many transactions from now."""

    after: int = -1
    action: Callable[[], None] | None = None
    late: bool = False                       # after the commit instead of before the transaction begins

    def met(self, late: bool) -> None:
        if self.action is None or late != self.late:
            return
        if self.after > 0:
            self.after -= 1
            return
        action, self.action = self.action, None
        action()


class SimulatedDatabase(Database):
    """The real one; a process sees the faults that are meant for it. Remembers who held which lease when it last wrote."""

    def __init__(self, base: Database, faults: Faults, clock: Callable[[], datetime]) -> None:
        self.__dict__.update(base.__dict__)
        self._clock = clock
        self._faults = faults
        self.leases: dict[str, tuple[str, int]] = {}

    @contextmanager
    def write(self) -> Iterator[Connection]:
        self._faults.met(late=False)
        with super().write() as connection:
            raw: Any = connection.connection.dbapi_connection
            held = raw.execute("SELECT id, lease_token, attempt FROM runs WHERE lease_token IS NOT NULL")
            self.leases = {run_id: (token, attempt) for run_id, token, attempt in held}
            yield connection
        self._faults.met(late=True)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        self._faults.met(late=False)
        with super().read() as connection:
            yield connection


@cache
def database(path: Path) -> Database:
    """The one database file of this process, opened once: nothing here survives a power cut, so nothing waits for the disk."""
    base = Database(f"sqlite:///{path}")

    @event.listens_for(base.engine, "connect")
    def connect(connection: Any, _record: Any) -> None:
        for pragma in ("synchronous = OFF", "locking_mode = EXCLUSIVE", "journal_mode = MEMORY", "temp_store = MEMORY"):
            connection.execute(f"PRAGMA {pragma}")

    return base


@cache
def settings(folder: Path) -> Settings:
    return Settings(data_dir=folder, database_url="sqlite:////unused", stop_seconds_max=20.0, start_seconds_max=40.0,
                    lease_seconds=30.0, heartbeat_seconds=9.0)


def emptied(base: Database) -> sqlite3.Connection:
    """The database without rows, and the driver's own connection to it."""
    with base.engine.connect() as connection:
        raw: Any = connection.connection.dbapi_connection
    names = [name for (name,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'table'") if name != "alembic_version"]
    raw.executescript("PRAGMA foreign_keys = OFF; BEGIN;" + "".join(f"DELETE FROM {name};" for name in names)
                      + "COMMIT; PRAGMA foreign_keys = ON;")
    return raw  # type: ignore[no-any-return]


@dataclass
class Process:
    """A scheduler's process, as it comes and goes."""

    name: str
    faults: Faults
    db: SimulatedDatabase
    scheduler: Scheduler | None = None
    sleeps_until: float = 0.0


@dataclass
class World:
    seed: int
    path: Path
    trace: list[str] | None = None
    now: datetime = START
    boots: int = 0
    wishes: dict[str, set[str]] = field(default_factory=dict)  # by run: what users asked for and were granted
    submitted: dict[str, tuple[int, int]] = field(default_factory=dict)  # by run: steps and seed
    nested: bool = False

    def __post_init__(self) -> None:
        self.choose = choose = random.Random(self.seed)
        self.base = database(self.path)
        self.raw = emptied(self.base)
        self.machines = Machines(choose, [
            NodeSize(f"n{number}", choose.choice((1, 2, 2, 3)), choose.choice((0, 0, 0, 1, 2)))
            for number in range(1, choose.choice((1, 1, 2, 3)) + 1)])
        self.machines.placed = partial(properties.check_placed, self)
        self.settings = settings(self.path.parent)
        self.users = SimulatedDatabase(self.base, Faults(), lambda: self.now)
        count = 2 if choose.random() < 0.4 else 1
        self.processes = [self._process(f"scheduler-{number}") for number in range(count)]
        self.quotas = {}
        for tenant in TENANTS[1:]:
            if choose.random() < 0.6:
                limit: dict[str, int | None] = {choose.choice(("runs_max", "devices_max")): choose.choice((1, 2))}
                if choose.random() < 0.5:
                    limit["queued_max"] = 2
                runs.set_quota(self.users, tenant, {**limit, "weight": choose.choice((1.0, 3.0))}, self.now)
                self.quotas[tenant] = limit
        self.say("machines", self.machines.nodes, "schedulers", count, "quotas", self.quotas)

    def _process(self, name: str) -> Process:
        faults = Faults()
        return Process(name, faults, SimulatedDatabase(self.base, faults, lambda: self.now))

    def say(self, *what: object) -> None:
        if self.trace is not None:
            self.trace.append(f"{(self.now - START).total_seconds():9.1f} " + " ".join(map(str, what)))

    # ---- one world, from beginning to end ------------------------------------------------------------------------------

    def play(self) -> None:
        """Raises properties.Violated for what must never be."""
        for process in self.processes:
            if self.choose.random() < 0.8:
                self._boot(process)
        for _ in range(self.choose.randrange(1, 4)):
            self._submit()
        for _ in range(FAULTY_ROUNDS):
            self._disturb()
            self._round()
            self._pass(self.choose.choice((0.5, 1.0, 3.0, 3.0, 8.0)))
            properties.check_now(self)
        self._calm()
        for _ in range(QUIET_ROUNDS_MAX):
            if not self._open_runs():
                break
            self._round()
            self._pass(5.0)
        properties.check_now(self)
        properties.check_end(self, self._open_runs())

    def _open_runs(self) -> list[str]:
        rows = self.raw.execute("SELECT id FROM runs WHERE status NOT IN ('succeeded', 'failed', 'cancelled') ORDER BY id")
        return [run_id for (run_id,) in rows]

    def _calm(self) -> None:
        """Faults stop; whoever died comes back; users want every run to end."""
        self.say("calm")
        self.machines.faulty = False
        for node in list(self.machines.away):
            self.machines.restore(node, node.cpus)
        for process in self.processes:
            process.faults.action, process.sleeps_until = None, 0.0
            if process.scheduler is None:
                self._boot(process)
        for run_id in sorted(self.submitted):
            with suppress(Conflict):
                runs.resume(self.users, run_id, self._tenant(run_id), self.now)

    def _pass(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)
        self.machines.now += seconds
        self.machines.settle()

    def _round(self) -> None:
        for process in self.processes:
            self._tick(process)

    def _tick(self, process: Process) -> None:
        if process.scheduler is None or self.machines.now < process.sleeps_until:
            return
        try:
            process.scheduler.tick(self.now)
        except DATABASE_TROUBLE:
            self.say(process.name, "couldn't reach the database")
        except (Killed, ClusterLost):
            self._died(process)

    def _boot(self, process: Process) -> None:
        self.boots += 1
        self.say(process.name, "boots", self.boots)
        process.scheduler = Scheduler(process.db, SimulatedCluster(self.machines), self.settings, worker=process.name,
                                      boot_id=f"boot-{self.boots}", alone=len(self.processes) == 1)
        try:
            process.scheduler.boot(self.now)
        except DATABASE_TROUBLE:
            process.scheduler = None
        except Killed:
            self._died(process)

    def _died(self, process: Process) -> None:
        """Its workers die with it, or go on until nobody has asked them for too long."""
        self.say(process.name, "was killed")
        assert process.scheduler is not None
        held = [active.name for active in process.scheduler._active]
        process.scheduler = None
        if self.choose.random() < 0.5:
            for name in held:
                if name in self.machines.workers:
                    self.machines.kill(self.machines.workers[name])

    # ---- what happens to it ----------------------------------------------------------------------------------------------

    def _disturb(self) -> None:
        choose = self.choose
        process = choose.choice(self.processes)
        if process.scheduler is None:
            if choose.random() < 0.5:
                self._boot(process)
            return
        dice = choose.random()
        if dice < 0.10:
            self._arm(process, self._kill, "is to be killed")
        elif dice < 0.16:
            self._arm(process, self._trouble, "is to lose the database")
        elif dice < 0.24:
            self._arm(process, lambda: self._stop_the_world(process), "is to stand still inside a tick")
        elif dice < 0.26:
            process.sleeps_until = self.machines.now + choose.choice((10.0, 45.0))
            self.say(process.name, "sleeps")
        elif dice < 0.29:
            self._arm(process, lambda: self._pass(choose.choice((3.0, 40.0))), "is to wait for the disk")
        elif dice < 0.31:
            jump = choose.choice((-20.0, 5.0, 50.0))
            self.now += timedelta(seconds=jump)  # the clock, not the time
            self.say("the clock jumps by", jump)
        elif dice < 0.35:
            self._change_cluster()
        elif dice < 0.67:
            self._use()

    def _change_cluster(self) -> None:
        choose, machines = self.choose, self.machines
        if machines.nodes and (not machines.away or choose.random() < 0.5):
            machines.lose(choose.choice(machines.nodes))
        else:
            machines.restore(choose.choice(machines.away), choose.choice((1, 2, 3)))
        self.say("the cluster is now", machines.nodes)

    def _arm(self, process: Process, action: Callable[[], None], what: str) -> None:
        faults = process.faults
        faults.after, faults.late, faults.action = self.choose.randrange(12), self.choose.random() < 0.5, action
        self.say(process.name, what, "after", faults.after, "late" if faults.late else "early")

    def _kill(self) -> None:
        raise Killed

    def _trouble(self) -> None:
        raise OperationalError("any", {}, Exception("the server closed the connection"))

    def _stop_the_world(self, process: Process) -> None:
        """For longer than a lease, in the middle of whatever it does. The others go on meanwhile; then it does, none the
        wiser."""
        if self.nested:
            return
        self.nested = True
        self.say(process.name, "stands still")
        for _ in range(4):
            self._pass(10.0)
            for other in self.processes:
                if other is not process:
                    self._tick(other)
            self._use()
        self.say(process.name, "goes on")
        self.nested = False

    # ---- users -----------------------------------------------------------------------------------------------------------

    def _use(self) -> None:
        choose = self.choose
        if (len(self.submitted) < RUNS_MAX and choose.random() < 0.35) or not self.submitted:
            self._submit()
            return
        run_id, verb = choose.choice(sorted(self.submitted)), choose.choice(("cancel", "pause", "resume", "resume", "rerun"))
        tenant = self._tenant(run_id)
        try:
            if verb == "rerun":
                run = runs.get_run(self.users, run_id, tenant)
                again = jobs.create_run(self.users, run.job_id, reproduces=run_id, tenant=tenant, now=self.now)
                self._accepted(again, *self.submitted[run_id])
            else:
                getattr(runs, verb)(self.users, run_id, tenant, self.now)
                self.wishes.setdefault(run_id, set()).add(verb)
            self.say("user:", verb, run_id)
        except (Conflict, QuotaExceeded, QuotaForbids, Unrunnable) as error:
            self.say("user:", verb, run_id, "refused:", error.message)

    def _submit(self) -> None:
        choose = self.choose
        steps, seed = choose.choice((1, 2, 4, 7)), choose.randrange(2)
        job = job_of(steps, seed)
        execution = ExecutionSpec(**job.execution.model_dump() | {
            "device": choose.choice(("cpu", "cpu", "cuda")) if any(node.gpus for node in self.machines.nodes) else "cpu",
            "threads": choose.choice((0, 1, 1, 1, 2)), "priority": choose.choice((0, 0, 5)),
            "max_attempts": choose.choice((1, 3, 5)), "queue_deadline_seconds": choose.choice((60, 86_400, 86_400)),
            "run_deadline_seconds": choose.choice((30, 604_800, 604_800)),
        })
        wanted = job.model_copy(update={"execution": execution})
        try:
            made = jobs.submit(self.users, wanted, tenant=choose.choice(TENANTS), now=self.now)
        except MokError as error:
            self.say("user: submit refused:", error.message)
            return
        self._accepted(made.run, steps, seed)

    def _accepted(self, run: Run, steps: int, seed: int) -> None:
        self.submitted[run.id] = steps, seed
        self.say("user: submitted", run.id, run.tenant, "steps", steps, run.execution.device, "threads", run.execution.threads,
                 "priority", run.execution.priority)

    def _tenant(self, run_id: str) -> str:
        return str(self.raw.execute("SELECT tenant FROM runs WHERE id = ?", (run_id,)).fetchone()[0])

    def holder(self, db: Database, lease: Lease) -> bool:
        """Whether the lease was the run's when `db` began its last transaction that wrote."""
        assert isinstance(db, SimulatedDatabase)
        return db.leases.get(lease.run_id) == (lease.token, lease.attempt)

    def seen_by(self, db: Database) -> Sequence[NodeSize]:
        """The machines, as the scheduler that uses `db` last saw them."""
        scheduler = next(process.scheduler for process in self.processes if process.db is db)
        assert scheduler is not None
        return scheduler._nodes

"""The scheduler: claims queued runs, places them, and carries what their workers tell into the database.

`tick` does one round and never waits: not for a worker, not for Ray, not for time. Every use case that it calls is one
transaction, and none is open while a device works. When the process dies between two calls, the next one finds all it needs
in the database: what was not put on file is computed again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from mok_service import jobs, runs
from mok_service.db.session import Database
from mok_service.environment import hardware
from mok_service.errors import Conflict, LeaseLost
from mok_service.lifecycle import AttemptEnd, StopReason
from mok_service.placement import Held, NodeSize, Room, devices_of, room_beside
from mok_service.provenance.bisection import PlannedSide
from mok_service.runs.types import AppendResult, Lease, LogLine, Outcome, Run
from mok_service.settings import Settings
from mok_service.spec import ExecutionSpec
from mok_service.training.sources import Remote
from mok_workers.cluster import Cluster, Handle
from mok_workers.messages import Compared, Line, Lost, Payload, Reply, Seen
from mok_workers.node import describe
from mok_workers.placed import ClusterTrouble

log = logging.getLogger("mok.scheduler")

REAP_SECONDS: Final = 1.0
TEND_SECONDS: Final = 5.0
BUSY_TICK_SECONDS: Final = 0.1   # with something running, the scheduler looks at least this often
PAUSE_SECONDS_MIN: Final = 0.01  # between two rounds, however much there is to hear
PAUSE_OF_ROUND: Final = 3.0      # and as many times as long as the round took: what it keeps busy, others need too
RETRY_SECONDS_MAX: Final = 600.0
DATABASE_TROUBLE: Final = (OperationalError, InterfaceError, PoolTimeout)  # it may be back at the next tick


@dataclass(frozen=True, slots=True)
class Finish:
    """The run ends with this attempt, or pauses."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Release:
    """The attempt is over; the run may have another."""

    end: AttemptEnd
    message: str


@dataclass(frozen=True, slots=True)
class Forget:
    """The run is somebody else's by now: give the devices back, and write nothing."""


Ending = Finish | Release | Forget


@dataclass
class Active:
    """An attempt that this scheduler placed."""

    lease: Lease
    run: Run
    handle: Handle
    since: datetime
    renewed_at: datetime
    seen: Seen = field(default_factory=Seen)
    answered: bool = False               # its process is up
    stopping_since: datetime | None = None
    trouble_since: datetime | None = None  # the cluster's, about this attempt
    ending: Ending | None = None         # what to write once its devices are free
    ended_at: datetime | None = None

    @property
    def name(self) -> str:
        return attempt_name(self.lease)


class Scheduler:
    """One scheduler on one cluster. `clock` is only asked by `run_forever`; `tick` is told the time."""

    def __init__(
        self, db: Database, cluster: Cluster, settings: Settings, *, clock: Callable[[], datetime] | None = None,
        worker: str = "local", boot_id: str = "", alone: bool = False, news: threading.Event | None = None,
    ) -> None:
        """`alone`: there is no other scheduler on this database, so every lease of another boot is a dead one's.

        `news`: set it to have `run_forever` begin its next round at once.
        """
        self._db, self._cluster, self._settings = db, cluster, settings
        self._clock = clock or db.now
        self._worker, self._boot_id, self._alone, self._news = worker, boot_id, alone, news or threading.Event()
        self._active: list[Active] = []
        self._unplaced: list[Lease] = []     # claimed when the database went away
        self._nodes: Sequence[NodeSize] = ()
        self._here: dict[str, Any] = hardware()
        self._reaped_at: datetime | None = None
        self._reported_at: datetime | None = None
        self._tended_at: datetime | None = None

    # ---- one round -------------------------------------------------------------------------------------------------------

    def boot(self, now: datetime) -> None:
        """Before the first tick: what an earlier boot of this scheduler left running goes back to the queue; then the cluster."""
        worker = None if self._alone else self._worker
        for run_id in runs.end_leases_of_earlier_boots(self._db, self._boot_id, now, worker):
            log.warning("%s goes on after the restart", run_id)
        self._cluster.start()

    def tick(self, now: datetime) -> None:
        """Hear every attempt, reap, claim. Raises only when the database can't be reached (nothing is lost: tick again), and what
        the cluster raises when it is asked for its nodes."""
        if due(self._reported_at, now, self._settings.heartbeat_seconds):
            self._report(now)
        if due(self._tended_at, now, TEND_SECONDS):
            self._cluster.tend()
            self._tended_at = now
        for active in list(self._active):
            self._guarded(active, now)
        if due(self._reaped_at, now, REAP_SECONDS):  # after a pause of this process, its own leases were renewed first
            runs.reap(self._db, now)
            self._reaped_at = now
        while self._unplaced:
            self._give_back(self._unplaced[-1], "stopped", "the database went away when it was to be placed", now)
            self._unplaced.pop()
        while (lease := self._claim(now)) is not None:
            self._start(lease, now)

    @property
    def idle(self) -> bool:
        return not self._active

    def _start(self, lease: Lease, now: datetime) -> None:
        """Begin a claimed attempt. For trouble of the cluster or the database the run isn't to blame: it loses no attempt."""
        try:
            self._begin(lease, now)
        except DATABASE_TROUBLE:
            self._unplaced.append(lease)
            raise
        except ClusterTrouble as error:
            self._doubt(attempt_name(lease), error)
            self._give_back(lease, "stopped", f"the cluster couldn't take it: {error}", now)
        except Exception as error:
            log.exception("%s can't be started", attempt_name(lease))
            self._give_back(lease, "failed", f"{type(error).__name__}: {error}", now)

    def _doubt(self, name: str, error: ClusterTrouble) -> None:
        """Claim nothing before the cluster has told its nodes again."""
        log.warning("%s: %s", name, error)
        self._reported_at = None

    def _give_back(self, lease: Lease, why: AttemptEnd, message: str, now: datetime) -> None:
        """`stopped` costs no attempt, and is soon tried again; anything else after a while that grows."""
        retry_at = now + timedelta(seconds=self._settings.retry_seconds) if why == "stopped" else None
        try:
            runs.release(self._db, lease, why, message, now, retry_at)
        except LeaseLost as error:
            log.warning("%s: %s", attempt_name(lease), error)

    def _report(self, now: datetime) -> None:
        self._nodes = self._cluster.nodes()
        runs.report_nodes(self._db, self._worker, describe(self._nodes, self._here, self._worker), now)
        strangers = self._cluster.names() - {active.name for active in self._active}
        if strangers:
            strangers -= {f"{run_id}-{attempt}" for run_id, attempt in runs.leased_attempts(self._db)}  # another scheduler's
        for name in sorted(strangers):
            log.warning("ended %s: it held devices, and no attempt has that name", name)
            self._cluster.end(name)
        self._reported_at = now

    def _guarded(self, active: Active, now: datetime) -> None:
        """One attempt's trouble is not another's."""
        try:
            self._serve(active, now)
            active.trouble_since = None
        except LeaseLost as error:
            log.warning("%s: %s", active.name, error)
            self._give_up(active, Forget(), now)
        except DATABASE_TROUBLE:
            raise
        except ClusterTrouble as error:  # what the worker did, and how it ended, stays as it is: ask again
            self._doubt(active.name, error)
            active.trouble_since = active.trouble_since or now
            if active.ending is None and due(active.trouble_since, now, self._settings.lease_seconds):
                self._give_up(active, Release("worker_lost", f"the cluster doesn't answer: {error}"), now)
        except Exception as error:
            log.exception("%s failed", active.name)
            unwritable = isinstance(active.ending, Release)  # its lease will expire
            self._give_up(active, Forget() if unwritable else Release("failed", f"{type(error).__name__}: {error}"), now)

    def _give_up(self, active: Active, ending: Ending, now: datetime) -> None:
        self._try(partial(self._end, active, ending, now), f"{active.name} can't be ended")

    def _serve(self, active: Active, now: datetime) -> None:
        if not isinstance(active.ending, Forget) and due(active.renewed_at, now, self._settings.heartbeat_seconds):
            runs.renew(self._db, active.lease, now)
            active.renewed_at = now
        if active.ending is not None:
            self._complete(active, now)
            return
        self._obey(active, now)
        if active.ending is None:
            self._hear(active, now)
        if active.ending is None:
            self._watch(active, now)
        if active.ending is not None:
            self._complete(active, now)  # what it held may be free already, for the next one of this round
        else:
            left = active.renewed_at + timedelta(seconds=active.lease.lease_seconds) - now
            active.handle.ask(active.seen, left.total_seconds())

    # ---- what users and deadlines want -----------------------------------------------------------------------------------

    def _obey(self, active: Active, now: datetime) -> None:
        active.run = run = runs.get_run(self._db, active.run.id, active.run.tenant)
        if run.status == "stopping":
            assert run.stop_reason is not None
            self._stop(active, run.stop_reason, run.message, now)

    def _stop(self, active: Active, reason: StopReason, message: str | None, now: datetime) -> None:
        """Only a pause needs what is being computed; for all else the worker is ended at once."""
        if reason == "user_paused":
            self._pause(active, now)
        else:
            self._end(active, stopped_for(reason, message), now)

    def _pause(self, active: Active, now: datetime) -> None:
        """Stop after the step being computed, with a checkpoint; a worker that hasn't begun is ended at once."""
        if active.stopping_since is not None:
            return
        active.stopping_since = now
        if active.answered:
            active.handle.stop()
        else:
            self._end(active, stopped_for("user_paused", None), now)

    def _watch(self, active: Active, now: datetime) -> None:
        settings = self._settings
        if not active.answered and all(node.name != active.lease.node for node in self._nodes):
            self._end(active, Release("worker_lost", f"node {active.lease.node} went away before a worker came up"), now)
        elif not active.answered and due(active.since, now, settings.start_seconds_max):
            self._end(active, Release("worker_lost", f"no worker came up within {settings.start_seconds_max:g} s"), now)
        elif active.stopping_since is not None and due(active.stopping_since, now, settings.stop_seconds_max):
            log.warning("%s didn't stop within %g s", active.name, settings.stop_seconds_max)
            self._end(active, stopped_for("user_paused", None), now)

    # ---- what the worker tells -------------------------------------------------------------------------------------------

    def _hear(self, active: Active, now: datetime) -> None:
        answer = active.handle.poll()
        if isinstance(answer, Lost):
            self._end(active, Release(answer.end, answer.message), now)
        elif answer is not None:
            active.answered = True
            self._apply(active, answer, now)

    def _apply(self, active: Active, reply: Reply, now: datetime) -> None:
        result = AppendResult(None)
        if reply.started is not None and active.run.status != "running":  # else it is on file, and only the answer was lost
            told = reply.started
            result = runs.mark_running(self._db, active.lease, now, told.environment, told.placement, told.manifest)
        news = reply.records or reply.lines or reply.checkpoints or reply.doing
        if result.stop in (None, "user_paused") and news:  # a pause loses nothing
            lines = [log_line(line) for line in reply.lines]
            result = runs.append(self._db, active.lease, reply.records, lines, reply.checkpoints, now, reply.doing)
        active.seen = reply.after(active.seen)
        if result.stop is not None:
            self._stop(active, result.stop, result.message, now)
        if active.ending is None and reply.status != "running":
            self._end(active, ending_of(reply), now, whole=reply.status == "done" and active.stopping_since is None)

    # ---- the end ---------------------------------------------------------------------------------------------------------

    def _end(self, active: Active, ending: Ending, now: datetime, *, whole: bool = False) -> None:
        """End the worker; `ending` is written once its devices are free. `whole`: it did all that it was asked for, so its
        process may do something else."""
        active.ending, active.ended_at = ending, active.ended_at or now
        if whole:
            active.handle.release()
        else:
            active.handle.end()

    def _complete(self, active: Active, now: datetime) -> None:
        assert active.ended_at is not None
        if not self._gone(active):
            if not due(active.ended_at, now, self._settings.stop_seconds_max):
                return
            log.error("%s: its worker can't be seen to end; going on without it", active.name)
        self._write(active, now)
        self._active.remove(active)

    def _gone(self, active: Active) -> bool:
        try:
            return active.handle.gone()
        except ClusterTrouble as error:
            self._doubt(active.name, error)
            return False

    def _write(self, active: Active, now: datetime) -> None:
        match active.ending:
            case Finish(outcome):
                run = runs.finish(self._db, active.lease, outcome, now)
            case Release(end, message):
                retry_at = now if end in ("service_restarted", "stopped") else self._retry_at(active.run, now)
                run = runs.release(self._db, active.lease, end, message, now, retry_at)
            case _:
                return
        log.info("%s: %s after step %s", active.name, run.status, run.step)

    def _retry_at(self, run: Run, now: datetime) -> datetime:
        wait = self._settings.retry_seconds * 2.0 ** min(run.failures, 16)
        return now + timedelta(seconds=min(wait, RETRY_SECONDS_MAX))

    # ---- the beginning ---------------------------------------------------------------------------------------------------

    def _claim(self, now: datetime) -> Lease | None:
        if self._reported_at is None:
            return None
        ours = [Held(a.run.execution, a.lease.node) for a in self._active
                if isinstance(a.ending, Forget)]  # hold devices, not in the database

        def judge(candidate: ExecutionSpec, active: Sequence[Held]) -> Room | None:
            return room_beside(candidate, [*active, *ours], self._nodes)

        return runs.claim(
            self._db, now, self._worker, judge, lease_seconds=self._settings.lease_seconds, boot_id=self._boot_id
        )

    def _begin(self, lease: Lease, now: datetime) -> None:
        run = runs.get_run(self._db, lease.run_id, lease.tenant)
        job = jobs.get_job(self._db, run.job_id, run.tenant)
        assert lease.node is not None, "a run of several devices is refused at submit"
        node = next(node for node in self._nodes if node.name == lease.node)
        devices = devices_of(run.execution, node).times(run.execution.count)
        spec = {"training": job.training.model_dump(mode="json"), "execution": run.execution.model_dump(mode="json")}
        plan = runs.plan_of_audit(self._db, run)
        whose = run.id if plan is None else run.reproduces or run.id  # an audit reads the audited run's checkpoints
        payload = Payload(
            name=attempt_name(lease), job=spec, data_roots=tuple(map(str, self._settings.data_roots)),
            checkpoints=str(self._settings.checkpoints(whose)), manifest=job.manifest, last_step=run.step,
            on_record=tuple(stored.info for stored in runs.checkpoints(self._db, whose, run.tenant)),
            lease_seconds=lease.lease_seconds, node=node.name, devices=devices,
            segments=None if plan is None else plan.rest(run.step), bisect=self._compared(run), remote=Remote.of(self._settings),
        )
        try:
            runs.mark_starting(self._db, lease, now)
        except Conflict as error:  # cancelled meanwhile: nothing was made, and nothing will be
            log.info("%s: %s", payload.name, error)
            return
        active = Active(lease, run, self._cluster.place(payload), now, now)
        active.handle.ask(active.seen, lease.lease_seconds)
        self._active.append(active)
        log.info("%s starts on %s", payload.name, node.name)

    def _compared(self, run: Run) -> tuple[Compared, Compared] | None:
        """What a bisect compares; None for any other run."""
        plan = runs.plan_of_bisect(self._db, run)
        if plan is None:
            return None

        def side(planned: PlannedSide) -> Compared:
            execution = {**run.execution.model_dump(mode="json"), **planned.execution}
            if planned.run is None:
                return Compared(f"replay of {plan.first.run}", execution, None, None)
            record = runs.record_to_bisect(self._db, planned.run, run.tenant)
            return Compared(planned.run, execution, record, str(self._settings.checkpoints(planned.run)))

        return side(plan.first), side(plan.second)

    # ---- for ever --------------------------------------------------------------------------------------------------------

    def run_forever(self, stop: threading.Event, ready: Callable[[], None] = lambda: None) -> None:
        """Tick until `stop` is set, then `close`. `ready` is called once the cluster is up. Raises what the cluster raises.

        A round follows a transaction of this process that wrote, and `news`; without either, every `tick_seconds`.
        """
        own = threading.get_ident()
        self._db.after_write.append(lambda: None if threading.get_ident() == own else self._news.set())
        try:
            self.boot(self._clock())
            self._report(self._clock())
            ready()
            while not stop.is_set():
                began = time.monotonic()
                self._news.clear()
                try:
                    self.tick(self._clock())
                except DATABASE_TROUBLE:
                    log.exception("the database can't be reached; trying again")
                stop.wait(max(PAUSE_SECONDS_MIN, PAUSE_OF_ROUND * (time.monotonic() - began)))
                tick = self._settings.tick_seconds
                self._news.wait(tick if self.idle else min(tick, BUSY_TICK_SECONDS))
        finally:
            self.close(self._clock, in_order=stop.is_set())

    def close(self, clock: Callable[[], datetime], *, in_order: bool = True) -> None:
        """End every worker and the cluster. What was running goes back to the queue, to go on from its last checkpoint. Where
        that is `in_order`, somebody wanted it, and no run can be the cause.
        """
        for active in self._active:
            self._try(active.handle.end, f"{active.name} can't be ended")
        self._try(self._cluster.close, "the cluster can't be closed")
        for active in self._active:  # where this fails, the next boot ends the lease
            active.ending = active.ending or Release("stopped" if in_order else "service_restarted", "the service was stopped")
            self._try(partial(self._write, active, clock()), f"{active.name} can't be given back")
        self._try(lambda: runs.report_nodes(self._db, self._worker, [], clock()), "the nodes can't be taken off the list")
        self._active.clear()

    def _try(self, action: Callable[[], object], otherwise: str) -> None:
        """At the end, one part's failure doesn't keep the others from ending."""
        try:
            action()
        except Exception:
            log.exception("%s", otherwise)


def attempt_name(lease: Lease) -> str:
    return f"{lease.run_id}-{lease.attempt}"


def due(last: datetime | None, now: datetime, seconds: float) -> bool:
    """Whether `seconds` have passed; also when the clock was set back."""
    return last is None or not timedelta(0) <= now - last < timedelta(seconds=seconds)


def stopped_for(reason: StopReason, message: str | None) -> Finish:
    """How a run ends that was told to stop."""
    match reason:
        case "user_cancelled":
            return Finish(Outcome("cancelled", reason, message))
        case "user_paused":
            return Finish(Outcome("paused", reason, message))
        case _:
            return Finish(Outcome("failed", reason, message))


def ending_of(reply: Reply) -> Ending:
    """What a worker's last word means for its run."""
    if reply.status == "stopped":
        return stopped_for("user_paused", None)
    if reply.status == "done":
        if reply.conclusion is not None:
            return Finish(Outcome("succeeded", "finished", finding=reply.conclusion.finding, report=reply.conclusion.report))
        if reply.final is None:  # an audit
            return Finish(Outcome("succeeded", "finished"))
        return Finish(Outcome("succeeded", "finished", weights=reply.final.state.weights, head=reply.final.head))
    assert reply.failure is not None
    if reply.failure.reason is None:
        return Release(reply.failure.end, reply.failure.message)
    return Finish(Outcome("failed", reply.failure.reason, reply.failure.message, finding=reply.failure.finding))


def log_line(line: Line) -> LogLine:
    return LogLine(line.sequence, line.at, line.level, line.message, line.step)

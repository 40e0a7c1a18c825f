"""A scheduler on a real, migrated database and a cluster of threads, under a clock that the test moves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from mok_service import jobs, runs
from mok_service.db.session import Database
from mok_service.placement import NodeSize
from mok_service.provenance.chain import StepRecord
from mok_service.runs.types import Run
from mok_service.settings import Settings
from mok_service.spec import ExecutionSpec, parse_job
from mok_workers.attempt import Open
from mok_workers.cluster import InProcessCluster, InProcessHandle
from mok_workers.scheduler import Scheduler
from tests.workers.fakes import Opens, chain, job_document

SECONDS_MAX = 30.0
TICK = timedelta(milliseconds=20)
NODES = (NodeSize("here", 2, 0),)


MakeWorld = Callable[..., "World"]


@dataclass
class World:
    folder: Path
    url: str
    opens: Open = field(default_factory=Opens)
    nodes: tuple[NodeSize, ...] = NODES
    now: datetime = datetime(2026, 12, 1, tzinfo=UTC)
    boots: int = 0

    def __post_init__(self) -> None:
        self.settings = Settings(data_dir=self.folder, database_url=self.url)
        self.db = Database(self.url, clock=lambda: self.now)
        self.clusters: list[InProcessCluster] = []
        self.boot()

    def boot(self, worker: str = "local") -> Scheduler:
        """A new scheduler with a cluster of its own. What an earlier one had runs on, unheard."""
        self.boots += 1
        self.cluster = InProcessCluster(self.nodes, self.opens)
        self.clusters.append(self.cluster)
        self.scheduler = Scheduler(self.db, self.cluster, self.settings, worker=worker, boot_id=f"boot-{self.boots}")
        self.scheduler.boot(self.now)
        return self.scheduler

    def close(self) -> None:
        if isinstance(self.opens, Opens) and self.opens.go is not None:
            self.opens.go.set()
        for cluster in self.clusters:
            cluster.close()
        self.db.close()

    def submit(self, steps: int = 6, **fields: Any) -> str:
        """A queued run."""
        return jobs.submit(self.db, parse_job(job_document(steps, **fields)), now=self.now).run.id

    def rerun(self, run_id: str, **execution: Any) -> str:
        run = self.run(run_id)
        changed = ExecutionSpec(**(run.execution.model_dump() | execution))
        return jobs.create_run(self.db, run.job_id, execution=changed, reproduces=run_id, now=self.now).id

    def tick(self) -> None:
        self.scheduler.tick(self.now)
        self.now += TICK

    def wait(self, seconds: float) -> None:
        """Time passes, and the scheduler keeps its leases all the while."""
        end = self.now + timedelta(seconds=seconds)
        while self.now < end:
            self.tick()
            self.now += timedelta(seconds=self.settings.heartbeat_seconds) - TICK
        self.tick()

    def until(self, reached: Callable[[], bool], what: str = "") -> None:
        """Ticks until something is so. Nothing sleeps: the threads of the attempts run between two ticks."""
        deadline = time.monotonic() + SECONDS_MAX
        while not reached():
            assert time.monotonic() < deadline, f"it never came to be: {what}"
            self.tick()
            time.sleep(0)

    def ended(self, *run_ids: str) -> Run:
        """The (last) run, once all have ended."""
        self.until(lambda: all(self.run(run_id).ended for run_id in run_ids), f"{run_ids} ended")
        return self.run(run_ids[-1])

    def stored(self, run_id: str, step: int) -> None:
        """Ticks until this step is on file."""
        self.until(lambda: (-1 if (found := self.run(run_id).step) is None else found) >= step, f"step {step}")

    def run(self, run_id: str) -> Run:
        return runs.get_run(self.db, run_id)

    def records(self, run_id: str) -> list[StepRecord]:
        return [stored.record for stored in runs.steps(self.db, run_id)]

    def ends(self, run_id: str) -> list[str | None]:
        """Why each attempt ended."""
        return [attempt.end for attempt in sorted(runs.attempts(self.db, run_id), key=lambda a: a.attempt)]

    def handle(self, run_id: str) -> InProcessHandle:
        return next(handle for name, handle in self.cluster.handles.items() if name.startswith(run_id))

    def assert_whole(self, run_id: str, steps: int = 6) -> None:
        """The run succeeded, with exactly the records that an undisturbed one has."""
        run = self.run(run_id)
        expected = list(chain(job_document(steps)))
        assert run.status == "succeeded", (run.status, run.stop_reason, run.message)
        assert self.records(run_id) == expected and run.head == expected[-1].head()
        assert expected[-1].state is not None and run.weights == expected[-1].state.weights
        assert runs.checkpoints(self.db, run_id)[-1].info.step == steps
        assert not self.cluster.handles, "devices are held"

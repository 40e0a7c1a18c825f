"""The use cases of jobs: submit one, look at them, run one again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from mok_service.db.session import Database
from mok_service.provenance.digest import Digest
from mok_service.provenance.manifest import DataManifest
from mok_service.runs.types import Page, Run
from mok_service.spec import ExecutionSpec, JobSpec, TrainingSpec


@dataclass(frozen=True, slots=True)
class Idempotency:
    """An Idempotency-Key: `route` is method and path ("POST /v1/jobs"), `body` the digest of the request's body."""

    route: str
    key: str
    body: Digest


@dataclass(frozen=True, slots=True)
class Job:
    """What was asked: an immutable, fully resolved training spec, and the execution spec of its first run."""

    id: str
    tenant: str
    training: TrainingSpec           # resolved
    training_digest: Digest
    execution: ExecutionSpec         # resolved
    submitted: Mapping[str, Any]     # the spec as submitted: {"training": ..., "execution": ...}
    manifest: DataManifest | None    # written once, by the first attempt
    created_at: datetime

    def as_dict(self) -> dict[str, Any]: ...
    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Self: ...


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job and its first run. `created` is False when an Idempotency-Key was seen before: both are then as first answered."""

    job: Job
    run: Run
    created: bool


def submit(db: Database, spec: JobSpec, *, tenant: str = "local", idempotency: Idempotency | None = None, machine: Any = None,
           now: datetime | None = None) -> Submitted: ...
def get_job(db: Database, job_id: str, tenant: str = "local") -> Job: ...
def list_jobs(db: Database, tenant: str = "local", cursor: str | None = None, limit: int = 50, name: str | None = None,
              digest: str | None = None) -> Page[Job]: ...
def create_run(db: Database, job_id: str, *, execution: ExecutionSpec | None = None, reproduces: str | None = None,
               tenant: str = "local", idempotency: Idempotency | None = None, machine: Any = None, now: datetime | None = None) -> Run:
    """A reproduction of the job: compared with the run `reproduces`, or with the job's first succeeded, else first ended, run."""

"""What a tenant may have at most: looked up, changed, and enforced at submit. At claims the order of the queue enforces it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Connection

from mok_service.db import queue as sql
from mok_service.db.session import Database
from mok_service.errors import InvalidSpec, QuotaExceeded, QuotaForbids
from mok_service.runs.queue import Limits
from mok_service.runs.standing import limits_of
from mok_service.spec import ExecutionSpec

DAY: Final = timedelta(days=1)
WEIGHT_MAX: Final = 1000.0
COUNT_MAX: Final = 2**31 - 1
BYTES_MAX: Final = 2**63 - 1
TENANT_LENGTH_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class Quota:
    """A tenant's limits, and what it has of each now, under the limits' names."""

    tenant: str
    limits: Limits
    used: Mapping[str, int]

    def as_dict(self) -> dict[str, Any]:
        """The REST shape."""
        return {"tenant": self.tenant, "limits": asdict(self.limits), "used": dict(self.used)}


def get_quota(db: Database, tenant: str = "local", now: datetime | None = None) -> Quota:
    """A tenant's quota; without limits where none was set."""
    at = now if now is not None else db.now()
    with db.read() as tx:
        row = next((row for row in sql.all_quotas(tx) if row["tenant"] == tenant), None)
        runs, devices = sql.active_use(tx, tenant)
        used = {"devices_max": devices, "runs_max": runs, "queued_max": sql.waiting_count(tx, tenant),
                "checkpoint_bytes_max": sql.checkpoint_bytes(tx, tenant), "jobs_a_day_max": sql.jobs_since(tx, tenant, at - DAY)}
    return Quota(tenant, Limits() if row is None else limits_of(row), used)


def set_quota(db: Database, tenant: str, changes: Mapping[str, float | int | None], now: datetime | None = None) -> Quota:
    """Changes a tenant's limits; what isn't named stays, None takes a limit off. Runs that go on are left alone: a limit below
    what the tenant has now keeps further ones waiting. Raises InvalidSpec for a value that isn't allowed."""
    if not (0 < len(tenant) <= TENANT_LENGTH_MAX and tenant.isascii() and tenant.isprintable()):
        raise InvalidSpec(f"tenant: {tenant!r:.80} isn't allowed; allowed: 1 to {TENANT_LENGTH_MAX} printable ASCII characters",
                          field="tenant", value=tenant[:80])
    for name, value in changes.items():
        _check(name, value)
    at = now if now is not None else db.now()
    with db.write() as tx:
        row = sql.lock_quota(tx, tenant)
        limits = replace(Limits() if row is None else limits_of(row), **changes)  # type: ignore[arg-type]
        sql.put_quota(tx, {"tenant": tenant, **asdict(limits), "updated_at": at})
    return get_quota(db, tenant, at)


def _check(name: str, value: float | int | None) -> None:
    assert name in {field.name for field in fields(Limits)}, name
    if name == "weight":
        fine, allowed = value is not None and 0.0 < value <= WEIGHT_MAX, f"more than 0, at most {WEIGHT_MAX:g}"
    else:
        most = BYTES_MAX if name == "checkpoint_bytes_max" else COUNT_MAX
        fine, allowed = value is None or 0 <= value <= most, f"0 to {most}, or none"
    if not fine:
        raise InvalidSpec(f"{name} = {value}: isn't allowed; allowed: {allowed}", field=name, value=value, allowed=allowed)


def refuse_over_quota(tx: Connection, tenant: str, execution: ExecutionSpec, now: datetime, *, new_job: bool) -> None:
    """Raises QuotaForbids for a run that its tenant's quota will never let start, QuotaExceeded for one too many now.

    Counting and inserting are one transaction, which holds the quota's row: two requests at once don't both get the last place.
    """
    row = sql.lock_quota(tx, tenant)
    limits = Limits() if row is None else limits_of(row)
    if limits.devices_max is not None and execution.count > limits.devices_max:
        raise QuotaForbids(f"execution.count: this run asks for {execution.count} devices, and tenant {tenant} may hold "
                           f"{limits.devices_max} at once", limit="devices_max", value=limits.devices_max, wanted=execution.count)
    if limits.runs_max == 0:
        raise QuotaForbids(f"tenant {tenant} may not run anything (runs_max is 0)", limit="runs_max", value=0, used=0)
    if limits.checkpoint_bytes_max is not None:
        stored = sql.checkpoint_bytes(tx, tenant)
        if stored >= limits.checkpoint_bytes_max:
            raise QuotaForbids(f"tenant {tenant} stores {stored:,} of {limits.checkpoint_bytes_max:,} bytes of checkpoints: "
                               "delete some first", limit="checkpoint_bytes_max", value=limits.checkpoint_bytes_max, used=stored)
    if limits.queued_max is not None and (waiting := sql.waiting_count(tx, tenant)) >= limits.queued_max:
        raise QuotaExceeded(f"tenant {tenant} has {waiting} of {limits.queued_max} runs waiting (queued or paused)",
                            limit="queued_max", value=limits.queued_max, used=waiting)
    if new_job and limits.jobs_a_day_max is not None:
        _refuse_too_many_jobs(tx, tenant, limits.jobs_a_day_max, now)


def _refuse_too_many_jobs(tx: Connection, tenant: str, most: int, now: datetime) -> None:
    made = sql.jobs_since(tx, tenant, now - DAY)
    if made < most:
        return
    wait = "" if not made else f"; the next one may come in {sql.next_job_leaves(tx, tenant, now - DAY).total_seconds():.0f} s"
    raise QuotaExceeded(f"tenant {tenant} has submitted {made} of {most} jobs in the last 24 hours{wait}",
                        limit="jobs_a_day_max", value=most, used=made)

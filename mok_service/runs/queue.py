"""Who goes next: the order of the queue and what may pass it, as pure functions over values (docs/queue.md).

One place decides, for every scheduler and for what users are shown. What a run needs, and whether it has room, is the
caller's to say (`Fits`), so that nothing here knows what nodes have, or tables.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from mok_service.placement import Held, Room
from mok_service.spec import ExecutionSpec

AGING_SECONDS: Final = 300.0      # a priority that isn't served for so long counts for one more
HALF_LIFE_SECONDS: Final = 3600.0  # after so long, use counts half
OVERHEAD_SECONDS: Final = 180.0   # starting and stopping, beside a run's own deadline
_USE_SECONDS: Final = HALF_LIFE_SECONDS / math.log(2)  # steady use of one device adds up to one

Fits = Callable[[ExecutionSpec, Sequence[Held]], Room | None]  # where does it have room beside the active ones?


def remembered(fits: Fits) -> Fits:
    """The same judge, asked once for all runs that want the same devices beside the same others."""
    known: dict[tuple[tuple[str, int, int, str | None], ...], Room | None] = {}

    def asked_once(candidate: ExecutionSpec, active: Sequence[Held]) -> Room | None:
        key = tuple((held.execution.device, held.execution.count, held.execution.threads, held.node)
                    for held in (Held(candidate), *active))
        if key not in known:
            known[key] = fits(candidate, active)
        return known[key]

    return asked_once


@dataclass(frozen=True, slots=True)
class Waiting:
    """A queued run."""

    id: str
    tenant: str
    execution: ExecutionSpec
    created_at: datetime
    queued_at: datetime                       # when it came into the queue, the last time
    run_deadline_at: datetime | None = None   # of a run that has been running before
    retry_at: datetime | None = None

    @property
    def devices(self) -> int:
        return self.execution.count

    @property
    def age(self) -> tuple[datetime, str]:
        return self.created_at, self.id

    def ends_before(self, now: datetime, at: datetime) -> bool:
        """Whether its deadline ends it before `at`, whatever happens, if it starts now."""
        longest = timedelta(seconds=self.execution.run_deadline_seconds)
        latest = now + longest if self.run_deadline_at is None else min(self.run_deadline_at, now + longest)
        return latest + timedelta(seconds=OVERHEAD_SECONDS) <= at


@dataclass(frozen=True, slots=True)
class Busy:
    """A run that holds devices."""

    id: str
    tenant: str
    execution: ExecutionSpec
    since: datetime
    expected_end: datetime | None             # None while nothing is known about its pace
    node: str | None = None                   # None: not on record

    @property
    def devices(self) -> int:
        return self.execution.count


@dataclass(frozen=True, slots=True)
class Limits:
    """What a tenant may have at most; None: no limit. `weight` is its share beside the other tenants' weights."""

    weight: float = 1.0
    devices_max: int | None = None            # at once
    runs_max: int | None = None               # at once
    queued_max: int | None = None             # runs that wait: queued or paused
    checkpoint_bytes_max: int | None = None
    jobs_a_day_max: int | None = None         # within the last 24 hours


@dataclass(frozen=True, slots=True)
class Use:
    """Device-seconds that a tenant's ended attempts used, each counted less by its age (`decayed`), as of `at`."""

    used: float
    at: datetime

    def plus(self, devices: int, since: datetime, now: datetime) -> Use:
        """With an attempt that has just ended."""
        return Use(decayed(self.used, self.at, now) + use_of(devices, since, now), max(self.at, now))


@dataclass(frozen=True, slots=True)
class Shares:
    """What decides between tenants and priorities. Tenants without an entry have weight 1, no limits, and used nothing."""

    limits: Mapping[str, Limits] = field(default_factory=dict)
    use: Mapping[str, Use] = field(default_factory=dict)
    turns: Mapping[int, datetime] = field(default_factory=dict)  # by priority: when a run of it last went first
    stored: Mapping[str, int] = field(default_factory=dict)      # checkpoint bytes, of tenants with a limit on them

    def limits_of(self, tenant: str) -> Limits:
        return self.limits.get(tenant, Limits())


def decayed(used: float, at: datetime, now: datetime) -> float:
    return used * math.exp2(-max(0.0, (now - at).total_seconds()) / HALF_LIFE_SECONDS)


def use_of(devices: int, since: datetime, now: datetime) -> float:
    """The decayed device-seconds of an attempt that holds devices since then."""
    return devices * _USE_SECONDS * (1.0 - math.exp2(-max(0.0, (now - since).total_seconds()) / HALF_LIFE_SECONDS))


# ---- The order -------------------------------------------------------------------------------------------------------

def order(queued: Iterable[Waiting], active: Iterable[Busy], shares: Shares, now: datetime) -> list[Waiting]:
    """The queued runs, the one that goes first at the front.

    Higher levels go first: a level is a priority, and one more for every AGING_SECONDS that runs of it waited since one of
    them last went first; so a stream of urgent runs holds up the others, but not for ever. Within a level the tenant goes
    first that uses the least for its weight: devices now, and recent use. Each place taken counts as use for the next one.
    A tenant's own runs go by priority, then age.
    """
    levels = _levels(queued, shares, now)
    load = _loads(active, shares, now)
    result: list[Waiting] = []
    for _, runs in sorted(levels.items(), reverse=True):
        by_tenant: dict[str, list[Waiting]] = {}
        for run in sorted(runs, key=lambda run: (-run.execution.priority, run.age), reverse=True):
            by_tenant.setdefault(run.tenant, []).append(run)  # the first one is at the end
        heap = [(load.get(tenant, 0.0), of[-1].age, tenant) for tenant, of in by_tenant.items()]
        heapq.heapify(heap)
        while heap:
            used, _, tenant = heapq.heappop(heap)
            run = by_tenant[tenant].pop()
            result.append(run)
            load[tenant] = used + run.devices / shares.limits_of(tenant).weight
            if by_tenant[tenant]:
                heapq.heappush(heap, (load[tenant], by_tenant[tenant][-1].age, tenant))
    return result


def _levels(queued: Iterable[Waiting], shares: Shares, now: datetime) -> dict[int, list[Waiting]]:
    by_priority: dict[int, list[Waiting]] = {}
    for run in queued:
        by_priority.setdefault(run.execution.priority, []).append(run)
    levels: dict[int, list[Waiting]] = {}
    for priority, runs in by_priority.items():
        since = min(run.queued_at for run in runs)
        turn = shares.turns.get(priority)
        waited = (now - (since if turn is None else max(since, turn))).total_seconds()
        levels.setdefault(priority + int(max(0.0, waited) // AGING_SECONDS), []).extend(runs)
    return levels


def _loads(active: Iterable[Busy], shares: Shares, now: datetime) -> dict[str, float]:
    """What each tenant uses for its weight, in devices: those it holds, and what it used lately."""
    load = {tenant: decayed(use.used, use.at, now) / _USE_SECONDS for tenant, use in shares.use.items()}
    for run in active:
        load[run.tenant] = load.get(run.tenant, 0.0) + run.devices + use_of(run.devices, run.since, now) / _USE_SECONDS
    return {tenant: devices / shares.limits_of(tenant).weight for tenant, devices in load.items()}


# ---- The choice ------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class Choice:
    """The run to start, and where. `passed`: the one before it that must wait longer for its room, and loses nothing by this."""

    run: Waiting
    passed: Waiting | None
    node: str | None = None


@dataclass(frozen=True, slots=True)
class Reservation:
    """When a waiting run is expected to find room, and who is expected to be active beside it then."""

    run: Waiting
    at: datetime | None                       # None: it depends on a run of unknown length
    beside: tuple[Busy, ...]


def choose(ordered: Sequence[Waiting], active: Sequence[Busy], fits: Fits, shares: Shares, now: datetime) -> Choice | None:
    """The first run that may start now; None when none may.

    A tenant at its quota is passed over, and so is what doesn't fit on the whole cluster: neither waits for devices. For the
    first run that waits for devices they are kept: another passes it only if its deadline ends it before they are
    expected to be free, or if both fit then.
    """
    kept: Reservation | None = None
    for run in ordered:
        if over_quota(run, active, shares) is not None:
            continue
        room = room_for(run, active, fits)
        if room is None:
            if kept is None and room_for(run, (), fits):
                kept = reserve(run, active, fits)
        elif kept is None:
            return Choice(run, None, room.node)
        elif not could_delay(run, room, kept, fits, shares, now):
            return Choice(run, kept.run, room.node)
    return None


def reserve(run: Waiting, active: Sequence[Busy], fits: Fits) -> Reservation:
    """When it finds room, by when the active runs are expected to end."""
    left = sorted(active, key=lambda busy: (busy.expected_end is None, busy.expected_end or busy.since, busy.id))
    at: datetime | None = None
    while left and not room_for(run, left, fits):
        at = left.pop(0).expected_end
    return Reservation(run, at, tuple(left))


def could_delay(run: Waiting, room: Room, kept: Reservation, fits: Fits, shares: Shares, now: datetime) -> bool:
    """Whether a run, started now where it has room, could keep another from its devices or its quota when its time comes."""
    if kept.at is not None and run.ends_before(now, kept.at):
        return False
    beside = (*kept.beside, Busy(run.id, run.tenant, run.execution, now, None, room.node))
    return not room_for(kept.run, beside, fits) or over_quota(kept.run, beside, shares) is not None


def room_for(run: Waiting, active: Sequence[Busy], fits: Fits) -> Room | None:
    return fits(run.execution, [Held(busy.execution, busy.node) for busy in active])


def over_quota(run: Waiting, active: Sequence[Busy], shares: Shares) -> str | None:
    """Which quota of its tenant keeps a run waiting, as a sentence; None if none does."""
    limits = shares.limits.get(run.tenant)
    if limits is None:
        return None
    own = [busy for busy in active if busy.tenant == run.tenant]
    devices = sum(busy.devices for busy in own)
    stored = shares.stored.get(run.tenant, 0)
    if limits.runs_max is not None and len(own) + 1 > limits.runs_max:
        return f"tenant {run.tenant} has {len(own)} of {limits.runs_max} runs"
    if limits.devices_max is not None and devices + run.devices > limits.devices_max:
        return f"tenant {run.tenant} holds {devices} of {limits.devices_max} devices, and this run wants {run.devices}"
    if limits.checkpoint_bytes_max is not None and stored >= limits.checkpoint_bytes_max:
        return f"tenant {run.tenant} stores {stored:,} of {limits.checkpoint_bytes_max:,} bytes of checkpoints"
    return None

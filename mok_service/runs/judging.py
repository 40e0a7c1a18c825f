"""A verdict by the service itself on what it stores: level check."""

from __future__ import annotations

from datetime import datetime

from mok_service.db.session import Database
from mok_service.provenance.measure import Read, measure
from mok_service.provenance.verify import check
from mok_service.runs.locked import locked
from mok_service.runs.reading import get_verification, provenance
from mok_service.runs.types import Verification


def judge(db: Database, run_id: str, read: Read, tenant: str = "local", now: datetime | None = None) -> Verification:
    """Checks a run's record and, through `read`, the bytes of its checkpoints, and stores the verdict.

    Bytes are read before the transaction. Raises NotFound when there is no such run.
    """
    record = provenance(db, run_id, tenant)
    finding = check(record, measure(record, read))
    with locked(db, run_id, tenant) as run:
        stored = run.add_verification(now if now is not None else db.now(), level="check", **finding.as_dict())
    return get_verification(db, stored, tenant)

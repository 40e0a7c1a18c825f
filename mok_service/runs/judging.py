"""A verdict by the service itself on what it stores: level check."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from mok_service.db.session import Database
from mok_service.errors import InvalidSpec, NotFound, Tampered
from mok_service.provenance.attested import Evidence, check_attestation, worst
from mok_service.provenance.keys import public_keys_of
from mok_service.provenance.measure import Read, measure
from mok_service.provenance.tree import open_head
from mok_service.provenance.verify import Finding, check
from mok_service.runs.attesting import get_attestation, log_head, log_proof, signing_keys
from mok_service.runs.locked import locked
from mok_service.runs.reading import get_verification, provenance
from mok_service.runs.types import Verification


def judge(db: Database, run_id: str, read: Read, tenant: str = "local", now: datetime | None = None) -> Verification:
    """Checks a run's record, through `read` the bytes of its checkpoints, and its attestation, and stores the verdict.

    Bytes are read before the transaction. Raises NotFound when there is no such run.
    """
    record = provenance(db, run_id, tenant)
    finding = worst([check(record, measure(record, read)), *_attested(db, run_id, record, tenant)])
    with locked(db, run_id, tenant) as run:
        stored = run.add_verification(now if now is not None else db.now(), level="check", **finding.as_dict())
    return get_verification(db, stored, tenant)


def _attested(db: Database, run_id: str, record: Mapping[str, Any], tenant: str) -> list[Finding]:
    """The verdict on the run's attestation by the keys that have signed here; none when there is no attestation yet."""
    try:
        attestation, head = get_attestation(db, run_id, tenant), log_head(db)
    except NotFound:
        return []
    trusted = public_keys_of("".join(key["pem"] for key in signing_keys(db)), "the service's list of keys")
    try:
        size = open_head(head, trusted).size
        proof = log_proof(db, size, index=attestation.log_index)
    except (Tampered, InvalidSpec) as fault:
        return [Finding("TAMPERED", f"the log can't prove the attestation: {fault.message}", "log.proof")]
    return [check_attestation(record, Evidence.of(attestation.as_dict(), head, size, proof), trusted)]

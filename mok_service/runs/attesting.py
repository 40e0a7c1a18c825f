"""Attesting runs that have ended, and the append-only log of all attestations.

The key is held by the scheduler's process alone. Every entry is stored with the signed head of the log that it completes, so
who serves the log needs no key.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from mok_service.db import queries, tables
from mok_service.db.session import Database
from mok_service.errors import InvalidSpec, NotFound
from mok_service.provenance import merkle, tree
from mok_service.provenance.attest import envelope_digest, sign, statement
from mok_service.provenance.digest import Digest
from mok_service.provenance.keys import SigningKey
from mok_service.runs import rows
from mok_service.runs.reading import get_run, provenance
from mok_service.runs.types import time_text

LOG_SIZE_MAX: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Attestation:
    """What was signed about a run that has ended, and where the log has it."""

    run_id: str
    envelope: dict[str, Any]
    digest: Digest
    key_id: str
    log_index: int
    at: datetime

    def as_dict(self) -> dict[str, Any]:
        return {"run": self.run_id, "envelope": self.envelope, "digest": str(self.digest), "key": self.key_id,
                "log_index": self.log_index, "at": time_text(self.at)}


@dataclass(frozen=True, slots=True)
class LogEntry:
    """An entry of the log: the digest of an attestation's envelope."""

    index: int
    entry: Digest
    run_id: str | None
    key_id: str | None
    at: datetime

    def as_dict(self) -> dict[str, Any]:
        return {"index": self.index, "entry": str(self.entry), "run": self.run_id, "key": self.key_id, "at": time_text(self.at)}


def unattested(db: Database, limit: int = 100) -> list[tuple[str, str]]:
    """Id and tenant of runs that have ended and aren't attested; the first that ended comes first."""
    with db.read() as tx:
        return [(row["id"], row["tenant"]) for row in queries.unattested_runs(tx, limit)]


def attest(db: Database, key: SigningKey, run_id: str, tenant: str = "local", now: datetime | None = None) -> Attestation:
    """The attestation of a run that has ended; signed now and appended to the log if there is none yet.

    What is signed is read before the transaction: the record of a run that has ended doesn't change.
    """
    assert get_run(db, run_id, tenant).ended, f"{run_id} hasn't ended"
    envelope = sign(statement(provenance(db, run_id, tenant)), key)
    digest, at = envelope_digest(envelope), now if now is not None else db.now()
    with db.write() as tx:
        last = queries.lock_log(tx)
        if queries.attestation_of(tx, run_id) is None:  # nobody was faster
            index, frontier = (0, []) if last is None else (last["log_index"] + 1, last["frontier"])
            roots = merkle.grown([bytes.fromhex(h) for h in frontier], index, tree.leaf(digest))
            head = tree.sign_head(index + 1, merkle.frontier_root(roots), str(time_text(at)), key)
            queries.insert_unless_there(tx, tables.signing_keys, {"id": key.public.id, "pem": key.public.pem, "created_at": at})
            queries.add(tx, tables.log_entries, [{
                "log_index": index, "entry": digest, "frontier": [root.hex() for root in roots], "head": head, "created_at": at,
            }])
            queries.add(tx, tables.attestations, [{
                "run_id": run_id, "tenant": tenant, "envelope": envelope, "key_id": key.public.id, "digest": digest,
                "log_index": index, "created_at": at,
            }])
            queries.update_run(tx, run_id, {"log_index": index})
    return get_attestation(db, run_id, tenant)


def get_attestation(db: Database, run_id: str, tenant: str = "local") -> Attestation:
    """Raises NotFound for a run that there isn't, or that isn't attested: not ended, or only just."""
    get_run(db, run_id, tenant)
    with db.read() as tx:
        row = queries.attestation_of(tx, run_id)
    if row is None:
        raise NotFound(f"{run_id} has no attestation; it gets one soon after it has ended", run=run_id)
    same = ("run_id", "envelope", "digest", "key_id", "log_index")
    return Attestation(at=row["created_at"], **{name: row[name] for name in same})


# ---- The log ---------------------------------------------------------------------------------------------------------

def log_head(db: Database) -> dict[str, Any]:
    """The signed head of the log: a DSSE envelope. Raises NotFound while the log is empty."""
    with db.read() as tx:
        last = queries.last_log_entry(tx)
    if last is None:
        raise NotFound("the log is empty: no run has ended yet")
    head: dict[str, Any] = last["head"]
    return head


def log_entries(db: Database, after: int = -1, limit: int = 1000) -> list[LogEntry]:
    """Entries after index `after`, in order; -1 begins with the first."""
    with db.read() as tx:
        found = queries.log_entries_after(tx, max(-1, min(after, LOG_SIZE_MAX)), rows.check_limit(limit))
    return [LogEntry(row["log_index"], row["entry"], row["run_id"], row["key_id"], row["created_at"]) for row in found]


def log_proof(db: Database, size: int, *, index: int | None = None, old_size: int | None = None) -> list[str]:
    """Hashes that prove, under the head of `size` entries, that entry `index` is in the log (inclusion), or that the log of
    `old_size` entries is its beginning (consistency). Raises InvalidSpec unless exactly one of the two is given, in range."""
    if (index is None) == (old_size is None):
        raise InvalidSpec("a proof is of index or of old_size; allowed: exactly one of them", field="index")
    with db.read() as tx:
        last = queries.last_log_entry(tx)
        have = 0 if last is None else last["log_index"] + 1
        if size > have:
            raise InvalidSpec(f"size: {size} is more than the log has; allowed: 0 to {have}", field="size", value=size)
        leaves = [tree.leaf(entry) for entry in queries.log_digests(tx, size)]
    try:
        proof = (merkle.inclusion_proof(index, leaves) if index is not None
                 else merkle.consistency_proof(old_size or 0, leaves))
    except ValueError as error:
        raise InvalidSpec(str(error), field="index" if index is not None else "old_size") from None
    return [node.hex() for node in proof]


def signing_keys(db: Database) -> list[dict[str, Any]]:
    """The public keys that have signed here, the oldest first: id, PEM, and the time of the first signature."""
    with db.read() as tx:
        return [{"id": row["id"], "pem": row["pem"], "at": time_text(row["created_at"])} for row in queries.public_keys(tx)]

"""Attesting runs and verdicts that have ended, and the append-only log of all attestations.

The key is held by the scheduler's process alone. Every entry is stored with the signed head of the log that it completes, so
who serves the log needs no key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection

from mok_service.db import queries, tables
from mok_service.db.session import Database
from mok_service.errors import InvalidSpec, NotFound, Tampered
from mok_service.lifecycle import UNCHAINED
from mok_service.provenance import merkle, tree
from mok_service.provenance.attest import envelope_digest, sign, statement
from mok_service.provenance.digest import Digest
from mok_service.provenance.keys import SigningKey
from mok_service.provenance.verdict import verdict_statement
from mok_service.runs import rows
from mok_service.runs.reading import get_run, get_verification, provenance
from mok_service.runs.types import time_text

LOG_SIZE_MAX: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Attestation:
    """What was signed about a run that has ended, or the verdict of an audit or rerun of it, and where the log has it."""

    run_id: str
    verification_id: str | None
    envelope: dict[str, Any]
    digest: Digest
    key_id: str
    log_index: int
    at: datetime

    def as_dict(self) -> dict[str, Any]:
        return {"run": self.run_id, "verification": self.verification_id, "envelope": self.envelope, "digest": str(self.digest),
                "key": self.key_id, "log_index": self.log_index, "at": time_text(self.at)}


@dataclass(frozen=True, slots=True)
class LogEntry:
    """An entry of the log: the digest of an attestation's envelope."""

    index: int
    entry: Digest
    run_id: str | None
    verification_id: str | None
    key_id: str | None
    at: datetime

    def as_dict(self) -> dict[str, Any]:
        return {"index": self.index, "entry": str(self.entry), "run": self.run_id, "verification": self.verification_id,
                "key": self.key_id, "at": time_text(self.at)}


def unattested(db: Database, limit: int = 100) -> list[tuple[str, str]]:
    """Id and tenant of runs that have ended and aren't attested, then of verdicts; the first that ended comes first."""
    with db.read() as tx:
        found = [*queries.unattested_runs(tx, limit), *queries.unattested_verifications(tx, limit)]
    return [(row["id"], row["tenant"]) for row in found[:limit]]


def attest(db: Database, key: SigningKey, ended: str, tenant: str = "local", now: datetime | None = None) -> Attestation:
    """The attestation of a run that has ended, or of a verification with a verdict, by its id; signed now and appended to the log
    if there is none yet.

    What is signed is read before the transaction: neither the record of a run that has ended nor a verdict changes.
    """
    if ended.startswith("ver_"):
        return _attest_verdict(db, key, ended, tenant, now if now is not None else db.now())
    assert get_run(db, ended, tenant).ended, f"{ended} hasn't ended"
    envelope = sign(statement(provenance(db, ended, tenant)), key)
    digest, at = envelope_digest(envelope), now if now is not None else db.now()
    with db.write() as tx:
        last = queries.lock_log(tx)
        if queries.attestation_of(tx, ended) is None:  # nobody was faster
            index = _append(tx, last, digest, key, at)
            queries.add(tx, tables.attestations, [{"run_id": ended, **_row(tenant, envelope, digest, key, index, at)}])
            queries.update_run(tx, ended, {"log_index": index})
    return get_attestation(db, ended, tenant)


def _attest_verdict(db: Database, key: SigningKey, verification_id: str, tenant: str, at: datetime) -> Attestation:
    verification = get_verification(db, verification_id, tenant)
    envelope = sign(verdict_statement(provenance(db, verification.run_id, tenant), verification.as_dict()), key)
    digest = envelope_digest(envelope)
    with db.write() as tx:
        last = queries.lock_log(tx)
        if queries.attestation_of_verification(tx, verification_id) is None:
            index = _append(tx, last, digest, key, at)
            row = {"verification_id": verification_id, **_row(tenant, envelope, digest, key, index, at)}
            queries.add(tx, tables.verification_attestations, [row])
            queries.update_verification(tx, verification_id, {"log_index": index})
    return get_verdict_attestation(db, verification_id, tenant)


def _append(tx: Connection, last: Mapping[str, Any] | None, digest: Digest, key: SigningKey, at: datetime) -> int:
    """Appends an entry to the log, with the head that it makes; its index."""
    index, frontier = (0, []) if last is None else (last["log_index"] + 1, last["frontier"])
    roots = merkle.grown([bytes.fromhex(h) for h in frontier], index, tree.leaf(digest))
    head = tree.sign_head(index + 1, merkle.frontier_root(roots), str(time_text(at)), key)
    queries.insert_unless_there(tx, tables.signing_keys, {"id": key.public.id, "pem": key.public.pem, "created_at": at})
    queries.add(tx, tables.log_entries, [{
        "log_index": index, "entry": digest, "frontier": [root.hex() for root in roots], "head": head, "created_at": at,
    }])
    return index


def _row(tenant: str, envelope: Mapping[str, Any], digest: Digest, key: SigningKey, index: int, at: datetime) -> dict[str, Any]:
    return {"tenant": tenant, "envelope": envelope, "key_id": key.public.id, "digest": digest, "log_index": index,
            "created_at": at}


def get_attestation(db: Database, run_id: str, tenant: str = "local") -> Attestation:
    """Raises NotFound for a run that there isn't, or that isn't attested: not ended, or only just, or an audit or a bisect."""
    run = get_run(db, run_id, tenant)
    with db.read() as tx:
        row = queries.attestation_of(tx, run_id)
    if row is None:
        why = (f"it carries out a verification ({run.kind}): its verdict is attested" if run.kind in UNCHAINED
               else "it gets one soon after it has ended")
        raise NotFound(f"{run_id} has no attestation; {why}", run=run_id)
    return _attestation(run_id, None, row)


def get_verdict_attestation(db: Database, verification_id: str, tenant: str = "local") -> Attestation:
    """Raises NotFound for a verification that there isn't, or that isn't attested: a check, or not ended, or only just."""
    verification = get_verification(db, verification_id, tenant)
    with db.read() as tx:
        row = queries.attestation_of_verification(tx, verification_id)
    if row is None:
        raise NotFound(f"{verification_id} has no attestation; an audit, a rerun or a bisect gets one soon after its verdict",
                       verification=verification_id)
    return _attestation(verification.run_id, verification_id, row)


def _attestation(run_id: str, verification_id: str | None, row: Mapping[str, Any]) -> Attestation:
    same = ("envelope", "digest", "key_id", "log_index")
    return Attestation(run_id, verification_id, at=row["created_at"], **{name: row[name] for name in same})


# ---- The log ---------------------------------------------------------------------------------------------------------

def log_head(db: Database) -> dict[str, Any]:
    """The signed head of the log: a DSSE envelope. Raises NotFound while the log is empty."""
    with db.read() as tx:
        last = queries.last_log_entry(tx)
    if last is None:
        raise NotFound("the log is empty: no run has ended yet")
    head: dict[str, Any] = last["head"]
    return head


def log_entries(db: Database, after: int = -1, limit: int = 1000, tenant: str | None = None) -> list[LogEntry]:
    """Entries after index `after`, in order; -1 begins with the first. For a tenant, what is attested is shown of its own only:
    the entries of others are hashes."""
    with db.read() as tx:
        found = queries.log_entries_after(tx, max(-1, min(after, LOG_SIZE_MAX)), rows.check_limit(limit))
    for row in found:
        if tenant is not None and row["tenant"] != tenant:
            row |= {"run_id": None, "verification_id": None}
    return [LogEntry(row["log_index"], row["entry"], row["run_id"], row["verification_id"], row["key_id"], row["created_at"])
            for row in found]


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
        try:
            path = merkle.inclusion_path(index, size) if index is not None else merkle.consistency_path(old_size or 0, size)
        except ValueError as error:
            raise InvalidSpec(str(error), field="index" if index is not None else "old_size") from None
        return [node.hex() for node in _roots(tx, path)]


def _roots(tx: Connection, path: Sequence[range]) -> list[bytes]:
    """The root over each range of entries. A full subtree's is made of its last entry and the frontier stored with the one before
    that, so the number of rows read grows with the logarithm of the log's size."""
    parts = [merkle.full_subtrees(entries) for entries in path]
    ends = [subtree.stop - 1 for subtrees in parts for subtree in subtrees]
    found = queries.log_entries_at(tx, [*ends, *(end - 1 for end in ends)])

    def root(subtree: range) -> bytes:
        end = subtree.stop - 1
        if end not in found or (len(subtree) > 1 and end - 1 not in found):
            raise Tampered(f"entry {end} of the log, or the one before it, is missing", field="log.entries")
        frontier = [bytes.fromhex(node) for node in found[end - 1]["frontier"]] if len(subtree) > 1 else []
        return merkle.last_subtree(tree.leaf(found[end]["entry"]), frontier, len(subtree))

    return [merkle.frontier_root([root(subtree) for subtree in subtrees]) for subtrees in parts]


def signing_keys(db: Database) -> list[dict[str, Any]]:
    """The public keys that have signed here, the oldest first: id, PEM, and the time of the first signature."""
    with db.read() as tx:
        return [{"id": row["id"], "pem": row["pem"], "at": time_text(row["created_at"])} for row in queries.public_keys(tx)]

"""The check of a whole database against its own rules: `mok db check`. It changes nothing, and may run beside the service.

It reads records and the sizes of files; the bytes of checkpoints are `mok verify`'s business, run by run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection

from mok_service import auditlog
from mok_service.db import checks
from mok_service.db.session import Database, check_schema
from mok_service.errors import Tampered
from mok_service.provenance import merkle, tree
from mok_service.provenance.chain import check_links, genesis
from mok_service.provenance.digest import Digest
from mok_service.provenance.keys import PublicKey, public_keys_of
from mok_service.runs.rows import Row, record_of

FAULTS_MAX: Final = 1000  # a database with more of them isn't worth a longer list


@dataclass(frozen=True, slots=True)
class Fault:
    """A rule that doesn't hold: what of, and a sentence."""

    of: str
    message: str

    def as_dict(self) -> dict[str, str]:
        return {"of": self.of, "message": self.message}


@dataclass
class Inspection:
    """What was looked at, and what was wrong with it."""

    runs: int = 0
    step_records: int = 0
    checkpoints: int = 0
    log_entries: int = 0
    audit_logs: int = 0
    faults: list[Fault] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("runs", "step_records", "checkpoints", "log_entries", "audit_logs")}
        return {**counts, "faults": [fault.as_dict() for fault in self.faults]}


def inspect(db: Database, checkpoints: Callable[[str], Path]) -> Inspection:
    """Checks everything that the database says about itself, on one snapshot. `checkpoints` gives a run's checkpoint folder.

    1. The file, and what rows say of other rows (SQLite; PostgreSQL holds the latter by itself).
    2. Each run's events are numbered from 1 without gaps.
    3. Each run's step records link from the job's genesis to the run's head.
    4. The log is the tree that its signed heads name, entry by entry, and each entry is an attestation's digest.
    5. Each tenant's audit log links.
    6. The files of checkpoints are there, with their sizes.

    Raises SchemaMismatch for another version's database.
    """
    check_schema(db)
    seen = Inspection()
    with db.read() as tx:
        for fault in _faults(tx, db, seen, checkpoints):
            seen.faults.append(fault)
            if len(seen.faults) == FAULTS_MAX:
                seen.faults.append(Fault("database", f"there are more than these {FAULTS_MAX} faults"))
                break
    return seen


def _faults(tx: Connection, db: Database, seen: Inspection, checkpoints: Callable[[str], Path]) -> Iterator[Fault]:
    if db.dialect == "sqlite":
        yield from (Fault("database", message) for message in checks.sqlite_faults(tx))
    for row in checks.counted_events(tx):
        yield Fault(row["id"], f"its events should be numbered 1 to {row['event_count']}: there are {row['found'] or 0}, from "
                               f"{row['first']} to {row['last']}")
    yield from (Fault(row["id"], "it names a last step and has no step record") for row in checks.runs_without_records(tx))
    for run_id, records in groupby(checks.chained_records(tx), key=lambda row: str(row["run_id"])):
        seen.runs += 1
        yield from _chain(run_id, checks.chain_facts(tx, run_id), records, seen)
    yield from _log(tx, seen)
    for tenant in auditlog.tenants(db):
        seen.audit_logs += 1
        found = auditlog.verify(db, tenant)
        if found.verdict != "INTACT":
            yield Fault(f"audit log of {tenant}", found.message)
    for row in checks.kept_checkpoints(tx):
        seen.checkpoints += 1
        yield from _files(row, checkpoints(row["run_id"]))


def _chain(run_id: str, facts: Row, rows: Iterable[Row], seen: Inspection) -> Iterator[Fault]:
    previous: Digest | None = None
    step = -1
    for row in rows:
        seen.step_records += 1
        record = record_of(row)
        if previous is None:
            if record.state is None or facts["manifest_digest"] is None:
                yield Fault(run_id, "step record 0 has no initial state, or its job no data manifest")
                return
            arithmetic = facts["training"]["arithmetic"]
            previous = genesis(facts["training_digest"], facts["manifest_digest"], arithmetic, record.state.weights)
        try:
            previous = check_links([record], previous, step + 1)
        except Tampered as error:
            yield Fault(run_id, error.message)
            return
        if row["head"] != previous:
            yield Fault(run_id, f"step record {record.step} hashes to {previous}, but it is stored as {row['head']}")
            return
        step = record.step
    if (facts["step"], facts["head"]) != (step, previous):
        yield Fault(run_id, f"its chain ends with step {step} and head {previous}; the run says step {facts['step']} and head "
                            f"{facts['head']}")


def _log(tx: Connection, seen: Inspection) -> Iterator[Fault]:
    known: dict[str, PublicKey] = {}
    for pem in checks.public_pems(tx):
        known |= public_keys_of(pem, "a stored public key")
    frontier: list[bytes] = []
    for index, row in enumerate(checks.whole_log(tx)):
        seen.log_entries += 1
        if row["log_index"] != index:
            yield Fault("log", f"entry {index} is missing")
            return
        if row["attested"] != row["entry"]:
            yield Fault("log", f"entry {index} is {row['entry']}, and its attestation has {row['attested']}")
        frontier = merkle.grown(frontier, index, tree.leaf(row["entry"]))
        try:
            head = tree.open_head(row["head"], known)
        except Tampered as error:
            yield Fault("log", f"entry {index}: {error.message}")
            return
        stored = [bytes.fromhex(node) for node in row["frontier"]]
        if head.signer is None:
            yield Fault("log", f"the head of entry {index} is signed by an unknown key")
        if (head.size, head.root, stored) != (index + 1, merkle.frontier_root(frontier), frontier):
            yield Fault("log", f"the entries up to {index} don't make the tree whose head was signed with it")
            return


def _files(row: Row, folder: Path) -> Iterator[Fault]:
    for file in row["files"]:
        path, have = folder / row["folder"] / file["name"], None
        with suppress(OSError):
            have = path.stat().st_size
        if have != file["size"]:
            found = "isn't there" if have is None else f"has {have} bytes"
            yield Fault(row["run_id"], f"checkpoint of step {row['step']}: {path} {found}; on record are {file['size']} bytes")

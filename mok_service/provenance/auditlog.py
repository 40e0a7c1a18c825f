"""The audit log's chain: what an entry's digest is of, and the check of a whole log. Pure functions over values.

Every tenant has a log of its own, so that its admins can check all of it. An entry holds the digest of the one before it;
the head holds the length and the last digest, so that entries missing at the end are noticed too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from mok_service.provenance.digest import Digest, canonical_digest
from mok_service.provenance.verify import Finding

FIELDS: Final = ("tenant", "number", "at", "actor", "role", "address", "action", "ids", "body", "outcome", "request", "previous")


def genesis(tenant: str) -> Digest:
    """What stands as `previous` in a tenant's first entry."""
    return canonical_digest({"type": "mok.audit-log/v1", "tenant": tenant})


def entry_digest(entry: Mapping[str, Any]) -> Digest:
    """The digest of an entry, as REST shows it: of all its fields but the digest itself."""
    values = {name: entry[name] for name in FIELDS}
    return canonical_digest({"type": "mok.audit-entry/v1", **values, "number": str(values["number"])})


def check_audit_log(tenant: str, head: Mapping[str, Any], entries: Sequence[Mapping[str, Any]],
                    seen: Mapping[str, Any] | None = None) -> Finding:
    """Whether a tenant's entries are all there, in order and unchanged; `seen` is a head that was good before.

    Numbers, links and digests of every entry; the head; and that the log seen before is its beginning.
    """
    previous = str(genesis(tenant))
    for number, entry in enumerate(entries):
        if (entry["tenant"], entry["number"]) != (tenant, number):
            return _tampered(f"where entry {number} of {tenant} should be, there is entry {entry['number']}", "number", number,
                             number, entry["number"])
        if entry["previous"] != previous:
            return _tampered(f"entry {number} doesn't follow the one before it", "previous", number, previous, entry["previous"])
        digest = str(entry_digest(entry))
        if entry["digest"] != digest:
            return _tampered(f"entry {number} isn't what was written: its digest is another", "digest", number, entry["digest"],
                             digest)
        previous = digest
        if seen is not None and seen["length"] == number + 1 and seen["digest"] != digest:
            return _tampered(f"entry {number} isn't the one that was seen here before", "digest", number, seen["digest"], digest)
    if (head["length"], head["digest"]) != (len(entries), previous):
        return _tampered(f"the log has {len(entries)} entries, and its head says {head['length']}", "length", None,
                         head["length"], len(entries))
    if seen is not None and seen["length"] > len(entries):
        return _tampered(f"the log has {len(entries)} entries, and had {seen['length']} when it was seen last", "length", None,
                         seen["length"], len(entries))
    return Finding("INTACT", f"{len(entries)} entries of {tenant}, unchanged and in order")


def _tampered(message: str, field: str, number: int | None, expected: Any, got: Any) -> Finding:
    return Finding("TAMPERED", f"the audit log: {message}", f"audit.{field}", number, str(expected), str(got))

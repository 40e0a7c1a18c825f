"""The log of attestations as documents: entries, and signed tree heads. No I/O.

An entry is the 32 bytes of an attestation's digest (`attest.envelope_digest`). A head is a DSSE envelope over the tree's size
and root; `merkle` has the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mok_service.errors import Tampered
from mok_service.provenance import merkle
from mok_service.provenance.attest import open_envelope, sign
from mok_service.provenance.digest import Digest
from mok_service.provenance.keys import PublicKey, SigningKey

HEAD_TYPE: Final = "mok.tree-head/v1"
HEAD_PAYLOAD_TYPE: Final = "application/vnd.mok-service.tree-head+json"


@dataclass(frozen=True, slots=True)
class Head:
    """What a signed tree head says, and the trusted key that signed it (None: no known key did)."""

    size: int
    root: bytes
    at: str
    signer: PublicKey | None


def leaf(entry: Digest) -> bytes:
    """The leaf hash of an entry."""
    return merkle.leaf_hash(bytes.fromhex(entry.hex))


def sign_head(size: int, root: bytes, at: str, key: SigningKey) -> dict[str, Any]:
    """The envelope of a tree head. `at` is a time as text."""
    document = {"type": HEAD_TYPE, "size": size, "root": root.hex(), "at": at}
    return sign(document, key, HEAD_PAYLOAD_TYPE)


def open_head(envelope: Mapping[str, Any], trusted: Mapping[str, PublicKey]) -> Head:
    """Check a head's signature against trusted keys. Raises Tampered for a malformed or wrongly signed one."""
    try:
        opened = open_envelope(envelope, trusted, HEAD_PAYLOAD_TYPE)
    except Tampered as error:
        raise Tampered(f"the log's head: {error.message}", **{**error.detail, "field": "log.head"}) from None
    document = opened.document
    try:
        if document.keys() != {"type", "size", "root", "at"} or document["type"] != HEAD_TYPE:
            raise ValueError(f"not a {HEAD_TYPE}")
        size, root = int(document["size"]), bytes.fromhex(document["root"])
        if size < 1 or len(root) != 32:
            raise ValueError(f"size {size}, root of {len(root)} bytes")
    except (TypeError, ValueError) as error:
        raise Tampered(f"the log's head isn't well-formed: {error}", field="log.head") from None
    return Head(size, root, str(document["at"]), opened.signer)

"""Attestations: what a run's record claims, as an in-toto Statement in a signed DSSE envelope. No I/O.

Statement: https://in-toto.io/Statement/v1, predicate https://slsa.dev/provenance/v1 with build type BUILD_TYPE, which
docs/provenance.md documents. Subjects: the record, the chain head, the final state, every checkpoint file. Envelope:
DSSE v1 (https://github.com/secure-systems-lab/dsse), Ed25519 over the pre-authentication encoding of the payload.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from mok_service.errors import Tampered
from mok_service.provenance.canonical import canonical_bytes
from mok_service.provenance.digest import Digest, sha256
from mok_service.provenance.keys import PublicKey, SigningKey
from mok_service.provenance.record import document_digest

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "https://slsa.dev/provenance/v1"
PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
BUILD_TYPE: Final = "urn:mok-service:training-run:v1"
BUILDER: Final = "urn:mok-service:scheduler"


def record_digest(record: Mapping[str, Any]) -> Digest:
    """The digest of a record without what may still be added to it (verifications, deletions, the attestation itself)."""
    fixed = {key: value for key, value in record.items() if key not in ("verifications", "attestation", "log")}
    fixed["checkpoints"] = [
        {key: value for key, value in checkpoint.items() if key != "deleted_at"} for checkpoint in record["checkpoints"]
    ]
    return document_digest("mok.attested-record/v1", fixed)


def statement(record: Mapping[str, Any]) -> dict[str, Any]:
    """The in-toto Statement of a run that has ended, from its record."""
    identity, spec, chain = record["identity"], record["spec"], record["chain"]
    subjects = [subject("record", str(record_digest(record)))]
    if chain["head"] is not None:
        subjects.append(subject("chain-head", chain["head"]))
    if record["final"] is not None:
        subjects.append(subject("final-weights", record["final"]["weights"]))
        subjects.append(subject("final-optimizer", record["final"]["optimizer"]))
    for checkpoint in record["checkpoints"]:
        for file in checkpoint["files"]:
            subjects.append(subject(f"checkpoints/{checkpoint['folder']}/{file['name']}", f"sha256:{file['sha256']}"))
    code = record["code"] or {}
    return {
        "_type": STATEMENT_TYPE,
        "subject": subjects,
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"training": spec["training_document"], "training_digest": spec["training_digest"]},
                "internalParameters": {
                    "execution_digest": spec["execution_digest"],
                    "arithmetic": record["arithmetic"]["name"],
                    "kind": identity["kind"],
                    "reproduces": identity["reproduces"],
                },
                "resolvedDependencies": _dependencies(record, code),
            },
            "runDetails": {
                "builder": {"id": BUILDER, "version": {"mok-service": str(code.get("version"))}},
                "metadata": {
                    "invocationId": identity["run"],
                    "startedOn": identity["created_at"],
                    "finishedOn": identity["ended_at"],
                },
                "byproducts": [{"name": "status", "annotations": {"status": identity["status"], "steps": chain["length"]}}],
            },
        },
    }


def subject(name: str, digest: str) -> dict[str, Any]:
    """A subject of a statement: what has this digest."""
    algorithm, _, value = digest.partition(":")
    return {"name": name, "digest": {algorithm: value}}


def _dependencies(record: Mapping[str, Any], code: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    if record["data"] is not None:
        rows.append({"uri": "urn:mok-service:data-manifest", **subject("data-manifest", record["data"]["digest"])})
        for file in record["data"]["manifest"]["files"]:
            rows.append({"uri": f"urn:mok-service:data:{file['name']}", "digest": {"sha256": file["sha256"]}})
    for name, digest in sorted((code.get("native") or {}).items()):
        rows.append({"uri": f"urn:mok-service:native:{name}", **subject(name, str(digest))})
    return rows


def pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """What a DSSE signature signs: "DSSEv1", then length and bytes of type and payload, all separated by spaces."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def sign(document: Mapping[str, Any], key: SigningKey, payload_type: str = PAYLOAD_TYPE) -> dict[str, Any]:
    """A DSSE envelope over a document's canonical bytes."""
    payload = canonical_bytes(document)
    signature = key.sign(pre_authentication_encoding(payload_type, payload))
    return {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": payload_type,
        "signatures": [{"keyid": key.public.id, "sig": base64.b64encode(signature).decode()}],
    }


def envelope_digest(envelope: Mapping[str, Any]) -> Digest:
    """SHA-256 of an envelope's canonical bytes: the entry of the log."""
    return sha256(canonical_bytes(envelope))


@dataclass(frozen=True, slots=True)
class Opened:
    """A DSSE envelope's payload, and the trusted key that signed it (None: no known key did)."""

    document: Mapping[str, Any]
    signer: PublicKey | None


def open_envelope(envelope: Mapping[str, Any], trusted: Mapping[str, PublicKey], payload_type: str = PAYLOAD_TYPE) -> Opened:
    """Check an envelope's signatures against trusted keys, by key id.

    Raises Tampered for a malformed envelope, another payload type, or a signature under a trusted key's id that is wrong.
    """
    try:
        payload = _decoded(envelope["payload"])
        signatures = [(str(s["keyid"]), _decoded(s["sig"])) for s in envelope["signatures"]]
        found_type = envelope["payloadType"]
        document = json.loads(payload)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise Tampered(f"the attestation isn't a DSSE envelope: {type(error).__name__}: {error}", field="envelope") from None
    if found_type != payload_type:
        raise Tampered(
            f"the envelope holds {found_type!r}, expected {payload_type!r}",
            field="envelope",
            expected=payload_type,
            got=found_type,
        )
    if not signatures or not isinstance(document, dict):
        raise Tampered("the envelope has no signature, or its payload is no object", field="envelope")
    signer = None
    message = pre_authentication_encoding(payload_type, payload)
    for key_id, signature in signatures:
        key = trusted.get(key_id)
        if key is None:
            continue
        if not key.verifies(signature, message):
            raise Tampered(f"the signature by key {key_id} is wrong: the envelope was changed", field="signature")
        signer = key
    return Opened(document, signer)


def _decoded(text: str) -> bytes:
    """The bytes of standard base64. Raises ValueError for any other text of the same bytes: unused bits must be 0."""
    content = base64.b64decode(text, validate=True)
    if base64.b64encode(content).decode() != text:
        raise ValueError(f"not the base64 of its own bytes: {text[-8:]!r}")
    return content


def check_statement(record: Mapping[str, Any], document: Mapping[str, Any]) -> None:
    """Raises Tampered naming the first claim in which an attested statement isn't that of the record."""
    compare_statements(statement(record), document)


def compare_statements(expected: Mapping[str, Any], document: Mapping[str, Any]) -> None:
    """Raises Tampered naming the first claim in which an attested statement isn't the one that the record gives."""
    expected = json.loads(canonical_bytes(expected))
    if document == expected:
        return
    claimed = {s.get("name"): s.get("digest") for s in document.get("subject", []) if isinstance(s, dict)}
    for subject in expected["subject"]:
        got = claimed.get(subject["name"])
        if got != subject["digest"]:
            raise Tampered(
                f"attested {subject['name']} is {got}, the record's is {subject['digest']}", field=subject["name"],
                expected=str(got), got=str(subject["digest"]),
            )  # fmt: skip
    for key in ("_type", "predicateType", "predicate", "subject"):
        if document.get(key) != expected[key]:
            raise Tampered(f"the attested statement's {key} isn't that of the record", field=key)
    raise Tampered("the attested statement has keys that the record doesn't explain", field="statement")

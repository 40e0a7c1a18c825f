"""Attestations, the log that has them, and the keys that sign."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from mok_api.schemas.base import AT, DIGEST, RUN, Answer


class Signature(Answer):
    keyid: str = Field(examples=["0" * 64])
    """SHA-256 of the public key (SubjectPublicKeyInfo, DER)."""
    sig: str = Field(examples=["kGVz..."])
    """Ed25519, in base64."""


class Envelope(Answer):
    """A DSSE envelope: a signed document."""

    payload: str = Field(examples=["eyJfdHlwZSI6..."])
    """The document's bytes, in base64."""
    payloadType: Literal["application/vnd.in-toto+json", "application/vnd.mok-service.tree-head+json"]
    signatures: list[Signature]


class Attestation(Answer):
    """What was signed about a run that has ended, or about the verdict of an audit or rerun: an in-toto Statement, with SLSA
    provenance or a test result as its predicate."""

    run: str = Field(examples=[RUN])
    verification: str | None
    """The verification whose verdict it is about; null for a run's own."""
    envelope: Envelope
    digest: str = Field(examples=[DIGEST])
    """SHA-256 of the envelope's canonical JSON: its entry in the log."""
    key: str = Field(examples=["0" * 64])
    log_index: int = Field(examples=[0])
    at: datetime = Field(examples=[AT])


class LogEntry(Answer):
    index: int = Field(examples=[0])
    entry: str = Field(examples=[DIGEST])
    """The digest of an attestation's envelope."""
    run: str | None = Field(examples=[RUN])
    verification: str | None
    """Of the attestation of a verdict: the verification; null for a run's own."""
    key: str | None = Field(examples=["0" * 64])
    at: datetime = Field(examples=[AT])


class LogEntryItems(Answer):
    items: list[LogEntry]
    next_after: int
    """What to give as `after` to go on."""


class LogProof(Answer):
    """Hashes, as hex digits, in the order of RFC 6962."""

    size: int = Field(examples=[8])
    index: int | None = Field(examples=[5])
    old_size: int | None
    proof: list[str] = Field(examples=[["0" * 64]])


class SigningKey(Answer):
    id: str = Field(examples=["0" * 64])
    pem: str = Field(examples=["-----BEGIN PUBLIC KEY-----\n...\n-----END PUBLIC KEY-----\n"])
    at: datetime = Field(examples=[AT])
    """When it first signed here."""


class SigningKeyItems(Answer):
    items: list[SigningKey]

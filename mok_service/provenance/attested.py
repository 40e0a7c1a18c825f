"""Verdicts on what was signed: is the record the attested one, is its attestation in the log, has the log only grown? No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mok_service.errors import Tampered
from mok_service.provenance import merkle, tree
from mok_service.provenance.attest import check_statement, compare_statements, envelope_digest, open_envelope
from mok_service.provenance.digest import Digest
from mok_service.provenance.keys import PublicKey
from mok_service.provenance.record import RECORD_TYPE
from mok_service.provenance.verdict import verdict_statement
from mok_service.provenance.verify import Finding

PROOF_TYPE: Final = "mok.log-proof/v1"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What there is about a run beside its record."""

    envelope: Mapping[str, Any]   # the attestation, of the run or of a verdict on it
    log: Mapping[str, Any]        # `log_document`: where the log has it, with the proof

    @classmethod
    def of(cls, attestation: Mapping[str, Any], head: Mapping[str, Any], size: int, proof: Sequence[str]) -> Evidence:
        """From an attestation as REST shows it, and its proof under the head of `size` entries."""
        log = {"type": PROOF_TYPE, "index": attestation["log_index"], "size": size, "proof": list(proof), "head": dict(head)}
        return cls(attestation["envelope"], log)


def check_attestation(record: Mapping[str, Any], evidence: Evidence, trusted: Mapping[str, PublicKey]) -> Finding:
    """Is this record the one that a trusted key has attested, and does the log have the attestation?

    1. Signature: no trusted key's is wrong.
    2. Statement: it's that of this record. (A record of a version that this program doesn't know has none here.)
    3. Log: the head's signature is right, and the proof leads from the envelope to the head.
    4. Trust: envelope and head are each signed by a trusted key.
    INTACT; TAMPERED with the first fault; INCONCLUSIVE when a signature is by an unknown key.
    """
    def compare(document: Mapping[str, Any]) -> None:
        if record.get("type") == RECORD_TYPE:
            check_statement(record, document)

    return _check(evidence, trusted, compare)


def check_verdict(record: Mapping[str, Any], verification: Mapping[str, Any], evidence: Evidence,
                  trusted: Mapping[str, PublicKey]) -> Finding:
    """The same for the verdict of an audit or a rerun of that record, as REST shows it."""
    return _check(evidence, trusted, lambda document: compare_statements(verdict_statement(record, verification), document))


def _check(evidence: Evidence, trusted: Mapping[str, PublicKey], compare: Callable[[Mapping[str, Any]], None]) -> Finding:
    try:
        opened = open_envelope(evidence.envelope, trusted)                                  # 1
        compare(opened.document)                                                            # 2
        head = _check_inclusion(evidence, trusted)                                          # 3
    except Tampered as fault:
        return Finding.tampered(fault, "attestation")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        return Finding("TAMPERED", f"record or attestation isn't well-formed: {type(error).__name__}: {error}", "attestation")
    if opened.signer is None or head.signer is None:                                        # 4
        return _unknown_key(evidence.envelope if opened.signer is None else evidence.log["head"])
    return Finding("INTACT", f"attested by key {opened.signer.id[:16]}, entry {evidence.log['index']} of the log's {head.size}")


def _check_inclusion(evidence: Evidence, trusted: Mapping[str, PublicKey]) -> tree.Head:
    log = evidence.log
    if log.keys() != {"type", "index", "size", "proof", "head"} or log["type"] != PROOF_TYPE:
        raise Tampered(f"the log's proof isn't a {PROOF_TYPE}", field="log")
    head = tree.open_head(log["head"], trusted)
    if log["size"] != head.size:
        raise Tampered(f"the proof is for a log of {log['size']} entries, and the signed head has {head.size}", field="log.size",
                       expected=str(head.size), got=str(log["size"]))
    proof = [_hash(text) for text in log["proof"]]
    entry = envelope_digest(evidence.envelope)
    index = log["index"]
    if type(index) is not int or not merkle.verify_inclusion(tree.leaf(entry), index, head.size, proof, head.root):
        raise Tampered(f"the proof doesn't lead from this attestation ({entry}) as entry {index} to the log's head",
                       field="log.proof", expected=head.root.hex())
    return head


def _hash(text: str) -> bytes:
    value = bytes.fromhex(text)
    if value.hex() != text or len(value) != 32:
        raise Tampered(f"the log's proof holds {text!r:.80}, which is no hash; allowed: 64 hex digits", field="log.proof")
    return value


def _unknown_key(envelope: Mapping[str, Any]) -> Finding:
    ids = ", ".join(str(signature["keyid"]) for signature in envelope["signatures"])
    return Finding("INCONCLUSIVE", f"signed by a key that isn't among the trusted ones: {ids}", "key", got=ids)


def check_log(head: Mapping[str, Any], entries: Sequence[Mapping[str, Any]], trusted: Mapping[str, PublicKey],
              seen: Mapping[str, Any] | None = None) -> Finding:
    """Do all entries (as REST shows them) make the signed head, and is the log seen earlier its beginning?

    INTACT; TAMPERED when an entry is missing, in another place or another one; INCONCLUSIVE for an unknown key.
    """
    try:
        now = tree.open_head(head, trusted)
        for index, entry in enumerate(entries[: now.size]):
            if entry["index"] != index:
                raise Tampered(f"entry {index} of the log is missing", field="log.entries", expected=str(index),
                               got=str(entry["index"]))
        leaves = [tree.leaf(Digest.parse(entry["entry"])) for entry in entries[: now.size]]
        if len(leaves) != now.size:
            raise Tampered(f"the log has {len(leaves)} entries, and its head says {now.size}", field="log.entries",
                           expected=str(now.size), got=str(len(leaves)))
        _expect_root(merkle.root(leaves), now.root, f"the {now.size} entries of the log", "log.entries")
        if seen is not None:
            before = tree.open_head(seen, {})
            if before.size > now.size:
                raise Tampered(f"the log had {before.size} entries when it was seen last, and now has {now.size}",
                               field="log.size", expected=f"at least {before.size}", got=str(now.size))
            what = f"the first {before.size} entries of the log, as seen last,"
            _expect_root(merkle.root(leaves[: before.size]), before.root, what, "log.consistency")
    except Tampered as fault:
        return Finding.tampered(fault, "log")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return Finding("TAMPERED", f"the log isn't well-formed: {type(error).__name__}: {error}", "log")
    if now.signer is None:
        return _unknown_key(head)
    grown = "" if seen is None else f", of which {before.size} were seen before"
    return Finding("INTACT", f"the log's {now.size} entries are those under its head, signed by key {now.signer.id[:16]}{grown}")


def _expect_root(got: bytes, expected: bytes, what: str, field: str) -> None:
    if got != expected:
        raise Tampered(f"{what} don't make the signed root: one was changed, removed or moved", field=field,
                       expected=expected.hex(), got=got.hex())


def worst(findings: Sequence[Finding]) -> Finding:
    """The verdict on all: the first TAMPERED, else the first that isn't INTACT, else INTACT with everything said."""
    for wanted in ("TAMPERED", "INCONCLUSIVE"):
        for finding in findings:
            if finding.verdict == wanted:
                return finding
    return Finding("INTACT", "; ".join(finding.message for finding in findings))

"""What is signed about the verdict of an audit, rerun or bisect: an in-toto Statement with the predicate "test result". No I/O.

Of in-toto's predicates, SVR lists what was verified to be true, and so can't say that a run diverged; a test result has PASSED,
WARNED and FAILED. Its own field `verification`, which other readers ignore, holds plan, verdict and report as REST shows them;
only floats, which canonical JSON can't hold, are the 16 hex digits of their binary64 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from mok_service.provenance.attest import STATEMENT_TYPE, record_digest, subject
from mok_service.provenance.canonical import canonical_bytes
from mok_service.provenance.digest import sha256
from mok_service.provenance.record import canonical_value

PREDICATE_TYPE: Final = "https://in-toto.io/attestation/test-result/v0.1"
RESULTS: Final = {"AUDITED": "PASSED", "REPRODUCED": "PASSED", "DIVERGED": "FAILED", "TAMPERED": "FAILED",
                  "INCONCLUSIVE": "WARNED"}
# What doesn't change any more once there is a verdict.
FIXED: Final = ("id", "run", "executed_by", "level", "plan", "verdict", "field", "step", "expected", "got", "message", "report",
                "at", "ended_at")


def verdict_statement(record: Mapping[str, Any], verification: Mapping[str, Any]) -> dict[str, Any]:
    """The statement on a run's record, and on a verification of it that has ended with a verdict, both as REST shows them."""
    identity, spec = record["identity"], record["spec"]
    subjects = [subject("record", str(record_digest(record)))]
    if record["chain"]["head"] is not None:
        subjects.append(subject("chain-head", record["chain"]["head"]))
    configuration = [subject("training", spec["training_digest"])]
    if verification["plan"] is not None:
        configuration.append(subject("plan", str(sha256(canonical_bytes(verification["plan"])))))
    result = RESULTS[verification["verdict"]]
    named = {"PASSED": "passedTests", "WARNED": "warnedTests", "FAILED": "failedTests"}
    return {
        "_type": STATEMENT_TYPE,
        "subject": subjects,
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "result": result,
            "configuration": configuration,
            "url": f"urn:mok-service:verification:{verification['id']}",
            named[result]: [f"{verification['level']} of {identity['run']}"],
            "verification": canonical_value({name: verification[name] for name in FIXED}),
        },
    }

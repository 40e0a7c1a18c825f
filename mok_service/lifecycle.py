"""Run states and the only table of legal transitions."""

from __future__ import annotations

from typing import Final, Literal, get_args

RunStatus = Literal[
    "queued", "claimed", "starting", "running", "stopping", "paused", "succeeded", "failed", "cancelled"
]
DesiredState = Literal["run", "pause", "cancel"]

# Why a run left `running`; written once, on entering `stopping` (or a final state), and never changed.
StopReason = Literal[
    "finished", "user_cancelled", "user_paused", "non_finite", "nondeterministic", "source_drift", "bad_data",
    "out_of_memory", "attempts_exhausted", "queue_deadline", "run_deadline", "diverged", "tampered", "library_unusable",
    "internal",
]
# Why an attempt ended, when the run goes on with another.
AttemptEnd = Literal[
    "finished", "stopped", "worker_lost", "lease_expired", "out_of_memory", "failed", "service_restarted"
]
VerificationLevel = Literal["check", "audit", "rerun", "bisect"]
# done: it came to a conclusion; failed: what carried it out failed, which says nothing about the run.
VerificationStatus = Literal["queued", "running", "paused", "done", "cancelled", "failed"]
VerificationVerdict = Literal["INTACT", "AUDITED", "REPRODUCED", "DIVERGED", "TAMPERED", "INCONCLUSIVE"]

# Kinds of runs without a chain and an attestation of their own: what is signed is the verdict.
UNCHAINED: Final = ("audit", "bisect")
CHAINED: Final = ("original", "reproduction")

STATUSES: Final = get_args(RunStatus)
STOP_REASONS: Final = get_args(StopReason)
FINAL: Final[frozenset[RunStatus]] = frozenset({"succeeded", "failed", "cancelled"})
ACTIVE: Final[frozenset[RunStatus]] = frozenset({"claimed", "starting", "running", "stopping"})

# Each of these happens: the simulation's tests see every one, and no other.
TRANSITIONS: Final[dict[RunStatus, frozenset[RunStatus]]] = {
    "queued": frozenset({"claimed", "cancelled", "failed", "paused"}),  # failed: a deadline
    "claimed": frozenset({"starting", "queued", "stopping", "cancelled"}),  # cancelled, queued: nothing was made yet
    "starting": frozenset({"running", "queued", "stopping"}),
    "running": frozenset({"stopping", "queued"}),
    "stopping": frozenset({"succeeded", "failed", "cancelled", "paused"}),
    "paused": frozenset({"queued", "cancelled"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}


def is_legal(old: RunStatus, new: RunStatus) -> bool:
    """Whether a run may go from `old` to `new`."""
    return new in TRANSITIONS[old]

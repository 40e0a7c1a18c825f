"""The use cases of runs: what users ask of them, and what a scheduler does to them under a lease.

The first argument is a `Database`. `now` is the time to act at; where it is None, the database's clock is asked
(`Database.now`). Every function is one transaction, or for the reading ones one snapshot.
"""

from mok_service.provenance.checkpoint import CheckpointFile, CheckpointInfo
from mok_service.runs.appending import append
from mok_service.runs.attesting import (
    Attestation,
    LogEntry,
    attest,
    get_attestation,
    get_verdict_attestation,
    log_entries,
    log_head,
    log_proof,
    signing_keys,
    unattested,
)
from mok_service.runs.clusters import report_nodes
from mok_service.runs.judging import judge
from mok_service.runs.leases import claim, finish, mark_running, mark_starting, release, renew
from mok_service.runs.lineage import find_digest, lineage_of
from mok_service.runs.quotas import Quota, get_quota, set_quota
from mok_service.runs.reading import (
    attempts,
    checkpoints,
    events,
    get_run,
    get_verification,
    list_runs,
    logs,
    nodes,
    plan_of_audit,
    plan_of_bisect,
    provenance,
    record_to_bisect,
    steps,
    verifications,
)
from mok_service.runs.reaping import end_leases_of_earlier_boots, leased_attempts, reap
from mok_service.runs.standing import Standing, standings, with_standing
from mok_service.runs.types import (
    AppendResult,
    Attempt,
    Capacity,
    Event,
    Lease,
    LogLine,
    Node,
    Outcome,
    Page,
    Run,
    StoredCheckpoint,
    StoredLog,
    StoredStep,
    Verification,
)
from mok_service.runs.wishes import cancel, checkpoint_deleted, pause, resume

__all__ = [
    "AppendResult", "Attempt", "Attestation", "Capacity", "CheckpointFile", "CheckpointInfo", "Event", "Lease", "LogEntry",
    "LogLine", "Node", "Outcome", "Page", "Quota", "Run", "Standing", "StoredCheckpoint", "StoredLog", "StoredStep",
    "Verification", "append", "attempts", "attest", "cancel", "checkpoint_deleted", "checkpoints", "claim",
    "end_leases_of_earlier_boots", "events", "find_digest", "finish", "get_attestation", "get_quota", "get_run",
    "get_verdict_attestation", "get_verification", "judge", "leased_attempts", "lineage_of", "list_runs", "log_entries",
    "log_head", "log_proof", "logs", "mark_running", "mark_starting", "nodes", "pause", "plan_of_audit", "plan_of_bisect",
    "provenance", "reap", "record_to_bisect", "release", "renew", "report_nodes", "resume", "set_quota", "signing_keys",
    "standings", "steps", "unattested", "verifications", "with_standing",
]

"""Every error that MoK service raises on purpose: one root, with the HTTP status and the exit status on the class."""

from __future__ import annotations

from typing import Any, ClassVar


class MokError(Exception):
    """The root. `detail` holds machine-readable facts (field, value, allowed ...), the message reads as a sentence."""

    http_status: ClassVar[int] = 500
    exit_status: ClassVar[int] = 1
    code: ClassVar[str] = "internal"

    def __init__(self, message: str, **detail: Any) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail


class InvalidSpec(MokError):
    """A malformed spec or argument. `detail["errors"]` lists every fault: field, value, problem, allowed, nearest."""

    http_status, exit_status, code = 422, 2, "invalid_spec"


class Unrunnable(MokError):
    """A well-formed spec that this installation can't run: too little memory, no such device, a feature not built yet."""

    http_status, exit_status, code = 422, 2, "unrunnable"


class NotFound(MokError):
    http_status, exit_status, code = 404, 6, "not_found"


class Conflict(MokError):
    """The request contradicts the present state: an illegal transition, a reused idempotency key with another body."""

    http_status, exit_status, code = 409, 1, "conflict"


class LeaseLost(Conflict):
    """A late write: the lease it was made under is no longer the run's lease. The writer must stop."""

    code = "lease_lost"


class QuotaExceeded(MokError):
    """The tenant has as much as it may have now: later, or once something has ended, the same request is fine.

    `detail` holds limit (its name), value and used.
    """

    http_status, exit_status, code = 429, 1, "quota_exceeded"


class QuotaForbids(MokError):
    """The tenant may not have this, however long it waits; `detail` as in QuotaExceeded."""

    http_status, exit_status, code = 403, 1, "quota_forbids"


class Unauthenticated(MokError):
    """The service asks for an API key, and the request has none, or one that isn't (or no longer) good."""

    http_status, exit_status, code = 401, 2, "unauthenticated"


class Forbidden(MokError):
    """The key is good, and doesn't allow this."""

    http_status, exit_status, code = 403, 2, "forbidden"


class TooManyRequests(MokError):
    """A limit on requests: `detail["retry_after"]` is the number of seconds to wait."""

    http_status, exit_status, code = 429, 1, "too_many_requests"


class ServiceUnreachable(MokError):
    http_status, exit_status, code = 503, 7, "unreachable"


class TrainingFailed(MokError):
    """The training itself failed; `detail["reason"]` is one of `lifecycle.STOP_REASONS`."""

    code = "training_failed"


class NonFinite(TrainingFailed):
    """A router logit, the loss or the gradient norm of a step was infinite or NaN."""

    code = "non_finite"


class Diverged(TrainingFailed):
    """A re-executed step gave another body than the stored one."""

    exit_status, code = 3, "diverged"


class SourceDrift(TrainingFailed):
    """A data file no longer has the digest that the job's manifest recorded."""

    exit_status, code = 5, "source_drift"


class SourceUnavailable(MokError):
    """A remote data file couldn't be fetched: no connection, an error of the server, or it took too long. Later it may go."""

    http_status, code = 502, "source_unavailable"


class Tampered(MokError):
    """Stored bytes contradict their recorded digest."""

    http_status, exit_status, code = 409, 4, "tampered"


class KernelError(MokError):
    """The native library refused or failed; the message carries its file and line."""

    code = "kernel"


class LibraryUnusable(KernelError):
    """There is no native library that this program can use: none, stale, of another ABI. Trying again doesn't help."""

    code = "library_unusable"

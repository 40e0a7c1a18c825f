"""What the bodies of all routes are made of."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

DIGEST: Final = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
JOB: Final = "job_0198c0de5e1f7000800000000000c0de"
RUN: Final = "run_0198c0de5e1f7000800000000000c0de"
VERIFICATION: Final = "ver_0198c0de5e1f7000800000000000c0de"
AT: Final = "2026-12-01T10:00:00.000000Z"


class Strict(BaseModel):
    """A body that a client sends."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class Answer(BaseModel):
    """A body that the service sends."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Error(Answer):
    code: str = Field(examples=["not_found"])
    """What kind of error it is, for programs."""
    message: str = Field(examples=[f"there is no run {RUN}"])
    """What is wrong, as a sentence."""
    request: str | None = Field(examples=["req_0123456789abcdef01234567"])
    """The request's id, as in the service's log."""
    detail: dict[str, Any] = Field(examples=[{"run": RUN}])
    """The facts; for a wrong value `errors`, each with field, value, problem, allowed and nearest."""


class ErrorAnswer(Answer):
    error: Error

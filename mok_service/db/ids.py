"""Typed ids: `job_`, `run_` ... and a UUIDv7 as 32 hex digits, so that ids sort by the millisecond they were made in."""

from __future__ import annotations

import re
import secrets
import time
from typing import Final, Literal

Kind = Literal["job", "run", "att", "ver", "key", "whk", "dlv"]

_ID: Final = re.compile(r"(job|run|att|ver|key|whk|dlv)_[0-9a-f]{12}7[0-9a-f]{3}[89ab][0-9a-f]{15}")


def new_id(kind: Kind) -> str:
    """A new id, by the wall clock and 74 random bits (RFC 9562, version 7)."""
    milliseconds = time.time_ns() // 1_000_000
    random = secrets.randbits(74)
    value = milliseconds << 80 | 0x7 << 76 | (random >> 62) << 64 | 0b10 << 62 | random & (1 << 62) - 1
    return f"{kind}_{value:032x}"


def is_id(text: str, kind: Kind | None = None) -> bool:
    """Whether `text` has the form of an id, of this kind if one is given."""
    match = _ID.fullmatch(text)
    return match is not None and kind in (None, match[1])

"""The signature of a delivery, for us and for receivers: needs nothing but Python's own library.

A delivery has three headers (as in https://www.standardwebhooks.com, so that its libraries verify it too):

    webhook-id           the delivery's id: the same whenever it's tried again
    webhook-timestamp    seconds since 1970, when this attempt was sent
    webhook-signature    v1, and the base64 of HMAC-SHA256(secret, "ID.TIMESTAMP.BODY")

The secret is `whsec_` and the base64 of the HMAC's key.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any, Final

REPLAY_SECONDS_MAX: Final = 300  # how old, or how far ahead, a timestamp may be
SECRET_PREFIX: Final = "whsec_"
_TIME: Final = re.compile(r"[0-9]{1,12}")


class InvalidSignature(ValueError):
    """A delivery that isn't from the service, was changed on its way, or comes too late."""


def sign(secret: str, delivery: str, timestamp: int, body: bytes) -> str:
    """The value of webhook-signature."""
    signed = f"{delivery}.{timestamp}.".encode() + body
    return "v1," + b64encode(hmac.digest(_key(secret), signed, hashlib.sha256)).decode()


def verify(secret: str, headers: Mapping[str, str], body: bytes, now: float) -> dict[str, Any]:
    """What a delivery says, for a receiver: its JSON, once it's known to come from the service and not too late.

    `headers` are those of the request, by names in lower case; `body` its bytes as they came; `now` is `time.time()`. Raises
    InvalidSignature. A delivery may come more than once: remember the ids (`webhook-id`) of those that you have dealt with.
    """
    delivery, timestamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    if not _TIME.fullmatch(timestamp):
        raise InvalidSignature("webhook-timestamp isn't a time")
    expected = sign(secret, delivery, int(timestamp), body)
    given = headers.get("webhook-signature", "").split()
    if not any(hmac.compare_digest(expected.encode(), one.encode()) for one in given):
        raise InvalidSignature("webhook-signature isn't that of this body")
    if abs(now - int(timestamp)) > REPLAY_SECONDS_MAX:
        raise InvalidSignature(f"it was sent more than {REPLAY_SECONDS_MAX} s before or after now")
    value: dict[str, Any] = json.loads(body)
    return value


def _key(secret: str) -> bytes:
    try:
        return b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error:
        raise ValueError("the secret isn't one: it begins with whsec_ and goes on in base64") from None

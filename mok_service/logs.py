"""The service's own log: lines or JSON, with the id of the request that a line belongs to, and without secrets."""

from __future__ import annotations

import json
import logging
import re
import time
from contextvars import ContextVar
from typing import Final, Literal

TEXT_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Whatever looks like one of our secrets, wherever it comes from: keys, webhooks' secrets, passwords in URLs, private keys.
_SECRETS: Final = (
    (re.compile(r"(mok_[0-9a-f]{12})_[A-Za-z0-9_-]{20,}"), r"\1_***"),
    (re.compile(r"whsec_[A-Za-z0-9+/=_-]{16,}"), "whsec_***"),
    (re.compile(r"(\w+://[^\s:/@]*):[^\s@]*@"), r"\1:***@"),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), "*** private key ***"),
)
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


def configure(style: Literal["text", "json"]) -> None:
    """Has this process log to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter(TEXT_FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in ("alembic", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)


def without_secrets(text: str) -> str:
    """The text with `***` in the place of what looks like a secret."""
    for pattern, shown in _SECRETS:
        text = pattern.sub(shown, text)
    return text


class TextFormatter(logging.Formatter):
    """Lines for people."""

    def format(self, record: logging.LogRecord) -> str:
        asked = request_id.get()
        text = super().format(record) + ("" if asked is None else f" [{asked}]")
        return without_secrets(text)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message; request and trace of an exception where there are some."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        value = {"time": at, "level": record.levelname.lower(), "logger": record.name,
                 "message": without_secrets(record.getMessage())}
        asked = request_id.get()
        if asked is not None:
            value["request"] = asked
        if record.exc_info:
            value["exception"] = without_secrets(self.formatException(record.exc_info))
        return json.dumps(value, ensure_ascii=False)

"""JSON as this service writes it: UTF-8, integers exact, never NaN or infinity."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response


class Json(Response):
    """A JSON answer. The values hold no NaN or infinity: the use cases turn those into null, beside their exact bits."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_text(content).encode()


def json_text(value: Any) -> str:
    """One line of JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))

"""An application for test_serve.py: it answers /healthz, and tells what it was given."""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from mok_service.db.session import Database, check_schema
from mok_service.settings import Settings

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class StubApp:
    def __init__(self, db: Database, settings: Settings) -> None:
        check_schema(db)
        self.state = SimpleNamespace()
        self._shown = {
            "database": db.dialect, "data_dir": str(settings.data_dir), "names": sorted(os.environ), "pid": os.getpid(),
        }

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        while scope["type"] == "lifespan":
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": json.dumps(self._shown).encode()})

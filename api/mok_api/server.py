"""The API as a process of its own: any number of them may serve one database."""

from __future__ import annotations

from types import FrameType

import uvicorn

from mok_api.app import create_app
from mok_service.db.session import Database, upgrade
from mok_service.settings import Settings


class Server(uvicorn.Server):
    """uvicorn, but a signal to stop also ends the event streams, which would keep it waiting."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.config.app.state.streams.stopping.set()  # type: ignore[union-attr]
        super().handle_exit(sig, frame)


def run_api(settings: Settings) -> None:
    """Upgrade the database, then serve until SIGINT or SIGTERM."""
    upgrade(settings.database())
    db = Database(settings.database())
    try:
        config = uvicorn.Config(
            create_app(db, settings), host=settings.host, port=settings.port, server_header=False,
            timeout_graceful_shutdown=round(settings.shutdown_seconds_max) or 1,
        )
        Server(config).run()
    finally:
        db.close()

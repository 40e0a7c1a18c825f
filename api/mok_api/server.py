"""The API as a process of its own: any number of them may serve one database."""

from __future__ import annotations

import signal
from types import FrameType

import uvicorn

from mok_api.app import create_app
from mok_service import logs, tracing
from mok_service.access import refuse_without_keys
from mok_service.db.session import Database, upgrade
from mok_service.settings import Settings


class Server(uvicorn.Server):
    """uvicorn, but a signal to stop also ends the event streams, which would keep it waiting."""

    stopped_by: int | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.config.app.state.streams.stopping.set()  # type: ignore[union-attr]
        self.force_exit = self.should_exit  # asked twice: no more patience
        self.should_exit, self.stopped_by = True, sig


def run_api(settings: Settings) -> int:
    """Upgrade the database, then serve until a signal. The exit status: 0 after SIGTERM, 130 after SIGINT, 1 if it can't.

    Raises InvalidSpec at an address that other machines reach, as long as there is no API key."""
    logs.configure(settings.log_format)
    tracing.start("mok-api")
    upgrade(settings.database())
    db = Database(settings.database())
    try:
        refuse_without_keys(db, settings)
        app = create_app(db, settings)
        config = uvicorn.Config(
            app, http=app.state.http, host=settings.host, port=settings.port, server_header=False, log_config=None,
            access_log=False, proxy_headers=False,
            timeout_graceful_shutdown=round(settings.shutdown_seconds_max) or 1,
        )
        server = Server(config)
        server.run()
        return 1 if server.stopped_by is None else 130 if server.stopped_by == signal.SIGINT else 0
    finally:
        db.close()

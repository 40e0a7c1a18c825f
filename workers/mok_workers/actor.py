"""The Ray actor: a thin shell around `Attempt`. One process, one attempt, one device; it is never restarted.

It needs no answer from Ray to end: when nobody has asked for longer than its lease, it leaves by itself.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Final

from mok_workers.attempt import Attempt, Control, Open, Training
from mok_workers.messages import Payload, Reply, Seen

EXIT_LEASE_EXPIRED: Final = 75
WATCH_SECONDS: Final = 0.25
CALLS_AT_ONCE_MAX: Final = 4  # a waiting `advance` must not keep `stop` out


def open_here(payload: Payload, control: Control) -> Training:
    """`opening.open_training`, imported where it trains: torch takes 200 MB, and the scheduler's process has no use for it."""
    from mok_workers.opening import open_training

    return open_training(payload, control)


class TrainActor:
    """What Ray makes of it is in cluster.py: max_restarts = 0, max_task_retries = 0, threads for CALLS_AT_ONCE_MAX calls."""

    def __init__(self, payload: Payload, opens: Open) -> None:
        self._attempt = Attempt(payload, opens)
        threading.Thread(target=self._leave_when_expired, name="lease", daemon=True).start()
        self._attempt.start()

    def advance(self, seen: Seen, max_records: int, max_seconds: float, lease_seconds: float) -> Reply:
        """See `Attempt.advance`."""
        return self._attempt.advance(seen, max_records=max_records, max_seconds=max_seconds, lease_seconds=lease_seconds)

    def stop(self, checkpoint: bool) -> None:
        """See `Attempt.stop`."""
        self._attempt.stop(checkpoint=checkpoint)

    def _leave_when_expired(self) -> None:
        while not self._attempt.expired():
            time.sleep(WATCH_SECONDS)
        os._exit(EXIT_LEASE_EXPIRED)  # not sys.exit: the training's thread may be inside a kernel

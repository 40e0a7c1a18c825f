"""The use case of deleting a checkpoint: its bytes go, what is on record of it stays."""

from __future__ import annotations

import shutil
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from mok_service import runs
from mok_service.db.session import Database
from mok_service.export import inside
from mok_service.runs.types import StoredCheckpoint


def delete_checkpoint(db: Database, folder: Path, run_id: str, step: int, tenant: str = "local",
                      now: datetime | None = None) -> StoredCheckpoint:
    """Deletes the bytes of a run's checkpoint; `folder` holds the run's checkpoints.

    That is recorded first: bytes that a crash leaves behind belong to nothing, and deleting again removes them. Raises NotFound
    and Conflict as `runs.checkpoint_deleted` does.
    """
    deleted = runs.checkpoint_deleted(db, run_id, step, tenant, now)
    place = inside(folder, deleted.info.folder)
    with suppress(FileNotFoundError):
        if place.is_symlink():
            place.unlink()
        else:
            shutil.rmtree(place)
    return deleted

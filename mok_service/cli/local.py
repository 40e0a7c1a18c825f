"""Reading an embedded data folder without a service: the same answers as the client's, straight from the use cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from mok_service import auditlog, jobs, runs
from mok_service.db.session import Database, check_schema, parse_url
from mok_service.errors import NotFound
from mok_service.settings import Settings, load_settings

CHUNK_BYTES: Final = 1 << 20
ITEMS_MAX: Final = 1000
T = TypeVar("T")


@contextmanager
def open_local(data_dir: Path) -> Iterator[Local]:
    """The folder's database, opened for reading only: nothing is created and nothing migrated.

    Raises NotFound when the folder holds none, SchemaMismatch when it's another version's.
    """
    with open_database(data_dir, read_only=True) as db:
        yield Local(db, load_settings(data_dir=data_dir))


@contextmanager
def open_database(data_dir: Path, *, read_only: bool = False) -> Iterator[Database]:
    """The database of the folder, or of the settings. Raises NotFound when there is none, SchemaMismatch when it's another
    version's."""
    settings = load_settings(data_dir=data_dir)
    if missing_file(settings) is not None:
        raise NotFound(f"{data_dir} holds no runs yet, and no service is running; `mok serve` starts one", data_dir=str(data_dir))
    db = Database(settings.database(), read_only=read_only)
    try:
        check_schema(db)
        yield db
    finally:
        db.close()


def missing_file(settings: Settings) -> str | None:
    """The file of an embedded database that isn't there."""
    url = parse_url(settings.database())
    return str(url.database) if url.get_backend_name() == "sqlite" and not Path(str(url.database)).is_file() else None


class Local:
    """The reading half of `client.Client`."""

    def __init__(self, db: Database, settings: Settings) -> None:
        self._db, self._settings = db, settings

    def job(self, job_id: str) -> dict[str, Any]:
        return jobs.get_job(self._db, job_id).as_dict()

    def jobs(self, **filters: Any) -> dict[str, Any]:
        page = jobs.list_jobs(self._db, **filters)
        return {"items": [job.as_dict() for job in page.items], "next_cursor": page.next_cursor}

    def run(self, run_id: str) -> dict[str, Any]:
        return runs.with_standing(self._db, [runs.get_run(self._db, run_id)])[0]

    def runs(self, **filters: Any) -> dict[str, Any]:
        page = runs.list_runs(self._db, **filters)
        return {"items": runs.with_standing(self._db, page.items), "next_cursor": page.next_cursor}

    def lineage(self, run_id: str, depth: int = 5) -> dict[str, Any]:
        return runs.lineage_of(self._db, run_id, depth)

    def find_digest(self, digest: str) -> dict[str, Any]:
        return runs.find_digest(self._db, digest).as_dict()

    def steps(self, run_id: str, after: int = -1) -> list[dict[str, Any]]:
        found = _all(lambda last: runs.steps(self._db, run_id, last, ITEMS_MAX), after, lambda step: step.record.step)
        return [step.as_dict() for step in found]

    def logs(self, run_id: str, after: int = 0) -> list[dict[str, Any]]:
        found = _all(lambda last: runs.logs(self._db, run_id, last, ITEMS_MAX), after, lambda line: line.number)
        return [line.as_dict() for line in found]

    def checkpoints(self, run_id: str) -> list[dict[str, Any]]:
        return [checkpoint.as_dict() for checkpoint in runs.checkpoints(self._db, run_id)]

    def verifications(self, run_id: str) -> list[dict[str, Any]]:
        return [verification.as_dict() for verification in runs.verifications(self._db, run_id)]

    def provenance(self, run_id: str) -> dict[str, Any]:
        return runs.provenance(self._db, run_id)

    def attestation(self, run_id: str) -> dict[str, Any]:
        return runs.get_attestation(self._db, run_id).as_dict()

    def verdict_attestation(self, verification_id: str) -> dict[str, Any]:
        return runs.get_verdict_attestation(self._db, verification_id).as_dict()

    def signing_keys(self) -> list[dict[str, Any]]:
        return runs.signing_keys(self._db)

    def log_head(self) -> dict[str, Any]:
        return runs.log_head(self._db)

    def log_entries(self, after: int = -1) -> list[dict[str, Any]]:
        found = _all(lambda last: runs.log_entries(self._db, last, ITEMS_MAX), after, lambda entry: entry.index)
        return [entry.as_dict() for entry in found]

    def log_proof(self, size: int, *, index: int | None = None, old_size: int | None = None) -> list[str]:
        return runs.log_proof(self._db, size, index=index, old_size=old_size)

    def audit_entries(self, after: int = -1, *, tenant: str | None = None) -> list[dict[str, Any]]:
        return _all(lambda last: auditlog.entries(self._db, tenant or "local", last, ITEMS_MAX), after,
                    lambda entry: int(entry["number"]))

    def audit_head(self, *, tenant: str | None = None) -> dict[str, Any]:
        return auditlog.head(self._db, tenant or "local")

    def checkpoint_file(self, run_id: str, step: int, name: str) -> Iterator[bytes]:
        """The bytes of a checkpoint's file, in pieces. Raises NotFound."""
        folder = next((c.info.folder for c in runs.checkpoints(self._db, run_id) if c.info.step == step), "")
        try:
            with (self._settings.checkpoints(run_id) / folder / name).open("rb") as file:
                while piece := file.read(CHUNK_BYTES):
                    yield piece
        except OSError:
            raise NotFound(f"{name!r} of the checkpoint of step {step} isn't in the store", name=name) from None


def _all(page_after: Callable[[int], Sequence[T]], after: int, number: Callable[[T], int]) -> list[T]:
    """What all pages hold: each begins after the number of the last one before."""
    found: list[T] = []
    while page := page_after(after):
        found += page
        after = number(page[-1])
    return found

"""The embedded database under load, with real processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from mok_service import runs
from mok_service.db.session import Database
from mok_service.integrity import inspect
from mok_service.settings import Settings
from tests.operating.installation import api, get, job, submit, until
from tests.services import Worker, spec


def test_parallel_submits_while_another_process_writes_metrics(tmp_path: Path) -> None:
    """Case 17: one process serves 50 submits at once, this one appends steps to the same file: no 5xx, nothing is locked."""
    one = api(tmp_path, "api")
    settings = Settings(data_dir=tmp_path / "api")
    one.start()
    try:
        one.ready()
        db = Database(settings.database())
        worker = Worker(db, settings)
        assert httpx.post(one.url + "/v1/jobs", json=spec(steps=20), timeout=60.0).status_code == 201

        def status_of(seed: int) -> int:
            return httpx.post(one.url + "/v1/jobs", json=job(seed), timeout=60.0).status_code

        with ThreadPoolExecutor(50) as threads:
            answers = [threads.submit(status_of, seed) for seed in range(50)]
            worked = [worker.work() for _ in range(4)]
            assert [answer.result() for answer in answers] == [201] * 50
        worker.sign()
        assert {get(one.url, f"/v1/runs/{run}")["status"] for run in worked} == {"succeeded"}
        assert len(get(one.url, "/v1/runs?limit=100")["items"]) == 51
        seen = inspect(db, settings.checkpoints)
        assert seen.faults == [] and seen.runs == 4
        db.close()
    finally:
        assert one.program.stop() == 0


def test_a_service_that_lost_everything_goes_on_without_being_asked(tmp_path: Path) -> None:
    """Case 15: every process is killed at once, and the service started again; no request comes, and the run ends."""
    service = api(tmp_path, "serve", "serve")
    settings = Settings(data_dir=tmp_path / "serve")
    service.start()
    try:
        service.ready()
        run = submit(service.url, job(1, steps=400, checkpoint_interval=20))
        until(lambda: (get(service.url, f"/v1/runs/{run}")["step"] or 0) > 20, "it trains")
        service.program.kill()
        db = Database(settings.database(), read_only=True)
        service.start()
        found = until(lambda: (now := runs.get_run(db, run)).ended_at and now, "the run ends")
        assert (found.status, found.step, found.failures) == ("succeeded", 400, 0)
        first, second = runs.attempts(db, run)
        assert (first.end, second.end) == ("service_restarted", "finished")
        assert second.from_step is not None and second.from_step >= 20
        db.close()
    finally:
        assert service.program.stop() == 0

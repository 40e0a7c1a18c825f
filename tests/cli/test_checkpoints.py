"""Deleting checkpoints: the bytes go and the digests stay, by REST and by the command."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from mok_service import checkpoints, jobs, runs, verifying
from mok_service.db.session import Database
from mok_service.errors import Conflict
from mok_service.settings import Settings
from mok_service.spec import parse_job
from tests.api.conftest import hold_against_description
from tests.cli.conftest import Mok
from tests.services import SPEC, Service, Worker, spec


@pytest.fixture
def run(database: Database, worker: Worker) -> str:
    """A run with checkpoints of steps 0 to 3, attested."""
    jobs.submit(database, parse_job(SPEC))
    done = worker.work()
    worker.sign()
    return done


def folders(settings: Settings, run: str) -> list[str]:
    return sorted(path.name for path in settings.checkpoints(run).iterdir())


def test_by_the_command(mok: Mok, service: Service, run: str) -> None:
    assert mok("checkpoints", "rm", run, "1").out.startswith(f"{run}: 1 checkpoints deleted, ")
    assert folders(service.settings, run) == ["step-00000000", "step-00000002", "step-00000003"]
    listed = mok("checkpoints", "list", run, "--json").json["items"]
    assert [item["step"] for item in listed if item["deleted_at"]] == [1] and len(listed) == 4
    lines = mok("checkpoints", "list", run).out.splitlines()
    assert [line.split()[1] for line in lines if line.endswith("  deleted")] == ["1"] and len(lines) == 4
    told = mok("checkpoints", "rm", "latest", "--but-last", "--json")
    assert [item["step"] for item in told.json["items"]] == [0, 2] and folders(service.settings, run) == ["step-00000003"]
    result = mok("verify", run)
    assert result.status == 0 and result.out.startswith("INTACT") and "attested by key" in result.out
    weights = runs.checkpoints(service.db, run)[1].info.state.weights
    assert "checkpoint-weights" in mok("find", str(weights)).out, "its digests stay"
    assert mok("checkpoints", "rm", run).status == 2 and mok("checkpoints", "rm", run, "3", "--but-last").status == 2
    assert mok("checkpoints", "rm", run, "9").status == 6


def test_by_rest(service: Service, run: str) -> None:
    with httpx.Client(base_url=service.url, event_hooks={"response": [is_described]}) as api:
        path = f"/v1/runs/{run}/checkpoints/2"
        answers = [api.delete(path) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200] and answers[0].json() == answers[1].json()
        assert answers[0].json()["step"] == 2 and answers[0].json()["deleted_at"] is not None
        assert api.get(f"{path}/files/model.safetensors").status_code == 410
        assert api.get(f"/v1/runs/{run}/events").json()["items"][-1]["payload"]["deleted"] is True
        assert api.delete(f"/v1/runs/{run}/checkpoints/7").status_code == 404
        assert api.delete(f"/v1/runs/{run}/checkpoints/-1").status_code == 422
        assert api.delete("/v1/runs/run_0198c0de5e1f7000800000000000c0de/checkpoints/2").status_code == 404
        assert api.get("/v1/audit").json()["items"][0]["action"] == "DELETE /v1/runs/{run}/checkpoints/{step}"


def is_described(answer: httpx.Response) -> None:
    answer.read()
    hold_against_description(answer)


def test_what_was_left_by_a_crash_goes_the_next_time(database: Database, settings: Settings, run: str) -> None:
    runs.checkpoint_deleted(database, run, 1)
    assert "step-00000001" in folders(settings, run)
    checkpoints.delete_checkpoint(database, settings.checkpoints(run), run, 1)
    assert "step-00000001" not in folders(settings, run)


def test_a_link_is_not_followed(database: Database, settings: Settings, run: str, tmp_path: Path) -> None:
    place = settings.checkpoints(run) / "step-00000001"
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    checkpoints.delete_checkpoint(database, settings.checkpoints(run), run, 1)
    assert not place.is_symlink() and (tmp_path / "elsewhere" / "model.safetensors").is_file()


def test_what_may_be_needed_stays(database: Database, settings: Settings, worker: Worker, run: str) -> None:
    job = runs.get_run(database, run).job_id
    second = jobs.create_run(database, job)
    worker.work()
    child = jobs.submit(database, parse_job(spec(init_from={"source": f"{run}@1", "weights": None}))).run.id
    needing = [verifying.bisect(database, run, second.id), verifying.bisect(database, second.id, run),
               verifying.verify(database, run, "audit")]
    for going in [child, *(str(verification.executed_by) for verification in needing)]:
        with pytest.raises(Conflict, match=f"{going} .* may need the checkpoint of step 1"):
            checkpoints.delete_checkpoint(database, settings.checkpoints(run), run, 1)
        runs.cancel(database, going)
    checkpoints.delete_checkpoint(database, settings.checkpoints(run), run, 1)
    assert "step-00000001" not in folders(settings, run)

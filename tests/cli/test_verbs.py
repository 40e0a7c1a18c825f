"""The verbs, with a service and without: what they print, and with which status they exit."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from mok_service.db.session import Database
from mok_service.db.tables import step_records
from mok_service.settings import Settings
from tests.cli.conftest import Mok
from tests.services import SPEC, Service, Worker, flip_a_bit, spec


@pytest.fixture
def run(mok: Mok, service: Service, spec_file: Path, worker: Worker) -> str:
    """A run that has succeeded, with its service."""
    mok("submit", spec_file)
    return worker.work()


def while_working(worker: Worker, *losses: dict[int, float]) -> threading.Thread:
    """A thread that works off one queued run for each of the given losses, as soon as it is there."""
    def work() -> None:
        for changed in losses:
            worker.losses = changed
            while not (queued := [r for r in _runs(worker) if r["status"] == "queued"]):
                time.sleep(0.01)
            assert worker.work() == queued[0]["id"]

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def _runs(worker: Worker) -> list[dict[str, Any]]:
    from mok_service import runs

    return [run.as_dict() for run in runs.list_runs(worker.db).items]


class TestSubmit:
    def test_a_submitted_job_is_printed(self, mok: Mok, service: Service, spec_file: Path) -> None:
        result = mok("submit", spec_file, "--json")
        assert result.status == 0 and result.json["run"]["status"] == "queued"
        assert result.json["job"]["id"] in mok("jobs").out and result.json["run"]["id"] in mok("runs").out

    @pytest.mark.parametrize("seed", [0, 2**53 + 1, 2**63 - 1])
    def test_a_seed_is_exact(self, mok: Mok, service: Service, tmp_path: Path, seed: int) -> None:
        """Case 21."""
        path = tmp_path / "job.yaml"
        path.write_text(json.dumps(spec(seed=seed)))
        assert mok("submit", path, "--json").json["job"]["seed"] == seed
        assert str(seed) in mok("jobs").out.split() and str(seed) in mok("show", "latest").out.split()
        assert mok("jobs", "--json").json["items"][0]["seed"] == seed

    @pytest.mark.parametrize(("text", "says"), [
        ('{"training": {"name": "x", "seed": 9223372036854775808}}', "training.seed = 9223372036854775808 is too large"),
        ('{"training": {"optimizer": {"learning_rate": 1}}}', "did you mean lr?"),
        ('{"training": {}, "training": {}}', "training"), ("{", "line 1"), ('{"training": NaN}', "training"), ("", "line 1"),
    ])
    def test_a_wrong_spec_is_a_usage_error_that_names_the_fault(
        self, mok: Mok, service: Service, tmp_path: Path, text: str, says: str
    ) -> None:
        """Cases 21 and 22."""
        path = tmp_path / "job.json"
        path.write_text(text)
        for more in ([], ["--dry-run"]):
            result = mok("submit", path, *more)
            assert result.status == 2 and says in result.err and result.out == ""
        assert mok("jobs", "--json").json["items"] == []

    def test_a_spec_that_is_not_there_is_not_found(self, mok: Mok) -> None:
        assert mok("submit", "nothing.yaml").status == 6

    def test_a_key_makes_one_job(self, mok: Mok, service: Service, spec_file: Path) -> None:
        """Cases 12 and 13."""
        first, second = (mok("submit", spec_file, "--idempotency-key", "k", "--json").json for _ in range(2))
        assert first["job"] == second["job"] and (first["created"], second["created"]) == (True, False)
        spec_file.write_text(json.dumps(spec(steps=4)))
        refused = mok("submit", spec_file, "--idempotency-key", "k")
        assert refused.status == 1 and first["job"]["id"] in refused.err

    def test_a_dry_run_submits_nothing_with_or_without_a_service(self, mok: Mok, spec_file: Path) -> None:
        result = mok("submit", spec_file, "--dry-run", "--json")
        assert result.status == 0 and result.json["estimate"]["parameters_total"] > 10**6
        assert result.json["spec"]["training"]["optimizer"]["beta2"] == 0.95
        assert "FLOPs a token" in mok("submit", spec_file, "--dry-run").out
        assert mok("runs", "--json").json["items"] == []

    def test_watching_ends_with_the_run(self, mok: Mok, service: Service, spec_file: Path, worker: Worker) -> None:
        thread = while_working(worker, {})
        result = mok("submit", spec_file, "--watch")
        thread.join()
        assert result.status == 0 and "succeeded" in result.out and "step 3/3" in result.out and "loss 2.0000" in result.out
        assert result.out.strip().splitlines()[-1].startswith("weights sha256:")


class TestWatch:
    def test_a_failed_run_exits_1_and_says_why(self, mok: Mok, service: Service, spec_file: Path, worker: Worker) -> None:
        mok("submit", spec_file)
        worker.fail("non_finite", "step 1: the loss is not finite")
        result = mok("watch", "latest")
        assert result.status == 1 and "step 1: the loss is not finite" in result.out

    def test_a_cancelled_run_exits_1(self, mok: Mok, service: Service, spec_file: Path) -> None:
        mok("submit", spec_file)
        assert mok("pause", "latest").out.split()[1:3] == ["paused,", "to"]
        assert mok("resume", "latest").status == 0
        assert "cancelled" in mok("cancel", "latest").out
        assert mok("watch", "latest", "--json").status == 1
        assert mok("resume", "latest").status == 1, "a conflict"

    def test_a_succeeded_run_exits_0(self, mok: Mok, run: str) -> None:
        assert mok("watch", run).status == 0


class TestReading:
    """With a service, and without one from the data folder: the same."""

    @pytest.fixture(params=["service", "folder"])
    def where(self, request: pytest.FixtureRequest, run: str, data_dir: Path) -> str:
        if request.param == "folder":
            (data_dir / "server.json").write_text('{"url": "http://127.0.0.1:9", "pid": 999999999, "boot": "gone"}')
        return run

    def test_everything_is_shown(self, mok: Mok, where: str) -> None:
        shown = mok("show", "latest", "--json").json
        assert shown["run"]["id"] == where and shown["run"]["status"] == "succeeded" and shown["job"]["seed"] == 7
        assert shown["run"]["weights"] in mok("show", where).out
        assert "step 2 is done" in mok("logs", where).out and len(mok("logs", where, "--json").json["items"]) == 4
        assert where in mok("runs", "--status", "succeeded").out and where not in mok("runs", "--status", "failed").out
        assert shown["run"]["weights"][:19] in mok("runs").out
        record = mok("provenance", where, "--json").json
        assert record["identity"]["run"] == where and record["chain"]["head"] == shown["run"]["head"]
        assert record["chain"]["head"] in mok("provenance", where).out

    def test_a_run_checks_as_intact(self, mok: Mok, where: str) -> None:
        result = mok("verify", where, "--json")
        assert result.status == 0 and (result.json["verdict"], result.json["run"]) == ("INTACT", where)
        assert mok("provenance", where, "--verify").out.splitlines()[-1].startswith("INTACT")

    def test_one_bit_of_a_checkpoint_is_tampered(self, mok: Mok, where: str, settings: Settings) -> None:
        """Case 10, by the command's own measurement."""
        flip_a_bit(settings.checkpoints(where) / "step-00000001" / "model.safetensors")
        result = mok("verify", where)
        assert result.status == 4 and "TAMPERED" in result.out and "model.safetensors" in result.out
        assert mok("provenance", where, "--verify").status == 4

    def test_one_bit_of_a_stored_loss_is_tampered(self, mok: Mok, where: str, database: Database) -> None:
        with database.write() as tx:
            row = (step_records.c.run_id == where) & (step_records.c.step == 2)
            tx.execute(update(step_records).where(row).values(loss_bits="40400001"))
        result = mok("verify", where, "--json")
        assert result.status == 4 and result.json["verdict"] == "TAMPERED" and result.json["step"] in (2, 3)

    def test_what_is_not_there_is_not_found(self, mok: Mok, where: str) -> None:
        for verb in ("show", "logs", "provenance", "verify"):
            result = mok(verb, "run_0198c0de5e1f7000800000000000c0de")
            assert result.status == 6 and "there is no run" in result.err
        error = json.loads(mok("show", "x", "--json").err)["error"]
        assert error["code"] == "not_found"

    def test_lists_are_paged(self, mok: Mok, where: str, worker: Worker) -> None:
        from mok_service import jobs
        from mok_service.spec import parse_job

        for _ in range(4):
            jobs.submit(worker.db, parse_job(SPEC))
        for verb in ("runs", "jobs"):
            first = mok(verb, "--limit", "3", "--json").json
            second = mok(verb, "--limit", "3", "--cursor", first["next_cursor"], "--json").json
            assert len({item["id"] for item in first["items"] + second["items"]}) == 5 and second["next_cursor"] is None


class TestVerdicts:
    def test_a_rerun_reproduces(self, mok: Mok, run: str, worker: Worker) -> None:
        thread = while_working(worker, {})
        result = mok("rerun", run, "--threads", "2", "--watch")
        thread.join()
        assert result.status == 0 and result.out.splitlines()[-1].startswith("REPRODUCED")
        newest = mok("runs", "--json").json["items"][0]
        assert newest["execution"]["threads"] == 2 and newest["reproduces"] == run
        assert mok("diff", run, newest["id"]).status == 0

    @pytest.mark.parametrize("verb", [["rerun", "--watch"], ["verify", "--level", "rerun"]])
    def test_one_bit_of_a_rerun_is_diverged(self, mok: Mok, run: str, worker: Worker, verb: list[str]) -> None:
        """Case 10: exit status 3, the step, the field, and both bit patterns."""
        thread = while_working(worker, {2: 3.0000002384185791015625})
        result = mok(verb[0], run, *verb[1:])
        thread.join()
        assert result.status == 3 and "DIVERGED" in result.out and "step 2, loss: expected 40400000, got 40400001" in result.out
        other = mok("runs", "--json").json["items"][0]["id"]
        compared = mok("diff", run, other, "--json")
        assert compared.status == 3
        assert compared.json["step"] == 2
        assert compared.json["change"] == {"field": "loss", "first": "40400000", "second": "40400001"}
        assert "different: step 2, loss" in mok("diff", run, other).out

    def test_a_rerun_that_is_not_watched_is_only_made(self, mok: Mok, run: str) -> None:
        made = mok("rerun", run, "--json")
        assert made.status == 0 and (made.json["kind"], made.json["status"]) == ("reproduction", "queued")
        assert mok("rerun", made.json["id"]).status == 1, "it hasn't ended"

    def test_a_rerun_that_fails_is_inconclusive(self, mok: Mok, run: str, worker: Worker) -> None:
        mok("rerun", run)
        worker.fail("out_of_memory", "the machine ran out of memory")
        shown = mok("show", "latest", "--json").json
        assert shown["run"]["verdict"] == "INCONCLUSIVE"
        assert mok("diff", run, shown["run"]["id"]).status == 5

    def test_runs_of_different_jobs_differ_in_spec_and_step(self, mok: Mok, run: str, spec_file: Path, worker: Worker) -> None:
        spec_file.write_text(json.dumps(spec(seed=8, optimizer={"lr": 0.01})))
        mok("submit", spec_file)
        result = mok("diff", run, worker.work())
        assert result.status == 3
        assert "training.seed: 7 / 8" in result.out and "training.optimizer.lr: 0.0003 / 0.01" in result.out
        assert "different: step 0, weights" in result.out


class TestNoService:
    def test_verbs_that_need_one_say_so(self, mok: Mok, spec_file: Path) -> None:
        for line in (["submit", spec_file], ["watch", "x"], ["rerun", "x"], ["cancel", "x"], ["verify", "x", "--level", "rerun"]):
            result = mok(*line)
            assert result.status == 7 and "mok serve" in result.err

    def test_an_address_where_nothing_answers_is_unreachable(self, mok: Mok) -> None:
        result = mok("runs", "--url", "http://127.0.0.1:9")
        assert result.status == 7 and "no service answers at http://127.0.0.1:9" in result.err

    @pytest.mark.parametrize("url", ["", "x", "ftp://127.0.0.1", "http://127.0.0.1:port"])
    def test_what_is_no_address_is_a_usage_error(self, mok: Mok, url: str) -> None:
        assert mok("watch", "x", "--url", url).status == (7 if url == "" else 2)

    def test_an_empty_folder_has_no_runs_and_gets_none(self, mok: Mok, data_dir: Path) -> None:
        shutil.rmtree(data_dir)
        for verb in ("runs", "jobs", "show"):
            result = mok(verb, *(["latest"] if verb == "show" else []))
            assert result.status == 6 and not data_dir.exists()

    def test_an_old_database_is_not_migrated_by_reading(self, mok: Mok, data_dir: Path, database: Database) -> None:
        from sqlalchemy import text

        with database.write() as tx:
            tx.execute(text("DELETE FROM alembic_version"))
        database.close()
        before = (data_dir / "mok.sqlite3").read_bytes()
        for line in (["runs"], ["db", "check"]):
            result = mok(*line)
            assert result.status == 1 and "schema none" in result.err
        assert (data_dir / "mok.sqlite3").read_bytes() == before

    def test_the_database_is_upgraded_and_checked(self, mok: Mok, data_dir: Path) -> None:
        shutil.rmtree(data_dir)
        assert mok("db", "check").status == 6
        assert mok("db", "upgrade").status == 0
        assert mok("db", "check", "--json").json["schema"] == "current"
        assert mok("show", "latest").status == 6

    def test_latest_of_no_runs_is_not_found(self, mok: Mok) -> None:
        assert mok("show", "latest").status == 6

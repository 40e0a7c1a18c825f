"""mok quota, and the queue in mok runs and mok show."""

from __future__ import annotations

from pathlib import Path

import pytest

from mok_service import jobs
from mok_service.db.session import Database
from mok_service.spec import parse_job
from tests.cli.conftest import Mok
from tests.services import SPEC


def test_limits_are_set_shown_and_taken_off(mok: Mok) -> None:
    assert "no limit" in mok("quota", "show").out
    changed = mok("quota", "set", "--tenant", "ada", "--runs", "4", "--checkpoint-bytes", "9000000000", "--weight", "2", "--json")
    assert changed.status == 0 and changed.json["limits"]["runs_max"] == 4
    shown = mok("quota", "show", "--tenant", "ada")
    assert [line.split()[:2] for line in shown.out.splitlines() if line.startswith(("runs", "checkpoint_bytes", "weight"))] == [
        ["weight", "2"], ["runs", "4"], ["checkpoint_bytes", "9,000,000,000"]]
    assert mok("quota", "set", "--tenant", "ada", "--runs", "none", "--json").json["limits"]["runs_max"] is None
    assert mok("quota", "show", "--json").json["limits"]["runs_max"] is None, "another tenant's"


@pytest.mark.parametrize(("arguments", "says"), [
    (("--runs", "many"), "'many' is no limit; allowed: a whole number, or none"), (("--weight", "0"), "weight = 0.0"),
    (("--devices", "-1"), "'-1' is no limit"), (("--jobs-a-day", "99999999999"), "jobs_a_day_max = 99999999999"),
])
def test_what_is_no_limit_is_refused(mok: Mok, arguments: tuple[str, ...], says: str) -> None:
    result = mok("quota", "set", *arguments)
    assert result.status == 2 and says in " ".join(result.err.replace("│", " ").split())


def test_without_a_database_there_is_no_quota(mok: Mok, data_dir: Path) -> None:
    (data_dir / "mok.sqlite3").unlink()
    assert mok("quota", "show").status == 6 and not (data_dir / "mok.sqlite3").exists()


def test_a_queued_run_says_what_it_waits_for(mok: Mok, database: Database) -> None:
    run_id = jobs.submit(database, parse_job(SPEC)).run.id
    line = next(line for line in mok("runs").out.splitlines() if run_id in line)
    assert line.endswith("1 of 1: no scheduler has reported a machine in the last 120 s")
    shown = mok("show", run_id).out
    assert "1 of 1" in shown and "no scheduler has reported a machine" in shown
    assert mok("show", run_id, "--json").json["run"]["queue"]["position"] == 1

"""Bisects through database, scheduler and real kernels: what they find, that it's the same after interruptions, and by REST, the
command and offline."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from mok_service import jobs, runs, verifying
from mok_service.cli.local import Local
from mok_service.db.tables import step_records
from mok_service.errors import Conflict, InvalidSpec, NotFound
from mok_service.export import verify_export, write_export
from mok_service.provenance.keys import signing_key
from mok_service.runs import Verification
from mok_workers import bisecting, opening
from mok_workers.attempt import Control
from mok_workers.messages import Payload
from tests.api.conftest import hold_against_description
from tests.audits import attested, opened, serving
from tests.bisects import FAULTY, kernels, train_three
from tests.cli.conftest import Mok, data_dir, mok  # noqa: F401
from tests.training.test_bisect import tiny
from tests.workers.world import World


@pytest.fixture(scope="module", autouse=True)
def faulty_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        kernels(patch)
        yield


@pytest.fixture(scope="module")
def trained(faulty_kernels: None, migrated_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...]]:
    folder = tmp_path_factory.mktemp("trained")
    return folder, train_three(migrated_file, folder)


@pytest.fixture
def folder(trained: tuple[Path, tuple[str, ...]], tmp_path: Path) -> Path:
    shutil.copytree(trained[0], tmp_path / "service")
    return tmp_path / "service"


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    with opened(folder) as world:
        yield world


@pytest.fixture
def ids(trained: tuple[Path, tuple[str, ...]]) -> tuple[str, ...]:
    """A run, one that the faulty kernels made, and one that good ones made again."""
    return trained[1]


def bisect(world: World, run: str, against: str | None = None, **given: Any) -> Verification:
    asked = verifying.bisect(world.db, run, against, now=world.now, **given)
    world.ended(str(asked.executed_by))
    return runs.get_verification(world.db, asked.id)


def names_the_fault(found: Verification) -> bool:
    assert found.report is not None and found.report["operation"] is not None, found
    tensor = found.report["operation"]["outputs"][0]
    bits = [int(tensor["element"][side], 16) for side in ("first_bits", "second_bits")]
    return (found.verdict, found.step, found.field) == ("DIVERGED", 3, "mok_cross_entropy") and bits[0] ^ bits[1] == 1 << 27


def test_two_runs_of_which_one_has_a_fault(world: World, ids: tuple[str, ...]) -> None:
    asked = verifying.bisect(world.db, ids[0], ids[1], now=world.now)
    assert (asked.status, asked.level, asked.progress) == ("queued", "bisect", runs.types.Progress(0, 5))
    executed = world.ended(str(asked.executed_by))
    found = runs.get_verification(world.db, asked.id)
    assert names_the_fault(found), found
    assert (executed.kind, executed.status, executed.verdict, executed.step) == ("bisect", "succeeded", "DIVERGED", None)
    assert found.status == "done" and found.progress is not None and found.progress.done == found.progress.of
    assert found.plan is not None and (found.plan["first"]["threads"], found.plan["second"]["threads"]) == (1, 2)
    assert (found.expected, found.got) == tuple(
        found.report["operation"]["outputs"][0]["element"][side] for side in ("first_bits", "second_bits"))  # type: ignore[index]
    assert runs.checkpoints(world.db, executed.id) == [] and runs.steps(world.db, executed.id) == []
    told = [event.payload for event in runs.events(world.db, executed.id) if event.type == "progress"]
    assert told and told[-1]["what"] == "trace" and told[-1]["step"] == 3
    assert any("tracing" in line.line.message for line in runs.logs(world.db, executed.id))
    for run in (*ids[:2], executed.id):
        assert found in runs.verifications(world.db, run), "it's shown with both runs"
    with pytest.raises(Conflict, match="is a bisect of"):
        verifying.bisect(world.db, executed.id)


def test_what_equal_runs_and_replays_show(world: World, ids: tuple[str, ...]) -> None:
    equal = bisect(world, ids[0], ids[2])
    assert (equal.verdict, equal.status) == ("REPRODUCED", "done") and equal.report is not None
    assert equal.report["operation"] is None and equal.report["counts"]["steps"] == 0
    assert bisect(world, ids[0]).verdict == "REPRODUCED", "a replay"
    assert names_the_fault(bisect(world, ids[0], against_execution=FAULTY))
    odd = bisect(world, ids[0], ids[1], against_execution={"threads": 1})
    assert odd.verdict == "INCONCLUSIVE"
    assert odd.message == f"step 3 of {ids[1]} is not reproducible: replays agree with {ids[0]}"


def test_what_is_refused(world: World, ids: tuple[str, ...]) -> None:
    with pytest.raises(InvalidSpec, match="the run itself"):
        verifying.bisect(world.db, ids[0], ids[0])
    with pytest.raises(NotFound):
        verifying.bisect(world.db, ids[0], "run_0198c0de5e1f7000800000000000c0de")
    other = jobs.submit(world.db, tiny(seed=8), now=world.now).run.id
    with pytest.raises(Conflict, match="once it has ended"):
        verifying.bisect(world.db, ids[0], other)
    world.ended(other)
    with pytest.raises(InvalidSpec, match=r"training.seed is 7 in the first run and 8 in the second"):
        verifying.bisect(world.db, ids[0], other)


def test_records_that_contradict_themselves(world: World, ids: tuple[str, ...]) -> None:
    """One that is changed before it's asked for is found at once; afterwards, by the worker."""
    def change(run: str, tokens: int) -> None:
        with world.db.write() as tx:
            row = (step_records.c.run_id == run) & (step_records.c.step == 2)
            tx.execute(update(step_records).where(row).values(tokens=tokens))

    queued = [verifying.bisect(world.db, *pair, now=world.now) for pair in (ids[:2], (ids[1], ids[0]))]
    tokens = {record.step: record.tokens for record in world.records(ids[0])}[2]
    change(ids[0], tokens + 1)
    at_once = verifying.bisect(world.db, ids[0], ids[1], now=world.now)
    assert (at_once.verdict, at_once.status, at_once.executed_by) == ("TAMPERED", "done", None)
    with pytest.raises(Conflict, match="contradicts itself"):
        verifying.bisect(world.db, ids[1], ids[0], now=world.now)
    world.ended(*(str(one.executed_by) for one in queued))
    verdicts = [runs.get_verification(world.db, one.id) for one in queued]
    assert [found.verdict for found in verdicts] == ["TAMPERED", "INCONCLUSIVE"], "it says nothing about the other run"
    assert all(f"the record of {ids[0]} contradicts itself" in str(found.message) for found in verdicts)


class Interrupted:
    """Opens the real thing; the first bisects fail, or wait to be stopped, before the replay of a step."""

    def __init__(self, step: int, failures: int) -> None:
        self.step, self.failures, self.reached = step, failures, False

    def __call__(self, payload: Payload, control: Control) -> Any:
        training = opening.open_training(payload, control)
        if not isinstance(training, bisecting.BisectTraining):
            return training
        progress = training._progress

        def interrupted(what: str, step: int, last: int) -> None:
            progress(what, step, last)
            if step == self.step and self.failures:
                self.failures -= 1
                raise OSError(28, "No space left on device")
            while step == self.step and not self.reached:
                progress(what, step, last)

        self.reached |= self.failures > 0
        training._progress = interrupted  # type: ignore[method-assign]
        return training


def test_after_a_crash_it_begins_anew_and_finds_the_same(folder: Path, ids: tuple[str, ...]) -> None:
    with opened(folder, Interrupted(3, failures=1)) as world:
        asked = verifying.bisect(world.db, ids[0], ids[1], now=world.now)
        run = str(asked.executed_by)
        world.until(lambda: world.run(run).ended or world.wait(2) is not None, "ended")
        found = runs.get_verification(world.db, asked.id)
        assert names_the_fault(found) and world.ends(run) == ["failed", "finished"]
        assert bisect(world, ids[0], ids[1]).report == found.report


def test_paused_resumed_and_cancelled(folder: Path, ids: tuple[str, ...]) -> None:
    opens = Interrupted(3, failures=0)
    with opened(folder, opens) as world:
        asked = verifying.bisect(world.db, ids[0], ids[1], now=world.now)
        run = str(asked.executed_by)
        at = lambda: runs.get_verification(world.db, asked.id)  # noqa: E731
        world.until(lambda: at().progress == runs.types.Progress(2, 3), "step 3")
        runs.pause(world.db, run, now=world.now)
        world.until(lambda: world.run(run).status == "paused", "paused")
        assert (at().status, at().verdict) == ("paused", None)
        opens.reached = True
        runs.resume(world.db, run, now=world.now)
        world.ended(run)
        assert names_the_fault(at())
        opens.reached = False
        asked = verifying.bisect(world.db, ids[0], ids[1], now=world.now)
        world.until(lambda: at().progress == runs.types.Progress(2, 3), "step 3")
        verifying.cancel_verification(world.db, asked.id, now=world.now)
        assert world.ended(str(asked.executed_by)).status == "cancelled"
        assert (at().status, at().verdict, at().report) == ("cancelled", None, None)
        assert asked.id not in [ended for ended, _ in runs.unattested(world.db)], "nothing to sign"


def is_described(answer: httpx.Response) -> None:
    answer.read()
    hold_against_description(answer)


def test_by_rest_and_by_the_command(mok: Mok, world: World, ids: tuple[str, ...]) -> None:  # noqa: F811
    with serving(world) as service, httpx.Client(base_url=service.url, event_hooks={"response": [is_described]}) as api:
        body = {"run": ids[0], "level": "bisect", "against": ids[1]}
        answers = [api.post("/v1/verifications", json=body, headers={"Idempotency-Key": "k"}) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [202, 202] and answers[0].json()["id"] == answers[1].json()["id"]
        for wrong in ({"segments": 2}, {"level": "audit"}, {"against": ids[0]}, {"against_execution": {"threads": -1}}):
            assert api.post("/v1/verifications", json=body | wrong).status_code == 422, wrong
        result = mok("verify", ids[0], "--level", "bisect", "--against", ids[1], "--url", service.url)
        assert result.status == 3 and "DIVERGED step 3, operation " in result.out, result
        for words in ("mok_cross_entropy", "head and loss", "equal, so it is this operation itself", "operation digests"):
            assert words in result.out, result.out
        told = mok("verify", ids[0], "--level", "bisect", "--against-threads", "1", "--url", service.url, "--json")
        assert (told.status, told.json["verdict"], told.json["report"]["type"]) == (0, "REPRODUCED", "mok.bisect/v1")
        assert mok("verify", ids[0], "--against", ids[1], "--url", service.url).status == 2
        found = api.get(f"/v1/verifications/{answers[0].json()['id']}").json()
        assert found["verdict"] == "DIVERGED" and found["report"]["operation"]["inputs_equal"]
        assert api.get(f"/v1/runs/{found['executed_by']}/lineage").status_code == 200
        assert "bisect" in mok("show", ids[1], "--url", service.url).out


def test_its_verdict_is_signed_exported_and_checked_offline(world: World, ids: tuple[str, ...], tmp_path: Path) -> None:
    found = bisect(world, ids[0], ids[1])
    key = signing_key(world.settings.key_file())
    attested(world, key)
    assert runs.unattested(world.db) == []
    with pytest.raises(NotFound, match="its verdict is attested"):
        runs.get_attestation(world.db, str(found.executed_by))
    write_export(Local(world.db, world.settings), ids[0], tmp_path / "export")
    trusted = {key.public.id: key.public}
    checked = verify_export(tmp_path / "export", trusted)
    assert checked.verdict == "INTACT" and f"the bisect {found.id} (DIVERGED)" in checked.message
    path = tmp_path / "export" / "record.json"
    record = json.loads(path.read_text())
    element = record["verifications"][0]["report"]["operation"]["outputs"][0]["element"]
    for name, value in (("first_bits", "00000000"), ("first", 1.5)):
        old, element[name] = element[name], value
        path.write_text(json.dumps(record, indent=1) + os.linesep)
        assert verify_export(tmp_path / "export", trusted).verdict == "TAMPERED", name
        element[name] = old

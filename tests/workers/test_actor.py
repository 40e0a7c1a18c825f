"""One process, one attempt after the other: what it refuses, and that late calls find nobody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mok_service.spec import parse_job, resolve
from mok_workers import actor
from mok_workers.actor import TrainActor, load_here, open_here
from mok_workers.attempt import Open
from mok_workers.messages import Devices, Payload, Question, Refusal, Reply, Seen
from tests.operating.installation import job as small_job
from tests.workers.fakes import Opens, chain, job_document, nothing, payload, unchanged

ASKED = Question(Seen(), 256, 30.0, 30.0)


class Left(BaseException):
    """What `os._exit` does to the one thread that calls it here."""


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []

    def leave(status: int) -> None:
        found.append(status)
        raise Left

    monkeypatch.setattr(actor.os, "_exit", leave)
    return found


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> TrainActor:
    monkeypatch.setattr(TrainActor, "_watch", lambda self: None)
    return TrainActor(unchanged, nothing)


def carried_out(process: TrainActor, asked: Payload, opens: Open) -> list[Reply]:
    """All answers of an attempt, until it has ended."""
    answer = process.begin(asked, opens, ASKED)
    assert isinstance(answer, Reply)
    answers = [answer]
    seen = answer.after(Seen())
    while answers[-1].status == "running":
        answers.append(process.advance(asked.name, replace(ASKED, seen=seen)))
        seen = answers[-1].after(seen)
    return answers


def test_attempts_follow_each_other_and_each_says_how_many_were_before(process: TrainActor, tmp_path: Path) -> None:
    before = []
    for number, steps in enumerate((6, 3, 6)):
        asked = replace(payload(tmp_path / str(number), steps=steps), name=f"run_{number}-1")
        answers = carried_out(process, asked, Opens())
        assert answers[-1].status == "done"
        assert [record for answer in answers for record in answer.records] == list(chain(job_document(steps)))
        before += [answer.started.placement["attempts_before"] for answer in answers if answer.started is not None]
        resting = process.rest(asked.name, 60.0)
        assert resting is not None and resting.resident_bytes > 0 and 0.0 < resting.available <= 1.0
        assert process.rest(asked.name, 60.0) is not None, "it may be asked for again"
    assert before == [0, 1, 2]


def test_late_calls_about_an_earlier_attempt_do_nothing_to_this_one(
    process: TrainActor, tmp_path: Path, exits: list[int]
) -> None:
    first, second = (replace(payload(tmp_path / name), name=name) for name in ("run_a-1", "run_b-1"))
    carried_out(process, first, Opens())
    opens = Opens({3: "wait"}, gate=True)
    assert isinstance(process.begin(second, opens, ASKED), Reply)
    process.leave(first.name)
    assert process.rest(first.name, 60.0) is None
    with pytest.raises(LookupError, match="run_a-1 isn't executed here"):
        process.stop(first.name, True)
    with pytest.raises(LookupError):
        process.advance(first.name, ASKED)
    assert opens.go is not None and not exits
    opens.go.set()
    answer = process.advance(second.name, ASKED)
    while answer.status == "running":
        answer = process.advance(second.name, ASKED)
    assert answer.status == "done"


def test_who_ends_an_attempt_by_name_ends_its_process(process: TrainActor, tmp_path: Path, exits: list[int]) -> None:
    process.leave("")
    assert not exits, "it has none"
    asked = payload(tmp_path)
    process.begin(asked, Opens(), ASKED)
    with pytest.raises(Left):
        process.leave(asked.name)
    assert exits == [actor.EXIT_LEASE_EXPIRED]


def test_a_process_whose_programs_have_changed_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainActor, "_watch", lambda self: None)
    programs = {"code": "sha256:a"}
    process = TrainActor(lambda: dict(programs), nothing)
    carried_out(process, replace(payload(tmp_path / "a"), name="run_a-1"), Opens())
    programs["code"] = "sha256:b"
    refusal = process.begin(replace(payload(tmp_path / "b"), name="run_b-1"), Opens(), ASKED)
    assert isinstance(refusal, Refusal) and "changed" in refusal.reason
    assert not (tmp_path / "b").exists(), "it has done nothing of it"
    programs["code"] = "sha256:a"
    assert isinstance(process.begin(replace(payload(tmp_path / "b"), name="run_b-1"), Opens(), ASKED), Reply)


def test_a_process_whose_attempt_still_runs_refuses_another(
    process: TrainActor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "TIDY_SECONDS_MAX", 0.0)
    opens = Opens({1: "wait"}, gate=True)
    asked = replace(payload(tmp_path / "a"), name="run_a-1")
    process.begin(asked, opens, ASKED)
    assert process.rest(asked.name, 60.0) is None
    refusal = process.begin(replace(payload(tmp_path / "b"), name="run_b-1"), Opens(), ASKED)
    assert isinstance(refusal, Refusal) and "hasn't ended" in refusal.reason
    assert opens.go is not None
    opens.go.set()


def test_an_edited_source_and_another_library_are_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libmok.so"
    library.write_bytes(b"one")
    monkeypatch.setenv("MOK_LIBRARY", str(library))
    monkeypatch.setattr("mok_service.environment._checkout", lambda: None)
    measured = actor.measure_here()
    assert actor.measure_here() == measured
    library.write_bytes(b"two")
    assert actor.measure_here() != measured
    library.write_bytes(b"one")
    (tmp_path / "new-1.dist-info").mkdir()
    (tmp_path / "new-1.dist-info" / "METADATA").write_text("Name: new\nVersion: 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert actor.measure_here() != measured


@pytest.mark.parametrize("busy", [False, True])
def test_it_leaves_when_nobody_asks(
    busy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exits: list[int]
) -> None:
    watch = TrainActor._watch
    monkeypatch.setattr(TrainActor, "_watch", lambda self: None)
    monkeypatch.setattr(actor, "WATCH_SECONDS", 0.0)
    process = TrainActor(unchanged, nothing)
    opens, asked = Opens({1: "wait"}, gate=True), payload(tmp_path)
    if busy:
        process.begin(asked, opens, replace(ASKED, lease_seconds=0.0))
    else:
        process.rest("", 0.0)
    with pytest.raises(Left):
        watch(process)
    assert exits == [actor.EXIT_LEASE_EXPIRED if busy else actor.EXIT_IDLE]
    assert opens.go is not None
    opens.go.set()


def real(folder: Path, name: str, **training: Any) -> Payload:
    document = small_job(11, steps=4)
    document["training"] |= training
    job = resolve(parse_job(document))
    asked = {"training": job.training.model_dump(mode="json"), "execution": job.execution.model_dump(mode="json")}
    return Payload(name, asked, (), str(folder / name), None, None, (), 30.0, "here", Devices("cpu", 1, 0))


def failing(opens: Open, at: int) -> Open:
    """Opens a real training that fails after a step."""
    def open_failing(asked: Payload, control: Any) -> Any:
        training = opens(asked, control)
        records: Callable[[], Any] = training.records

        def some() -> Any:
            for record in records():
                yield record
                if record.step == at:
                    raise RuntimeError("a fault in the middle of it")

        training.records = some  # type: ignore[method-assign]
        return training

    return open_failing


def test_what_an_attempt_computes_doesnt_depend_on_those_before_it(process: TrainActor, tmp_path: Path) -> None:
    """The same job first and last, others between: of another size, in the other precision, and one that fails."""
    load_here()
    wider = {"model": {**small_job(0)["training"]["model"], "hidden_size": 32, "experts": 8, "layers": 2}}
    ended = {}
    for name, opens, training in (
        ("first", open_here, {}), ("wider", open_here, {**wider, "precision": "bf16"}), ("failed", failing(open_here, 2), wider),
        ("last", open_here, {}),
    ):
        answers = carried_out(process, real(tmp_path, name, **training), opens)
        ended[name] = answers[-1].status, [record.body() for answer in answers for record in answer.records]
    assert ended["last"] == ended["first"] and ended["first"][0] == "done" and len(ended["first"][1]) == 5
    assert ended["wider"][1] != ended["first"][1] and ended["failed"][0] == "failed"
    files = [sorted(p for p in (tmp_path / name).rglob("*") if p.is_file()) for name in ("first", "last")]
    assert [p.name for p in files[0]] == [p.name for p in files[1]]
    weights = [[p.read_bytes() for p in found if p.suffix == ".safetensors"] for found in files]
    assert weights[0] and weights[0] == weights[1]

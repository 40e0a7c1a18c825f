"""An attempt's answers: complete, replayable, in order; it stops, resumes and gives up as asked."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mok_service.errors import InvalidSpec, KernelError, NonFinite, SourceDrift
from mok_service.provenance.chain import StepRecord
from mok_workers import attempt as module
from mok_workers.attempt import Attempt, classify
from mok_workers.messages import Reply, Seen
from tests.workers.fakes import MANIFEST, Opens, chain, job_document, payload

SECONDS_MAX = 20.0


def collect(attempt: Attempt, seen: Seen = Seen(), max_records: int = 256) -> tuple[list[Reply], Seen]:  # noqa: B008 (frozen)
    """Every reply up to the last."""
    replies: list[Reply] = []
    while not replies or replies[-1].status == "running":
        reply = attempt.advance(seen, max_records=max_records, max_seconds=SECONDS_MAX)
        assert not reply.empty, "the attempt went silent"
        replies.append(reply)
        seen = reply.after(seen)
    return replies, seen


def started(folder: Path, opens: Opens | None = None, last_step: int | None = None, steps: int = 6) -> Attempt:
    attempt = Attempt(payload(folder, last_step=last_step, steps=steps), opens or Opens())
    attempt.start()
    return attempt


def bodies(replies: list[Reply]) -> list[StepRecord]:
    return [record for reply in replies for record in reply.records]


def test_it_tells_everything_once_and_ends_with_the_final_checkpoint(tmp_path: Path) -> None:
    replies, seen = collect(started(tmp_path))
    expected = list(chain(job_document()))
    assert bodies(replies) == expected
    assert [c.step for reply in replies for c in reply.checkpoints] == [2, 4, 6]
    first = [reply.started for reply in replies if reply.started]
    assert len(first) == 1 and first[0].manifest == MANIFEST and first[0].resumed_from is None
    final = replies[-1].final
    assert final is not None and final.head == expected[-1].head() and final.state == expected[-1].state
    assert (seen.started, seen.step, seen.checkpoint) == (True, 6, 6) and seen.lines == 4
    assert [line.sequence for reply in replies for line in reply.lines] == [0, 1, 2, 3]


def test_asking_again_with_the_same_value_gives_the_same_again(tmp_path: Path) -> None:
    attempt = started(tmp_path)
    _, end = collect(attempt)
    assert attempt.advance(end) == attempt.advance(end), "also after the end"

    attempt = started(tmp_path / "b")
    assert attempt.join(SECONDS_MAX)
    first = attempt.advance(Seen(), max_records=3)
    assert attempt.advance(Seen(), max_records=3) == first
    assert [r.step for r in first.records] == [0, 1, 2] and [c.step for c in first.checkpoints] == [2]
    assert first.status == "running", "the end comes with the last of everything"
    second = attempt.advance(first.after(Seen()))
    assert [r.step for r in second.records] == [3, 4, 5, 6] and second.status == "done"
    assert attempt.advance(first.after(Seen())) == second


@pytest.mark.parametrize("seed", range(20))
def test_lost_replies_lose_and_double_nothing(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    attempt, seen, stored = started(tmp_path, steps=30), Seen(), dict[int, StepRecord]()
    lines, checkpoints, status = list[int](), list[int](), "running"
    while status == "running":
        reply = attempt.advance(seen, max_records=choose.randint(1, 7), max_seconds=SECONDS_MAX)
        if choose.random() < 0.5:
            continue  # the reply was lost on the way
        for record in reply.records:
            assert record.step not in stored
            stored[record.step] = record
        for checkpoint in reply.checkpoints:
            assert checkpoint.step in stored, "a checkpoint before its record"
            assert stored[checkpoint.step].head() == checkpoint.head
        checkpoints += [c.step for c in reply.checkpoints]
        lines += [line.sequence for line in reply.lines]
        seen, status = reply.after(seen), reply.status
    assert list(stored.values()) == list(chain(job_document(30)))
    assert checkpoints == list(range(2, 31, 2)) and lines == list(range(len(lines)))


@pytest.mark.parametrize("last_step", range(8))
def test_a_new_attempt_starts_at_the_newest_checkpoint_that_leaves_no_gap(tmp_path: Path, last_step: int) -> None:
    collect(started(tmp_path, steps=8, opens=Opens({7: "crash"})))  # checkpoints 2, 4, 6
    replies, _ = collect(started(tmp_path, steps=8, last_step=last_step))
    resumed = next(reply.started for reply in replies if reply.started)
    base = min(last_step - last_step % 2, 6)
    assert resumed.resumed_from == (base or None)
    expected = list(chain(job_document(8)))
    assert bodies(replies) == expected[base + 1 if base else 0 :]
    told = [c.step for reply in replies for c in reply.checkpoints]
    assert sorted(set(told)) == told and told[-1] == 8 and set(range(2, 9, 2)) == set(told)


def test_an_attempt_that_resumes_at_the_very_end_is_done_at_once(tmp_path: Path) -> None:
    collect(started(tmp_path))
    replies, _ = collect(started(tmp_path, last_step=6))
    assert bodies(replies) == [] and replies[-1].status == "done"
    assert replies[-1].final is not None and replies[-1].final.step == 6
    assert [c.step for reply in replies for c in reply.checkpoints] == [2, 4, 6], "the rows may be missing"


def test_the_training_waits_when_nobody_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNREAD_RECORDS_MAX", 5)
    attempt = started(tmp_path, steps=50)
    reply = attempt.advance(Seen(), max_seconds=SECONDS_MAX)
    while len(reply.records) < 5:
        reply = attempt.advance(Seen())
    assert not attempt.join(0.0) and len(attempt.advance(Seen()).records) == 5
    replies, _ = collect(attempt)
    assert bodies(replies) == list(chain(job_document(50)))


def test_lines_beyond_the_buffer_are_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNREAD_LINES_MAX", 3)
    attempt = started(tmp_path)
    assert attempt.join(SECONDS_MAX)
    attempt.log("never seen")
    reply = attempt.advance(Seen())
    seen = reply.after(Seen())
    assert len(reply.lines) == 3
    attempt.advance(seen)
    attempt.log("x" * 10_000)
    dropped, long = attempt.advance(seen).lines
    assert "dropped" in dropped.message and dropped.level == "warning" and len(long.message) == module.LINE_LENGTH_MAX


@pytest.mark.parametrize("gate_at", [1, 2, 5])
def test_pausing_commits_a_checkpoint_and_going_on_gives_the_same_chain(tmp_path: Path, gate_at: int) -> None:
    opens = Opens({gate_at: "wait"}, gate=True)
    attempt = started(tmp_path, opens)
    attempt.stop(checkpoint=True)
    assert opens.go is not None
    opens.go.set()
    replies, seen = collect(attempt)
    assert replies[-1].status == "stopped" and replies[-1].final is None
    assert seen.step == seen.checkpoint or seen.step == 0
    rest, _ = collect(started(tmp_path, last_step=seen.step))
    stored = {r.step: r for r in [*bodies(replies), *bodies(rest)]}
    assert [stored[s] for s in sorted(stored)] == list(chain(job_document()))


def test_stopping_at_once_ends_a_training_that_waits_for_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNREAD_RECORDS_MAX", 2)
    attempt = started(tmp_path)
    attempt.stop(checkpoint=False)
    assert attempt.join(SECONDS_MAX)
    assert collect(attempt)[0][-1].status == "stopped"


def test_it_expires_when_nobody_asks_and_not_before(tmp_path: Path) -> None:
    clock = [100.0]
    attempt = Attempt(payload(tmp_path, lease_seconds=30.0), Opens(), monotonic=lambda: clock[0])
    clock[0] = 130.0
    assert not attempt.expired()
    clock[0] = 130.1
    assert attempt.expired()
    attempt.advance(Seen(), lease_seconds=5.0)
    assert not attempt.expired()
    clock[0] = 135.2
    assert attempt.expired()


@pytest.mark.parametrize(("fault", "end", "reason"), [
    ("nan", "failed", "non_finite"), ("crash", "failed", None), ("memory", "out_of_memory", None),
])
def test_a_failure_comes_last_with_its_reason(tmp_path: Path, fault: str, end: str, reason: str | None) -> None:
    replies, _ = collect(started(tmp_path, Opens({4: fault})))
    assert [r.step for r in bodies(replies)] == [0, 1, 2, 3] and replies[-1].status == "failed"
    failure = replies[-1].failure
    assert failure is not None and failure.end == end and failure.reason == reason
    error = [line for reply in replies for line in reply.lines if line.level == "error"]
    assert len(error) == 1 and ("step 4" in error[0].message if reason else "Traceback" in error[0].message)


@pytest.mark.parametrize(("error", "end", "reason"), [
    (NonFinite("x", reason="non_finite"), "failed", "non_finite"),
    (NonFinite("x"), "failed", "non_finite"),
    (SourceDrift("x", reason="source_drift", file="a"), "failed", "source_drift"),
    (InvalidSpec("no such file"), "failed", "bad_data"),
    (KernelError("mok_product: out of memory: 4 GiB (cpu.cpp:7)", status=2), "out_of_memory", None),
    (KernelError("mok_product: internal: x (cpu.cpp:7)", status=5), "failed", None),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"), "out_of_memory", None),
    (RuntimeError("anything"), "failed", None),
])
def test_errors_are_classified_by_cause(error: Exception, end: str, reason: str | None) -> None:
    failure = classify(error)
    assert (failure.end, failure.reason) == (end, reason) and failure.message

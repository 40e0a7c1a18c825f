"""The real training in an attempt: the bits of `train`, whatever is interrupted, and only from whole checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mok_service.kernels import load_backend
from mok_service.provenance.chain import StepRecord
from mok_service.provenance.manifest import DataManifest
from mok_service.training.checkpoint import folder_name
from mok_workers.attempt import Attempt
from mok_workers.messages import Devices, Payload, Reply, Seen
from mok_workers.opening import open_training
from tests.training.jobs import TEXT, bodies, job, run

SECONDS_MAX = 60.0
STEPS = 6
RUN = f"run_{'0' * 32}"


@pytest.fixture(scope="module")
def undisturbed() -> list[dict[str, Any]]:
    return bodies(run(job(execution={"checkpoint_interval": 0}), load_backend("cpu", threads=1)))


def payload(folder: Path, last_step: int | None = None, *, manifest: DataManifest | None = None, **training: Any) -> Payload:
    spec = job(execution={"checkpoint_interval": 2, "threads": 1}, **training)
    document = {"training": spec.training.model_dump(mode="json"), "execution": spec.execution.model_dump(mode="json")}
    return Payload(
        f"{RUN}-1", document, (str(TEXT),), str(folder / RUN), manifest, last_step, (), 60.0, "here", Devices("cpu", 1, 0)
    )


def execute(given: Payload, until: Callable[[StepRecord], bool] = lambda _: False) -> list[Reply]:
    """Every reply up to the last; the attempt is told to stop with a checkpoint at the first record that `until` holds for."""
    attempt, seen, replies = Attempt(given, open_training), Seen(), list[Reply]()
    attempt.start()
    while not replies or replies[-1].status == "running":
        replies.append(attempt.advance(seen, max_records=1, max_seconds=SECONDS_MAX))
        seen = replies[-1].after(seen)
        if any(map(until, replies[-1].records)):
            attempt.stop(checkpoint=True)
    assert attempt.join(SECONDS_MAX)
    return replies


def reached(step: int, record: StepRecord) -> bool:
    return record.step >= step


def records(replies: list[Reply]) -> list[StepRecord]:
    return [record for reply in replies for record in reply.records]


def lines(replies: list[Reply]) -> str:
    return "\n".join(line.message for reply in replies for line in reply.lines)


def test_an_attempt_gives_the_bits_of_the_loop(tmp_path: Path, undisturbed: list[dict[str, Any]]) -> None:
    replies = execute(payload(tmp_path))
    assert bodies(records(replies)) == undisturbed and replies[-1].status == "done"
    assert [c.step for reply in replies for c in reply.checkpoints] == [2, 4, 6]
    started = next(reply.started for reply in replies if reply.started)
    assert started.resumed_from is None and started.placement["pid"] == os.getpid()
    assert started.environment["kernels"]["backend"] == "cpu"
    assert started.environment["code"]["native"]["cpu"].startswith("sha256:")
    final = replies[-1].final
    assert final is not None and final.head == records(replies)[-1].head() and final.state == records(replies)[-1].state


def test_stopped_at_any_step_and_resumed_it_gives_the_same_bits(tmp_path: Path, undisturbed: list[dict[str, Any]]) -> None:
    stored: dict[int, dict[str, Any]] = {}
    status = ""
    for wanted in range(STEPS + 1):  # it runs ahead of its reader, so it stops a little later than it is told
        replies = execute(payload(tmp_path, max(stored, default=None)), until=partial(reached, wanted))
        for record in records(replies):
            assert stored.setdefault(record.step, record.body()) == record.body()
        status = replies[-1].status
    assert status == "done"
    assert [stored[step] for step in range(STEPS + 1)] == undisturbed


@pytest.mark.parametrize(("last_step", "base"), [(None, None), (0, None), (1, None), (3, 2), (5, 4), (6, 6)])
def test_it_starts_where_the_chain_on_record_has_no_gap(
    tmp_path: Path, undisturbed: list[dict[str, Any]], last_step: int | None, base: int | None
) -> None:
    execute(payload(tmp_path))
    replies = execute(payload(tmp_path, last_step))
    assert next(reply.started for reply in replies if reply.started).resumed_from == base
    assert bodies(records(replies)) == undisturbed[0 if base is None else base + 1 :]
    assert replies[-1].status == "done" and {c.step for reply in replies for c in reply.checkpoints} >= {6}


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "checkpoint.json"])
def test_a_damaged_checkpoint_is_set_aside_and_made_again(
    tmp_path: Path, undisturbed: list[dict[str, Any]], name: str
) -> None:
    execute(payload(tmp_path))
    path = tmp_path / RUN / folder_name(4) / name
    content = bytearray(path.read_bytes())
    content[-5 if name.endswith("safetensors") else 0] ^= 4
    path.write_bytes(content)
    assert_set_aside(payload(tmp_path, 5), undisturbed)
    assert path.read_bytes() != content


def test_a_checkpoint_that_contradicts_the_record_is_set_aside(tmp_path: Path, undisturbed: list[dict[str, Any]]) -> None:
    replies = execute(payload(tmp_path))
    on_record = tuple(c for reply in replies for c in reply.checkpoints)
    path = tmp_path / RUN / folder_name(4) / "checkpoint.json"
    head = str(on_record[1].head)
    assert head in path.read_text()
    path.write_text(path.read_text().replace(head, str(on_record[0].head)))
    assert_set_aside(replace(payload(tmp_path, 5), on_record=on_record), undisturbed)


def assert_set_aside(given: Payload, undisturbed: list[dict[str, Any]]) -> None:
    """The attempt starts from step 2 and makes the checkpoint of step 4 again."""
    replies = execute(given)
    assert next(reply.started for reply in replies if reply.started).resumed_from == 2
    assert "after step 4 is damaged" in lines(replies)
    assert bodies(records(replies)) == undisturbed[3:] and replies[-1].status == "done"
    folder = Path(given.checkpoints)
    assert list(folder.glob(".step-00000004.damaged-*")) and (folder / folder_name(4)).is_dir()


def test_other_data_fail_for_good_and_name_the_file(tmp_path: Path) -> None:
    replies = execute(payload(tmp_path))
    manifest = next(reply.started for reply in replies if reply.started).manifest
    first = manifest.files[0]
    drifted = replace(manifest, files=(replace(first, sha256="0" * 64), *manifest.files[1:]))
    failure = execute(payload(tmp_path, manifest=drifted))[-1].failure
    assert failure is not None and failure.reason == "source_drift" and first.name in failure.message
    assert execute(payload(tmp_path, manifest=manifest))[-1].status == "done"


def test_a_job_may_start_from_another_runs_weights(tmp_path: Path) -> None:
    final = execute(payload(tmp_path))[-1].final
    assert final is not None
    source = {"source": f"{RUN}@{STEPS}", "weights": str(final.state.weights)}
    given = replace(payload(tmp_path, init_from=source), checkpoints=str(tmp_path / "run_2"))
    replies = execute(given)
    first = records(replies)[0].state
    assert replies[-1].status == "done" and first is not None and first.weights == final.state.weights

    wrong = replace(payload(tmp_path, init_from=source | {"weights": f"sha256:{'0' * 64}"}), checkpoints=str(tmp_path / "run_3"))
    failure = execute(wrong)[-1].failure
    assert failure is not None and failure.reason == "bad_data"
    missing = replace(payload(tmp_path, init_from={"source": "no/such", "weights": None}), checkpoints=str(tmp_path / "run_4"))
    failure = execute(missing)[-1].failure
    assert failure is not None and failure.reason == "bad_data" and "no/such" in failure.message

"""Level check: a record that contradicts itself, or its checkpoints' bytes, is never INTACT."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from mok_service import jobs, runs
from mok_service.db.session import Database
from mok_service.provenance.canonical import canonical_bytes
from mok_service.provenance.chain import StateDigests
from mok_service.provenance.digest import sha256
from mok_service.provenance.record import canonical_value, code_drift, document_digest
from mok_service.provenance.verify import Ending, FoundCheckpoint, FoundFile, check, compare
from mok_service.runs import Outcome
from tests.databases import Clock
from tests.service.play import checkpoint, digest, records, start, submit, succeed, trained

Path = tuple[str | int, ...]
# What only an attestation protects: who, when, where and how fast. It says nothing about bits.
UNHASHED = {"identity", "code", "environment", "attempts", "verifications", "layout.physical", "chain.records.seconds",
            "chain.records.learning_rate", "chain.records.metrics", "chain.records.at", "chain.records.attempt",
            "checkpoints.attempt", "checkpoints.created_at", "checkpoints.deleted_at", "checkpoints.run", "checkpoints.folder",
            "checkpoints.size", "arithmetic.invariances", "seeds.rule", "chain.version"}


@pytest.fixture
def record(db: Database, clock: Clock) -> dict[str, Any]:
    """The record of a finished run with two attempts, as it comes over REST."""
    job = submit(db, seed=2**63 - 1).job
    lease, made = start(db, clock), records(job)
    runs.append(db, lease, made[:3], checkpoints=[checkpoint(made[2])], now=clock.now)
    runs.release(db, lease, "worker_lost", "gone", clock.now)
    clock.tick(2)
    run = succeed(db, start(db, clock), clock, made[3:])
    shown: dict[str, Any] = json.loads(json.dumps(runs.provenance(db, run.id), allow_nan=False))
    return shown


def found(record: dict[str, Any]) -> dict[int, FoundCheckpoint]:
    """The checkpoints' bytes, as the record says they are."""
    return {c["step"]: FoundCheckpoint({f["name"]: FoundFile(f["size"], f["sha256"]) for f in c["files"]},
                                       StateDigests.from_dict(c["state"])) for c in record["checkpoints"]}


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield path, value
        return
    for key, item in items:
        yield from leaves(item, (*path, key))


def changed(record: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    other = copy.deepcopy(record)
    place: Any = other
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return other


def another(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, str):
        return value[:-1] + ("0" if value[-1:] != "0" else "1")
    return value + 1


def test_a_whole_record_is_intact(record: dict[str, Any]) -> None:
    finding = check(record, found(record))
    assert (finding.verdict, finding.message) == ("INTACT", "5 step records, 2 checkpoints: nothing contradicts")
    assert record["seeds"]["seed"] == "9223372036854775807" and record["spec"]["training"]["seed"] == 2**63 - 1
    assert record["spec"]["submitted"]["execution"]["micro_batches"] == 0
    assert record["code"]["git"]["commit"] == "d" * 40 and "code" not in record["environment"]
    assert [attempt["end"] for attempt in record["attempts"]] == ["worker_lost", "finished"]
    assert record["final"]["weights"] == record["identity"]["weights"]
    stated = record["spec"]["training_digest"]
    assert stated == str(sha256(canonical_bytes(record["spec"]["training_document"]))), "anyone can check it with sha256sum"


def test_one_changed_value_anywhere_is_tampering(record: dict[str, Any]) -> None:
    tried = 0
    for path, value in leaves(record):
        words = [key for key in path if isinstance(key, str)]
        if any(".".join(words[:length]) in UNHASHED for length in range(1, len(words) + 1)):
            continue
        forged = changed(record, path, another(value))
        finding = check(forged, found(record))
        assert finding.verdict == ("INCONCLUSIVE" if path == ("type",) else "TAMPERED"), f"{path}: {value!r}: {finding}"
        assert finding.field is not None
        tried += 1
    assert tried > 150


@pytest.mark.parametrize("path", [("chain", "records", 3), ("attempts", 0), ("checkpoints", 1), ("data", "manifest", "files", 0),
                                  ("chain", "records", 0), ("chain", "records", 4)])
def test_a_missing_part_is_tampering(record: dict[str, Any], path: Path) -> None:
    forged = copy.deepcopy(record)
    place: Any = forged
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    assert check(forged, found(record)).verdict == "TAMPERED"
    for name in record:
        if name not in ("identity", "code", "environment", "verifications"):
            forged = {key: value for key, value in record.items() if key != name}
            assert check(forged, found(record)).verdict in ("TAMPERED", "INCONCLUSIVE"), name


def test_a_forged_step_with_its_head_breaks_the_next_link(record: dict[str, Any]) -> None:
    forged = copy.deepcopy(record)
    row = forged["chain"]["records"][1]
    row["body"]["tokens"] = "61"
    row["head"] = str(sha256(canonical_bytes(row["body"])))
    finding = check(forged, found(record))
    assert (finding.verdict, finding.step, finding.got) == ("TAMPERED", 2, record["chain"]["records"][2]["body"]["previous"])
    assert finding.expected == row["head"]


@pytest.mark.parametrize("steps", [[2], [4], [2, 4]])
def test_bytes_that_are_not_at_hand_are_inconclusive(record: dict[str, Any], steps: list[int]) -> None:
    have = {step: held for step, held in found(record).items() if step not in steps}
    finding = check(record, have)
    assert (finding.verdict, finding.step) == ("INCONCLUSIVE", steps[0])
    gone = copy.deepcopy(record)
    for held in gone["checkpoints"]:
        if held["step"] in steps:
            held["deleted_at"] = "2026-01-02T00:00:00.000000Z"
    assert check(gone, have).verdict == "INTACT", "bytes that were deleted on record need not be there"


def test_wrong_bytes_are_tampering(record: dict[str, Any]) -> None:
    """Case 10, for the pure function: one flipped bit shows in the file's digest and in the state's."""
    right = found(record)
    weights = right[4].files["weights.safetensors"]
    for files, got in (
        ({**right[4].files, "weights.safetensors": FoundFile(weights.size, "0" * 64)}, f"9000 bytes, sha256 {'0' * 64}"),
        ({**right[4].files, "weights.safetensors": FoundFile(8999, weights.sha256)}, f"8999 bytes, sha256 {weights.sha256}"),
        ({"state.json": right[4].files["state.json"]}, "no such file"),
    ):
        faults = {"weights.safetensors": "tensor 'norm.weight': blake3"}
        finding = check(record, {**right, 4: FoundCheckpoint(files, None, faults)})
        assert (finding.verdict, finding.field, finding.step, finding.got) == ("TAMPERED", "weights.safetensors", 4, got)
        assert "tensor 'norm.weight'" in finding.message
    for part in ("weights", "optimizer", "cursor"):
        state = StateDigests.from_dict({**record["final"], part: str(digest("flipped"))})
        finding = check(record, {**right, 4: FoundCheckpoint(right[4].files, state)})
        assert (finding.verdict, finding.field, finding.step) == ("TAMPERED", part, 4)


def test_a_record_in_the_making_can_be_checked(db: Database, clock: Clock) -> None:
    queued = submit(db).run
    assert check(runs.provenance(db, queued.id), {}).verdict == "INTACT"
    job = submit(db, seed=1).job
    runs.cancel(db, queued.id)
    lease, made = start(db, clock), records(job)
    assert check(runs.provenance(db, lease.run_id), {}).message == "0 step records, 0 checkpoints: nothing contradicts"
    runs.append(db, lease, made[:2], now=clock.now)
    assert check(runs.provenance(db, lease.run_id), {}).verdict == "INTACT"
    runs.finish(db, lease, Outcome("failed", "non_finite", "step 2"), clock.now)
    record = runs.provenance(db, lease.run_id)
    assert check(record, {}).verdict == "INTACT"
    assert (record["final"], record["chain"]["length"], record["chain"]["head"]) == (None, 2, str(made[1].head()))


def test_a_reproductions_record_has_the_same_chain(db: Database, clock: Clock) -> None:
    job, original = trained(db, clock)
    jobs.create_run(db, job.id)
    run = succeed(db, start(db, clock), clock, records(job))
    first, second = runs.provenance(db, original.id), runs.provenance(db, run.id)
    assert first["chain"]["head"] == second["chain"]["head"] and first["chain"]["genesis"] == second["chain"]["genesis"]
    assert first["identity"]["run"] != second["identity"]["run"] and second["identity"]["reproduces"] == original.id


# ---- Two executions --------------------------------------------------------------------------------------------------

def test_comparing_two_executions(db: Database) -> None:
    job = submit(db).job
    whole, done = records(job), Ending("succeeded", "finished", 4)
    assert compare(whole, whole, done, done).verdict == "REPRODUCED"
    finding = compare(whole, records(job, change={3: {"tokens": 61}, 1: {"loss_bits": "80000000"}}), done, done)
    assert (finding.verdict, finding.step, finding.field, finding.got) == ("DIVERGED", 1, "loss", "80000000")
    assert compare(whole, records(job, change={3: {"tokens": 61}}), done, done, ["version 1 -> 2"]).verdict == "INCONCLUSIVE"
    early = compare(whole, whole[:3], done, Ending("failed", "non_finite", 2))
    assert (early.verdict, early.step) == ("INCONCLUSIVE", 2)
    assert early.message == ("equal through step 2: the original succeeded after step 4, "
                             "this run failed (non_finite) after step 2.")
    assert compare(whole, [], done, Ending("cancelled", "user_cancelled", None)).step is None
    assert compare(whole[:3], whole[:3], Ending("running", None, 2), done).verdict == "INCONCLUSIVE"


def test_signs_and_types_show_in_a_documents_digest() -> None:
    assert document_digest("t", {"a": 0.0}) != document_digest("t", {"a": -0.0})
    assert document_digest("t", {"a": 1}) != document_digest("t", {"a": 1.0})
    assert document_digest("t", {"a": 1}) != document_digest("u", {"a": 1})
    assert canonical_value({"a": [2**63 - 1, 1.0, True, None, "x"]}) == {
        "a": ["9223372036854775807", "3ff0000000000000", True, None, "x"]}


def test_unknown_code_is_no_drift() -> None:
    assert code_drift(None, {"code": {"version": "1"}}) == [] and code_drift({"code": None}, {}) == []

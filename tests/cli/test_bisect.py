"""mok bisect and mok diff --tensors on folders, without a service: what they say, and their exit statuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mok_service.kernels import load_backend
from mok_service.kernels.native import NativeBackend
from mok_service.provenance.record import Parts, assemble
from mok_service.spec import training_document
from mok_service.training import bisect_records
from tests.cli.conftest import Mok
from tests.training.jobs import TEXT
from tests.training.planted import Execution, Plant
from tests.training.test_bisect import execution, first_plant, planted, tiny

SPEC = tiny()
PLANT, _ = first_plant(SPEC, "command")


def exported(made: Execution, folder: Path) -> Path:
    """The run as a folder with a record and checkpoints; unsigned."""
    identity = {"run": made.name, "job": "job", "kind": "original", "reproduces": None, "status": made.ending.status,
                "stop_reason": made.ending.stop_reason}  # fmt: skip
    records = made.records
    plain = made.spec.model_dump(mode="json")
    record = assemble(Parts(
        identity=identity, submitted=plain, training=plain["training"], training_document=training_document(made.spec.training),
        execution=plain["execution"], manifest=made.corpus.manifest, records=records, notes=[{"attempt": 1}] * len(records),
        checkpoints=[{**info.as_dict(), "deleted_at": None} for info in made.store.list()], attempts=[], verifications=[],
    ))  # fmt: skip
    (folder / "record.json").write_text(json.dumps(record))
    return folder


def run_folder(root: Path, name: str, plant: Plant | None = None) -> Path:
    folder = root / name
    made = execution(SPEC, folder, "checkpoints", plant)
    return exported(made, folder)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A run, and one with a fault in step 3."""
    return run_folder(tmp_path, "A"), run_folder(tmp_path, "B", PLANT)


@pytest.fixture
def faulty_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file that stands for another build of the kernels, which has the fault."""
    path = tmp_path / "libother.so"
    path.write_bytes(b"")

    def load(name: str, *, library: Path | None = None, **options: Any) -> NativeBackend:
        return load_backend(name, **options) if library is None else planted(PLANT)()

    monkeypatch.setattr(bisect_records, "load_backend", load)
    return path


def test_two_runs_of_which_one_has_a_fault(mok: Mok, folders: tuple[Path, Path], faulty_library: Path) -> None:
    result = mok("bisect", *folders, "--data", TEXT, "--against-library", faulty_library)
    assert result.status == 3 and result.out.startswith("DIVERGED step 3, operation "), result
    for words in ("mok_cross_entropy", "head and loss", "equal, so it is this operation itself", "output grad_logits",
                  "elements differ, the first is [0, 5]", "operation digests"):  # fmt: skip
        assert words in result.out, result.out
    told = mok("bisect", *folders, "--data", TEXT, "--against-library", faulty_library, "--json").json
    assert (told["verdict"], told["step"], told["operation"]["number"]) == ("DIVERGED", 3, PLANT.number)
    assert told["operation"]["inputs_equal"] and told["operation"]["outputs"][0]["element"]["index"] == [0, 5]


def test_a_run_and_a_replay_by_another_library(mok: Mok, folders: tuple[Path, Path], faulty_library: Path) -> None:
    result = mok("bisect", folders[0], "--data", TEXT, "--against-library", faulty_library)
    assert result.status == 3 and "mok_cross_entropy" in result.out
    result = mok("bisect", folders[0], "--data", TEXT, "--against-threads", "2", "--against-isa", "portable")
    assert (result.status, result.out.split()[0]) == (0, "REPRODUCED"), result


def test_a_fault_that_these_kernels_do_not_have(mok: Mok, folders: tuple[Path, Path]) -> None:
    result = mok("bisect", *folders, "--data", TEXT)
    assert result.status == 5, result
    assert f"INCONCLUSIVE step 3 of {folders[1]} is not reproducible: replays agree with {folders[0]}" in result.out
    assert "was made by" not in result.out
    path = folders[1] / "record.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"code": {"native": {"cpu": "sha256:" + "d" * 64}}}))
    result = mok("bisect", *folders, "--data", TEXT)
    assert result.status == 5 and f"{folders[1]} was made by the library sha256:dddd" in result.out
    assert "give that one by --against-library" in result.out and f"{folders[0]} was made" not in result.out


def test_what_is_refused(mok: Mok, folders: tuple[Path, Path], tmp_path: Path) -> None:
    assert mok("bisect", tmp_path / "B", "--data", TEXT, "--isa", "sse").status == 2
    empty = tmp_path / "empty"
    empty.mkdir()
    assert mok("bisect", empty).status == 6
    record = json.loads((folders[1] / "record.json").read_text())
    forged = {**record, "chain": {**record["chain"], "records": record["chain"]["records"][1:]}}
    (folders[1] / "record.json").write_text(json.dumps(forged))
    assert mok("bisect", *folders, "--data", TEXT).status == 4
    record["spec"]["training"]["optimizer"]["lr"] = 0.5
    (folders[1] / "record.json").write_text(json.dumps(record))
    result = mok("bisect", *folders, "--data", TEXT)
    assert result.status == 2 and "training.optimizer.lr is 0.003 in the first and 0.5 in the second" in result.err


def test_diff_of_tensors(mok: Mok, folders: tuple[Path, Path]) -> None:
    result = mok("diff", *folders, "--tensors")
    assert result.status == 3 and "checkpoint of step 4: " in result.out
    assert "model.safetensors: tensor 'lm_head.weight': " in result.out and " elements differ, first element [" in result.out
    assert "no checkpoint that both have differs" in mok("diff", folders[0], folders[0], "--tensors").out
    assert mok("diff", *folders, "--tensors", "--json").json["checkpoint"] == 4

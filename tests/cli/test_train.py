"""`mok train`: the loop by itself, by the native kernels."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Mok
from tests.cli.test_command import ROOT, environment
from tests.training.jobs import SMALL_MODEL, TEXT

SPEC: dict[str, Any] = {
    "training": {
        "name": "small", "seed": 7, "steps": 4, "sequence_length": 24, "batch": {"sequences": 6, "group_sequences": 2},
        "model": SMALL_MODEL, "data": {"source": "files", "paths": ["*.txt"]}, "digest_interval": 2,
    },
    "execution": {"checkpoint_interval": 1},
}


@pytest.fixture
def spec_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(SPEC))
    return path


def train(mok: Mok, spec: Path, *options: str | Path) -> dict[str, Any]:
    result = mok("train", spec, "--data-root", TEXT, "--json", *options)
    assert result.status == 0, result.err
    return dict(result.json)


def test_threads_and_micro_batches_do_not_show(mok: Mok, spec_file: Path) -> None:
    first = train(mok, spec_file, "--threads", "1")
    assert first == train(mok, spec_file, "--threads", "3", "--micro-batches", "1")
    assert first["steps"] == 4 and first["weights"].startswith("sha256:")
    shown = mok("train", spec_file, "--data-root", TEXT)
    assert shown.out.splitlines()[-1] == f"weights {first['weights']}"


def test_a_training_that_was_stopped_goes_on_with_the_same_bits(mok: Mok, spec_file: Path, tmp_path: Path) -> None:
    """Stopped by Ctrl-C after some step, wherever it happens to be."""
    longer = tmp_path / "longer.json"
    longer.write_text(json.dumps({**SPEC, "training": {**SPEC["training"], "steps": 40}}))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "mok_service.cli", "train", longer, "--data-root", TEXT, "--out", out]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (out / "step-00000002").exists():
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    reached = max(int(path.name.removeprefix("step-")) for path in out.glob("step-*"))
    assert 2 <= reached < 40
    assert train(mok, longer, "--out", out, "--resume") == train(mok, longer)


def test_a_drawn_seed_is_kept_beside_the_checkpoints(mok: Mok, tmp_path: Path) -> None:
    """Case 8."""
    unseeded, out = tmp_path / "job.json", tmp_path / "out"
    unseeded.write_text(json.dumps({**SPEC, "training": {**SPEC["training"], "seed": None}}))
    first = train(mok, unseeded, "--out", out)
    assert json.loads((out / "job.json").read_text())["training"]["seed"] == first["seed"]
    assert train(mok, unseeded, "--out", out, "--resume") == first
    assert train(mok, unseeded)["seed"] != first["seed"]


def test_another_job_does_not_go_on_from_the_checkpoints(mok: Mok, spec_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(mok, spec_file, "--out", out)
    again = mok("train", spec_file, "--out", out)
    assert again.status == 1 and "--resume" in again.err
    spec_file.write_text(json.dumps({**SPEC, "training": {**SPEC["training"], "seed": 8}}))
    other = mok("train", spec_file, "--out", out, "--resume")
    assert other.status == 1 and "holds the training sha256:" in other.err
    assert mok("train", spec_file, "--resume").status == 2


def test_a_changed_checkpoint_is_tampered(mok: Mok, spec_file: Path, tmp_path: Path) -> None:
    from tests.services import flip_a_bit

    out = tmp_path / "out"
    train(mok, spec_file, "--out", out)
    flip_a_bit(out / "step-00000004" / "model.safetensors")
    result = mok("train", spec_file, "--data-root", TEXT, "--out", out, "--resume")
    assert result.status == 4 and "model.safetensors" in result.err


def test_data_that_is_not_there_is_refused(mok: Mok, spec_file: Path, tmp_path: Path) -> None:
    assert mok("train", spec_file, "--data-root", tmp_path / "nothing").status == 2
    assert mok("train", spec_file, "--device", "gpu").status == 2

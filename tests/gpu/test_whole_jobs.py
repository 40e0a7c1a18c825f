"""Whole jobs on the GPU give the digests that are stored for the CPU (its twin: tests/golden/test_golden.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mok_service.kernels import load_backend
from mok_service.training.checkpoint import CheckpointStore
from tests.golden.jobs import JOBS, STORED, golden_job, summary
from tests.gpu.twins import backends
from tests.training.jobs import bodies, job, run

pytestmark = pytest.mark.gpu
GOLDEN = json.loads(STORED.read_bytes())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", JOBS)
def test_golden_jobs(name: str, precision: str) -> None:
    _, gpu = backends()
    assert summary(golden_job(name, precision), gpu) == GOLDEN["jobs"][f"{name}, {precision}"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", JOBS)
def test_golden_jobs_as_recorded_graphs(name: str, precision: str) -> None:
    """From the third step on a step is one recorded CUDA graph, on a stream of its own."""
    backends()
    got = summary(golden_job(name, precision), load_backend("cuda", own_stream=True))
    assert got == GOLDEN["jobs"][f"{name}, {precision}"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["shared expert and auxiliary losses", "ragged"])
def test_two_steps(name: str, precision: str) -> None:
    """Short enough to run under compute-sanitizer."""
    cpu, gpu = backends()
    spec = job(**JOBS[name], precision=precision, steps=2, digest_interval=1)
    assert bodies(run(spec, gpu)) == bodies(run(spec, cpu))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_changes_the_device_at_every_step(precision: str, tmp_path: Path) -> None:
    """Stopped after a step on one device and resumed on the other, a run goes on with the same bits."""
    cpu, gpu = backends()
    spec = job(precision=precision)
    expected = bodies(run(spec, cpu))
    store, got = CheckpointStore(tmp_path), []
    for step in range(spec.training.steps):
        records = run(spec, (gpu, cpu)[step % 2], store)
        got += bodies([next(records) for _ in range(2 if step == 0 else 1)])
    assert got == expected

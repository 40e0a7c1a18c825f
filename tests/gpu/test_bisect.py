"""A bisect between the two backends: every operation of a step alike, and a fault of one found (CPU twin: tests/training)."""

from __future__ import annotations

from pathlib import Path

import pytest

from mok_service.kernels.native import NativeBackend
from mok_service.training.loop import Trainer
from mok_service.training.trace import Trace, TracingBackend
from tests.golden.jobs import JOBS
from tests.gpu.twins import backends
from tests.training.jobs import corpus_of, job
from tests.training.planted import Execution
from tests.training.test_bisect import compare, execution, first_plant, tiny

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["shared expert and auxiliary losses", "ragged"])
def test_every_operation_of_a_step_has_the_same_digests(name: str, precision: str) -> None:
    traces: list[Trace] = []
    for backend in backends():
        spec = job(**JOBS[name], precision=precision, steps=2)
        tracing = TracingBackend(backend)
        trainer = Trainer(spec, corpus_of(spec), tracing)
        trainer.advance()
        with tracing.tracing() as trace:
            trainer.advance()
        traces.append(trace)
    assert len(traces[0].operations) > 50
    assert traces[0].operations == traces[1].operations


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_fault_of_one_backend_is_named(precision: str, tmp_path: Path) -> None:
    backends()
    spec = tiny(precision)
    plant, operation = first_plant(spec, precision)
    plant.bit = {"fp32": 27, "bf16": 11}[precision]
    faulty = execution(spec, tmp_path, "cpu", plant).side()
    good = Execution(spec, corpus_of(spec), tmp_path / "gpu", lambda: NativeBackend("cuda"), "gpu").side()
    report = compare(spec, faulty, good)
    assert (report.verdict, report.step) == ("DIVERGED", plant.step), report.message
    at = report.operation
    assert at is not None and (at.number, at.operation, at.inputs) == (plant.number, operation, ())
    bits = [int(b, 16) for b in (at.outputs[0].element.first_bits, at.outputs[0].element.second_bits)]
    assert bits[0] ^ bits[1] == 1 << plant.bit

"""The example is a job that the demo can run on two cores."""

from __future__ import annotations

from pathlib import Path

from mok_service.spec import Machine, check_runnable, estimate, load_job, resolve

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_moe.yaml"


def test_the_example_is_a_small_job_that_runs_anywhere() -> None:
    spec = resolve(load_job(EXAMPLE.read_bytes(), "yaml"))
    assert (spec.training.steps, spec.training.digest_interval, spec.execution.checkpoint_interval) == (60, 10, 20)
    assert spec.training.data.source == "python-stdlib" and spec.training.optimizer.schedule == "cosine"
    check_runnable(spec, Machine(cpu_count=1, memory_bytes=1 << 30))
    cost = estimate(spec)
    assert cost.tokens_per_step * cost.flops_per_token * spec.training.steps < 2e12  # under a minute at 33 GFLOP/s

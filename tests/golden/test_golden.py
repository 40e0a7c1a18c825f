"""Stored digests of whole jobs: any change of a bit, on any machine, shows here."""

from __future__ import annotations

import json

import pytest

from mok_service.kernels import load_backend
from tests.golden.jobs import JOBS, STORED, golden_job, summary

GOLDEN = json.loads(STORED.read_bytes())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", JOBS)
def test_whole_jobs(name: str, precision: str) -> None:
    backend = load_backend("cpu")
    assert backend.info()["arithmetic"] == GOLDEN["arithmetic"]
    assert summary(golden_job(name, precision), backend) == GOLDEN["jobs"][f"{name}, {precision}"]

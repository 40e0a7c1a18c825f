"""Small jobs for tests: the text in tests/golden/text and models that train in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mok_service.kernels.native import NativeBackend
from mok_service.provenance.chain import StepRecord
from mok_service.spec import JobSpec, parse_job, resolve
from mok_service.training.checkpoint import CheckpointStore
from mok_service.training.data import Corpus, open_corpus
from mok_service.training.loop import train

TEXT = Path(__file__).resolve().parents[1] / "golden" / "text"

SMALL_MODEL: dict[str, Any] = {
    "hidden_size": 48, "layers": 2, "heads": 4, "kv_heads": 2, "head_size": 12, "experts": 4, "top_k": 2,
    "expert_intermediate_size": 40, "vocabulary_size": 259, "qk_norm": "head",
}  # fmt: skip


def job(
    *, model: dict[str, Any] | None = None, optimizer: dict[str, Any] | None = None, batch: dict[str, Any] | None = None,
    execution: dict[str, Any] | None = None, **training: Any,
) -> JobSpec:  # fmt: skip
    """A resolved job on the golden text; keyword arguments override its training spec."""
    spec: dict[str, Any] = {
        "name": "test",
        "seed": 7,
        "model": SMALL_MODEL | (model or {}),
        "data": {"source": "files", "paths": ["*.txt"]},
        "sequence_length": 24,
        "batch": {"sequences": 6, "group_sequences": 2} | (batch or {}),
        "steps": 6,
        "digest_interval": 2,
        "optimizer": {"lr": 3e-3, "warmup_steps": 2, "schedule": "cosine"} | (optimizer or {}),
    } | training
    return resolve(parse_job({"training": spec, "execution": {"checkpoint_interval": 1} | (execution or {})}))


def corpus_of(spec: JobSpec) -> Corpus:
    return open_corpus(spec.training.data, [TEXT], spec.training.model.vocabulary_size)


def run(
    spec: JobSpec, backend: NativeBackend, store: CheckpointStore | None = None, resume_at_most: int | None = None
) -> Iterator[StepRecord]:
    return train(spec, corpus_of(spec), backend, store, resume_at_most=resume_at_most)


def bodies(records: Iterator[StepRecord] | list[StepRecord]) -> list[dict[str, Any]]:
    """What must be equal between equal runs."""
    return [record.body() for record in records]

"""Resolving a spec (every default made explicit) and the digest that is a job's identity."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any, Final

from pydantic import BaseModel

from mok_service.provenance.canonical import decimal_text, float64_bits
from mok_service.provenance.digest import canonical_digest
from mok_service.spec.reading import parse_job
from mok_service.spec.schema import SEED_MAX, JobSpec, TrainingSpec

TRAINING_TYPE: Final = "mok.training/v1"


def draw_seed() -> int:
    """A seed from the operating system's random source, 0 to SEED_MAX."""
    return secrets.randbelow(SEED_MAX + 1)


def resolve(spec: JobSpec, draw_seed: Callable[[], int] = draw_seed) -> JobSpec:
    """The same job with nothing left to choose: a seed, the group size and the number of micro-batches are filled in.

    `draw_seed` is called only when the spec has no seed. A resolved spec resolves to itself.
    """
    values = spec.model_dump()
    training, execution = values["training"], values["execution"]
    if training["seed"] is None:
        training["seed"] = draw_seed()
    training["batch"]["group_sequences"] = spec.training.group_sequences
    execution["micro_batches"] = spec.micro_batches
    return JobSpec.model_validate(values)


def override_execution(spec: JobSpec, keys: Mapping[str, Any]) -> JobSpec:
    """The same job with some keys of its execution spec replaced, resolved again: `micro_batches: 0` chooses anew.

    `keys` is a decoded mapping, as a user gave it. Raises InvalidSpec as `parse_job`.
    """
    return resolve(parse_job({"training": spec.training, "execution": {**spec.execution.model_dump(), **keys}}))


def training_document(training: TrainingSpec) -> dict[str, Any]:
    """The document whose canonical bytes are hashed: `type` and every field of a resolved training spec but `model.preset`, and
    but `data.urls` where there are none.

    Floats are the 16 hex digits of their binary64 bits, the seed is a decimal string, the rest is plain JSON.
    """
    assert training.seed is not None and training.batch.group_sequences > 0, "only a resolved spec has a digest"
    document = {"type": TRAINING_TYPE, **_plain(training), "seed": decimal_text(training.seed)}
    del document["model"]["preset"]
    if not document["data"]["urls"]:
        del document["data"]["urls"]
    return document


def training_digest(training: TrainingSpec) -> str:
    """The job's identity, `sha256:<64 hex digits>`: SHA-256 of the RFC 8785 bytes of `training_document`."""
    return str(canonical_digest(training_document(training)))


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return {name: _plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return float64_bits(value) if isinstance(value, float) else value


def job_json_schema() -> dict[str, Any]:
    """The JSON Schema of what a user may submit."""
    return JobSpec.model_json_schema()

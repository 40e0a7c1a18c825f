"""Resolving is stable, and the digest changes with every field of the training spec and with nothing else."""

from __future__ import annotations

import copy
import hashlib
import json
import pickle
import random
import struct
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from mok_service.errors import InvalidSpec
from mok_service.spec import (
    PRESETS,
    SEED_MAX,
    ExecutionSpec,
    JobSpec,
    TrainingSpec,
    job_json_schema,
    load_job,
    override_execution,
    parse_job,
    resolve,
    training_digest,
    training_document,
)
from tests.spec.examples import SMALL, faults_of, jobs, small


def digest(spec: dict[str, Any]) -> str:
    return training_digest(resolve(parse_job(spec), draw_seed=lambda: 5).training)


def leaves(model: type[BaseModel], prefix: str = "") -> list[str]:
    """The dotted paths of all keys that hold no further keys."""
    found: list[str] = []
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found += leaves(inner, f"{prefix}{name}.")
        else:
            found.append(prefix + name)
    return found


def shuffled(value: Any, seed: int) -> Any:
    """The same value, the keys of every mapping in another order."""
    if isinstance(value, dict):
        keys = list(value)
        random.Random(seed).shuffle(keys)
        return {key: shuffled(value[key], seed) for key in keys}
    return value


@given(jobs(), st.integers(0, 2**63 - 1))
def test_a_resolved_spec_is_stable(spec: dict[str, Any], seed: int) -> None:
    resolved = resolve(parse_job(spec), draw_seed=lambda: seed)
    assert resolved.training.seed == spec["training"].get("seed", seed)
    assert resolved.training.batch.group_sequences > 0 and resolved.execution.micro_batches > 0
    assert resolve(resolved, draw_seed=lambda: pytest.fail("a seed was drawn twice")) == resolved
    text = json.dumps(resolved.model_dump(mode="json"))
    for again in (parse_job(json.loads(text)), load_job(text, "json"), load_job(text, "yaml")):
        assert again == resolved
        assert training_digest(again.training) == training_digest(resolved.training)


@given(jobs(), st.integers())
def test_the_digest_knows_neither_key_order_nor_which_defaults_were_written(spec: dict[str, Any], seed: int) -> None:
    expected = digest(spec)
    assert digest(shuffled(spec, seed)) == expected
    explicit = resolve(parse_job(spec), draw_seed=lambda: 5).model_dump(mode="json")
    assert digest(explicit) == expected
    explicit["execution"] |= {"threads": 3, "checkpoint_interval": 1, "priority": -7, "max_attempts": 9}
    assert digest(shuffled(explicit, seed)) == expected


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_the_same_as_its_values(preset: str) -> None:
    by_name, by_value = small(training__model={"preset": preset}), small(training__model=PRESETS[preset])
    assert parse_job(by_name) == parse_job(by_value)
    assert digest(by_name) == digest(by_value)
    changed = small(training__model={"preset": preset, "layers": 2, "shared_expert_intermediate_size": 64, "qk_norm": "none"})
    assert parse_job(changed).training.model.model_dump() == PRESETS[preset] | {
        "preset": None,
        "layers": 2,
        "shared_expert_intermediate_size": 64,
        "qk_norm": "none",
    }
    assert digest(changed) != digest(by_name)


OTHER: dict[str, Any] = {  # for every key of the training spec a value that SMALL doesn't have
    "name": "other", "seed": 8, "precision": "bf16", "sequence_length": 127, "steps": 61, "digest_interval": 11,
    "init_from": {"source": "checkpoints/a"},
    "model.hidden_size": 255, "model.layers": 5, "model.heads": 4, "model.kv_heads": 8, "model.head_size": 34, "model.experts": 9,
    "model.top_k": 1, "model.expert_intermediate_size": 511, "model.shared_expert_intermediate_size": 1,
    "model.vocabulary_size": 513, "model.rope_base": 10000.000000000002, "model.norm_epsilon": 1e-5, "model.qk_norm": "full",
    "model.renormalise_top_k": False, "model.aux_loss_coefficient": 5e-324, "model.z_loss_coefficient": 0.1,
    "model.tie_embeddings": True, "model.initializer_range": 0.03,
    "data.source": "files", "data.paths": ["a"], "data.urls": ["https://a.b/c"],
    "data.tokenizer": "t.json", "data.max_bytes": 1,
    "optimizer.lr": 0.1, "optimizer.beta1": 0.8, "optimizer.beta2": 0.9, "optimizer.epsilon": 1e-7, "optimizer.weight_decay": 0,
    "optimizer.warmup_steps": 1, "optimizer.schedule": "cosine", "optimizer.min_lr_ratio": 0, "optimizer.clipping": "previous",
    "optimizer.max_norm": 2, "batch.sequences": 9, "batch.group_sequences": 7, "batch.shards": 2,
}  # fmt: skip


def test_every_training_field_changes_the_digest() -> None:
    base = small(training__data={"source": "files", "paths": ["b"]}, training__init_from=None)
    seen = {digest(base)}
    changing = [path for path in leaves(TrainingSpec) if path not in ("model.preset", "arithmetic")]
    assert sorted(changing) == sorted(OTHER)
    for path in changing:
        spec = copy.deepcopy(base)
        at = spec["training"]
        *outer, last = path.split(".")
        for key in outer:
            at = at.setdefault(key, {})
        at[last] = OTHER[path]
        if path == "data.source":
            spec["training"]["data"] = {"source": "python-stdlib"}
        now = digest(spec)
        assert now not in seen, f"{path} doesn't show in the digest"
        seen.add(now)
    for init_from in ({"source": "checkpoints/b"}, {"source": "checkpoints/a", "weights": "sha256:" + "0" * 64}):
        now = digest(base | {"training": base["training"] | {"init_from": init_from}})
        assert now not in seen
        seen.add(now)


def test_no_execution_field_changes_the_digest() -> None:
    spec = small(training__batch={"sequences": 8, "group_sequences": 2, "shards": 2})
    other = {"device": "cuda", "count": 2, "threads": 3, "micro_batches": 4, "checkpoint_interval": 1,
             "queue_deadline_seconds": 1, "run_deadline_seconds": 1, "max_attempts": 1, "priority": 1}  # fmt: skip
    assert sorted(other) == sorted(ExecutionSpec.model_fields)
    for key, value in other.items():
        changed = spec | {"execution": {key: value}}
        assert parse_job(changed) != parse_job(spec)
        assert digest(changed) == digest(spec)


def test_the_digest_is_the_sha256_of_the_document_that_is_documented() -> None:
    def bits(value: float) -> str:
        return struct.pack(">d", value).hex()

    spec = small(training__seed=2**63 - 1, training__name="報告", training__data={"source": "files", "paths": ["b", "a"]})
    document = {
        "type": "mok.training/v1", "name": "報告", "seed": "9223372036854775807", "arithmetic": "mok-1", "precision": "fp32",
        "model": {
            "hidden_size": 256, "layers": 4, "heads": 8, "kv_heads": 4, "head_size": 32, "experts": 8, "top_k": 2,
            "expert_intermediate_size": 512, "shared_expert_intermediate_size": None, "vocabulary_size": 512,
            "rope_base": bits(10000), "norm_epsilon": bits(1e-6), "qk_norm": "head", "renormalise_top_k": True,
            "aux_loss_coefficient": bits(0), "z_loss_coefficient": bits(0), "tie_embeddings": False,
            "initializer_range": bits(0.02),
        },
        "data": {"source": "files", "paths": ["b", "a"], "tokenizer": "bytes", "max_bytes": None},
        "sequence_length": 128,
        "optimizer": {
            "lr": bits(3e-4), "beta1": bits(0.9), "beta2": bits(0.95), "epsilon": bits(1e-8), "weight_decay": bits(0.1),
            "warmup_steps": 0, "schedule": "constant", "min_lr_ratio": bits(0.1), "clipping": "global", "max_norm": bits(1),
        },
        "batch": {"sequences": 8, "group_sequences": 8, "shards": 1},
        "steps": 60, "digest_interval": 10, "init_from": None,
    }  # fmt: skip
    text = json.dumps(document, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
    assert digest(spec) == f"sha256:{hashlib.sha256(text).hexdigest()}"
    # Golden: a change of this line is a new identity for every job that anyone has run.
    assert digest(SMALL) == "sha256:6bd94b51702041f212b9f35e3b373b126765f423c9059277b72dd73676119912"


def test_negative_zero_and_zero_are_one_value() -> None:
    spec = parse_job(small(training__optimizer__weight_decay=-0.0))
    assert struct.pack(">d", spec.training.optimizer.weight_decay) == bytes(8)
    assert digest(small(training__optimizer__weight_decay=-0.0)) == digest(small(training__optimizer__weight_decay=0))


def test_only_a_resolved_spec_has_a_digest() -> None:
    spec = small()
    del spec["training"]["seed"]
    with pytest.raises(AssertionError, match="resolved"):
        training_digest(parse_job(spec).training)


def test_seeds_are_drawn_from_the_whole_range() -> None:
    spec = small()
    del spec["training"]["seed"]
    seeds = [resolve(parse_job(spec)).training.seed for _ in range(64)]
    assert len(set(seeds)) == 64 and all(seed is not None and 0 <= seed <= SEED_MAX for seed in seeds)
    assert max(seed or 0 for seed in seeds) >= 2**60  # the chance that none is: 2^-192


@pytest.mark.parametrize(
    ("sequences", "length", "shards", "size", "groups"),
    [(8, 128, 1, 8, 1), (512, 128, 1, 64, 8), (512, 4096, 1, 2, 256), (3, 65536, 1, 1, 3), (8, 128, 4, 2, 4), (7, 128, 4, 2, 4),
     (100, 128, 1, 64, 2), (6, 4, 3, 2, 3)],
)  # fmt: skip
def test_groups_have_about_8192_tokens_and_fit_the_shards(
    sequences: int, length: int, shards: int, size: int, groups: int
) -> None:
    batch = {"sequences": sequences, "shards": shards}
    spec = resolve(parse_job(small(training__batch=batch, training__sequence_length=length)))
    assert (spec.training.batch.group_sequences, spec.training.groups) == (size, groups)
    assert spec.execution.micro_batches == spec.training.waves == groups // shards


def test_execution_can_be_replaced_key_by_key() -> None:
    job = resolve(parse_job(small(training__batch={"sequences": 8, "group_sequences": 1}, execution={"threads": 2})))
    again = override_execution(job, {"micro_batches": 2, "priority": 5})
    assert again.execution.model_dump() == job.execution.model_dump() | {"micro_batches": 2, "priority": 5}
    assert again.training == job.training
    assert override_execution(again, {"micro_batches": 0}).execution.micro_batches == 8
    with pytest.raises(InvalidSpec, match=r"execution.micro_batches = 3 doesn't divide the number of groups, 8"):
        override_execution(job, {"micro_batches": 3})
    with pytest.raises(InvalidSpec, match=r"execution.thread = 3 is no known key, did you mean threads\?"):
        override_execution(job, {"thread": 3})


def test_the_json_schema_agrees_with_the_parser() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(job_json_schema())
    assert validator.is_valid(SMALL)
    assert validator.is_valid(resolve(parse_job(SMALL)).model_dump(mode="json"))
    refused: list[dict[str, Any]] = [
        {"training__steps": 0}, {"training__seed": 2**63}, {"training__optimizer": {"learning_rate": 1}}, {"training__model": {}},
        {"training__precision": "fp16"}, {"execution": []}, {"training__model": {"preset": None, "layers": 3}}, {"x": 1},
    ]  # fmt: skip
    for changes in refused:
        assert not validator.is_valid(small(**changes))
        assert faults_of(small(**changes))


def test_every_field_is_described() -> None:
    schema = job_json_schema()
    undescribed = [
        f"{name}.{key}" for name, model in schema["$defs"].items() for key, field in model["properties"].items()
        if "description" not in field and "$ref" not in field
    ]  # fmt: skip
    assert undescribed == []


def test_the_spec_needs_neither_torch_nor_ray_nor_fastapi() -> None:
    program = "import sys, mok_service.spec, mok_service.settings\n"
    program += "print(*sorted({'torch', 'ray', 'fastapi', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_specs_survive_being_pickled() -> None:
    spec = resolve(parse_job(SMALL))
    again = pickle.loads(pickle.dumps(spec))
    assert isinstance(again, JobSpec) and again == spec


def test_a_url_alone_is_the_mapping_that_has_only_it_and_none_is_no_key() -> None:
    url = "https://data.example/a.txt"
    short, long = (small(training__data={"source": "files", "urls": [value]}) for value in (url, {"url": url, "sha256": None}))
    assert parse_job(short) == parse_job(long) and digest(short) == digest(long)
    spec = parse_job(short)
    assert parse_job(spec.model_dump(mode="json")) == spec == parse_job(spec.model_dump())
    pinned = small(training__data={"source": "files", "urls": [{"url": url, "sha256": "0" * 64, "size": 3}]})
    assert digest(pinned) != digest(short)
    document = training_document(resolve(parse_job(pinned)).training)
    assert document["data"]["urls"] == [{"url": url, "sha256": "0" * 64, "size": 3}]
    assert "urls" not in parse_job(small()).model_dump()["training"]["data"]
    assert "urls" not in training_document(resolve(parse_job(small())).training)["data"]

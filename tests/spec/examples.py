"""Specs for the tests: a small valid one, ways to change it, and a strategy for random valid ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import strategies as st

from mok_service.errors import InvalidSpec
from mok_service.spec import parse_job

SMALL: dict[str, Any] = {
    "training": {
        "name": "small",
        "seed": 7,
        "model": {"preset": "tiny"},
        "data": {"source": "python-stdlib"},
        "sequence_length": 128,
        "batch": {"sequences": 8},
        "steps": 60,
    },
}


def small(**changes: Any) -> dict[str, Any]:
    """SMALL with values at dotted paths, the dots written as two underscores: training__steps=3."""
    spec = copy.deepcopy(SMALL)
    for path, value in changes.items():
        at = spec
        *outer, last = path.split("__")
        for key in outer:
            at = at.setdefault(key, {})
        at[last] = value
    return spec


def faults_of(spec: Any) -> list[dict[str, Any]]:
    """The faults for which `parse_job` refuses a spec."""
    with pytest.raises(InvalidSpec) as caught:
        parse_job(spec)
    faults: list[dict[str, Any]] = caught.value.detail["errors"]
    assert faults and all(set(fault) == {"field", "value", "problem", "allowed", "nearest"} for fault in faults)
    return faults


def message_of(spec: Any) -> str:
    """The sentence with which `parse_job` refuses a spec."""
    with pytest.raises(InvalidSpec) as caught:
        parse_job(spec)
    return caught.value.message.removeprefix("the job spec is invalid: ")


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Random valid specs, some keys left to their defaults."""
    kv_heads = draw(st.integers(1, 4))
    experts = draw(st.integers(1, 16))
    model: dict[str, Any] = (
        {
            "hidden_size": draw(st.integers(1, 512)),
            "layers": draw(st.integers(1, 4)),
            "kv_heads": kv_heads,
            "heads": kv_heads * draw(st.integers(1, 4)),
            "head_size": 2 * draw(st.integers(1, 32)),
            "experts": experts,
            "top_k": draw(st.integers(1, experts)),
            "expert_intermediate_size": draw(st.integers(1, 512)),
            "vocabulary_size": draw(st.integers(258, 1000)),
        }
        if draw(st.booleans())
        else {"preset": draw(st.sampled_from(["tiny", "olmoe-1b-7b", "qwen3-30b-a3b"]))}
    )
    model |= draw(
        st.fixed_dictionaries(
            {},
            optional={
                "shared_expert_intermediate_size": st.none() | st.integers(1, 64),
                "qk_norm": st.sampled_from(["none", "head", "full"]),
                "aux_loss_coefficient": st.floats(0, 1),
                "initializer_range": st.floats(0.001, 1),
                "tie_embeddings": st.booleans(),
            },
        )
    )
    steps, shards = draw(st.integers(1, 1000)), draw(st.integers(1, 4))
    batch = {"sequences": shards * draw(st.integers(1, 16)), "shards": shards}
    if draw(st.booleans()):
        batch["group_sequences"] = batch["sequences"] // (shards * draw(st.sampled_from([1, batch["sequences"] // shards])))
    training: dict[str, Any] = {
        "name": draw(st.text("aé報🚀 b", min_size=1, max_size=100).filter(str.strip)),
        "model": model,
        "batch": batch,
        "steps": steps,
        "sequence_length": draw(st.integers(2, 4096)),
        "data": draw(
            st.sampled_from([{"source": "python-stdlib"}, {"source": "files", "paths": ["a/**/*.txt", "b.txt"], "max_bytes": 9}])
        ),
    }
    training |= draw(
        st.fixed_dictionaries(
            {},
            optional={
                "seed": st.integers(0, 2**63 - 1),
                "precision": st.sampled_from(["fp32", "bf16"]),
                "digest_interval": st.integers(1, 99),
                "optimizer": st.fixed_dictionaries(
                    {},
                    optional={
                        "lr": st.floats(1e-6, 1),
                        "weight_decay": st.just(0) | st.just(-0.0) | st.floats(0, 1),
                        "warmup_steps": st.integers(0, steps),
                        "schedule": st.sampled_from(["constant", "cosine"]),
                    },
                ),
            },
        )
    )
    execution = draw(st.fixed_dictionaries({}, optional={"threads": st.integers(0, 8), "priority": st.integers(-100, 100)}))
    return {"training": training} | ({"execution": execution} if draw(st.booleans()) else {})

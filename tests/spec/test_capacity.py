"""What a job costs is counted from the shapes; what a machine can't run is refused with every reason."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from mok_service.errors import Unrunnable
from mok_service.kernels.native import NativeBackend
from mok_service.spec import (
    PRESETS,
    CudaDevice,
    Estimate,
    Machine,
    ModelSpec,
    check_runnable,
    count_parameters,
    estimate,
    parse_job,
    resolve,
)
from mok_service.training.data import open_corpus
from mok_service.training.loop import Trainer
from mok_service.training.parameters import lay_out
from tests.spec.examples import small

LAPTOP = Machine(cpu_count=2, memory_bytes=8 << 30)
SERVER = Machine(cpu_count=64, memory_bytes=512 << 30, cuda_devices=(CudaDevice(name="NVIDIA H200", memory_bytes=141 << 30),) * 2)


def cost(**changes: Any) -> Estimate:
    return estimate(resolve(parse_job(small(**changes))))


@pytest.mark.parametrize(
    ("preset", "total", "active"),
    [
        ("tiny", 13_642_240, 4_205_056),
        ("olmoe-1b-7b", 6_919_161_856, 1_282_017_280),  # published: 6.9 billion, 1.3 billion active
        ("qwen3-30b-a3b", 30_532_122_624, 3_353_032_704),  # published: 30.5 billion, 3.3 billion active
    ],
)
def test_presets_have_the_published_sizes(preset: str, total: int, active: int) -> None:
    found = cost(training__model={"preset": preset})
    assert (found.parameters_total, found.parameters_active) == (total, active)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("qk_norm", ["none", "head", "full"])
@pytest.mark.parametrize("shared", [None, 48])
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_the_model(preset: str, qk_norm: str, shared: int | None, tied: bool) -> None:
    model = ModelSpec.model_validate(
        {"preset": preset, "qk_norm": qk_norm, "shared_expert_intermediate_size": shared, "tie_embeddings": tied}
    )
    assert count_parameters(model).total == sum(tensor.count for tensor in lay_out(model).tensors)


def test_flops_are_three_forward_passes() -> None:
    hidden, layers, experts, top_k, inner, vocabulary, queries, keys, length = 256, 4, 8, 2, 512, 512, 256, 128, 128
    products = (
        layers * (2 * hidden * queries + 2 * hidden * keys + hidden * experts + top_k * 3 * hidden * inner) + vocabulary * hidden
    )
    attention = sum(2 * 2 * layers * queries * (i + 1) for i in range(length))  # query i meets i + 1 keys, twice
    assert cost().flops_per_token * length == 3 * (2 * products * length + attention)


def test_memory_adds_up_and_follows_precision_and_micro_batches() -> None:
    fp32 = cost(training__batch={"sequences": 8, "group_sequences": 1}).memory_bytes
    assert fp32.weights == 4 * 13_642_240 and fp32.moments == 2 * fp32.weights and fp32.gradients == fp32.weights
    assert fp32.operands == 0
    assert fp32.total == fp32.weights + fp32.moments + fp32.gradients + fp32.activations
    bf16 = cost(training__batch={"sequences": 8, "group_sequences": 1}, training__precision="bf16").memory_bytes
    assert bf16.operands == 2 * 13_642_240 and bf16.activations < fp32.activations
    batch = {"sequences": 8, "group_sequences": 1}
    by_parts = [cost(training__batch=batch, execution__micro_batches=n).memory_bytes.activations for n in (1, 2, 4, 8)]
    assert by_parts == sorted(by_parts, reverse=True) and by_parts[0] > 4 * by_parts[3]
    sharded = cost(training__batch=batch | {"shards": 8}).memory_bytes
    assert sharded.gradients > fp32.gradients


def test_olmoe_in_bf16_fits_one_large_gpu() -> None:
    changes: dict[str, Any] = {
        "training__model": {"preset": "olmoe-1b-7b"}, "training__precision": "bf16", "training__sequence_length": 4096,
        "training__batch": {"sequences": 64}, "execution__device": "cuda",
    }  # fmt: skip
    check_runnable(resolve(parse_job(small(**changes))), SERVER)


def refusal(machine: Machine, **changes: Any) -> Unrunnable:
    with pytest.raises(Unrunnable) as caught:
        check_runnable(resolve(parse_job(small(**changes))), machine)
    assert caught.value.http_status == 422
    return caught.value


def test_what_fits_is_not_refused() -> None:
    check_runnable(resolve(parse_job(small())), LAPTOP)
    check_runnable(resolve(parse_job(small(execution={"threads": 64}))), LAPTOP)  # slower than it could be, but the same bits
    check_runnable(resolve(parse_job(small(execution={"device": "cuda"}))), SERVER)
    for changes in ({"training__precision": "bf16"}, {"training__model__shared_expert_intermediate_size": 64},
                    {"training__model__z_loss_coefficient": 0.1}, {"training__data__tokenizer": "t.json"}):  # fmt: skip
        check_runnable(resolve(parse_job(small(**changes))), LAPTOP)


def test_a_missing_device_is_a_reason() -> None:
    assert refusal(LAPTOP, execution={"device": "cuda"}).message == (
        'this job can\'t run here: execution.device = "cuda" asks for a CUDA device, and the machine has none (allowed: cpu)'
    )


def test_several_devices_are_a_reason() -> None:
    changes: dict[str, Any] = {"training__batch": {"sequences": 8, "shards": 2}, "execution": {"count": 2, "device": "cuda"}}
    assert refusal(SERVER, **changes).message == (
        "this job can't run here: execution.count = 2 asks for several devices, and a run uses one device "
        "in this version (allowed: 1)"
    )


def test_too_little_memory_is_a_reason_with_both_sizes() -> None:
    message = refusal(LAPTOP, training__model={"preset": "qwen3-30b-a3b"}).message
    assert "training needs about 465.2 GiB of memory, and the machine has 8.0 GiB" in message
    small_gpu = Machine(cpu_count=1, memory_bytes=1 << 50, cuda_devices=(CudaDevice(name="a", memory_bytes=1 << 20),))
    message = refusal(small_gpu, execution={"device": "cuda"}).message
    assert "MiB of memory, and the largest CUDA device has 1.0 MiB" in message


def test_every_reason_is_given() -> None:
    error = refusal(
        Machine(cpu_count=1, memory_bytes=1000), training__batch={"sequences": 8, "shards": 2}, execution={"count": 2}
    )
    assert [reason["field"] for reason in error.detail["reasons"]] == ["execution.count", "training"]
    assert all(set(reason) == {"field", "value", "problem", "allowed", "nearest"} for reason in error.detail["reasons"])


def test_a_machine_travels_as_json() -> None:
    assert Machine.model_validate_json(SERVER.model_dump_json()) == SERVER
    assert Machine.model_validate(SERVER.model_dump(mode="json")) == SERVER


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"training__batch": {"sequences": 8, "group_sequences": 2, "shards": 4}},
        {
            "training__precision": "bf16",
            "training__model__shared_expert_intermediate_size": 40,
            "execution": {"micro_batches": 1},
        },
    ],
)
def test_activations_are_those_that_the_model_keeps(changes: dict[str, Any]) -> None:
    """Within 5 %: the estimate leaves out what is smaller than a row, such as the norms' reciprocals."""
    shape = {
        "preset": "tiny", "layers": 2, "hidden_size": 64, "expert_intermediate_size": 48, "aux_loss_coefficient": 0.1,
    }  # fmt: skip
    spec = resolve(
        parse_job(small(training__model=shape, training__sequence_length=32, training__data__max_bytes=60_000, **changes))
    )
    corpus = open_corpus(spec.training.data, [], spec.training.model.vocabulary_size)
    trainer = Trainer(spec, corpus, NativeBackend("cpu", threads=1))
    assert [record.step for record in itertools.islice(trainer.records(), 2)] == [0, 1]
    model = trainer.model
    routings = [tensor for routing in model._routings.values() for tensor in vars(routing).values() if hasattr(tensor, "nbytes")]
    kept = [*model._buffers.values(), *routings]
    assert sum(tensor.nbytes for tensor in kept) == pytest.approx(estimate(spec).memory_bytes.activations, rel=0.05)

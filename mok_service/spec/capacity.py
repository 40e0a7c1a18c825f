"""What a job costs (parameters, FLOPs, memory), and whether a machine can run it."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from mok_service.errors import Unrunnable
from mok_service.spec.faults import Fault, fault, sentence
from mok_service.spec.schema import JobSpec, ModelSpec

_FP32: Final = 4  # bytes
_BF16: Final = 2
LOGITS_ELEMENTS: Final = 1 << 26  # logits are computed for so many (row, token) pairs at a time


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True)


class CudaDevice(_Value):
    """One GPU of a machine."""

    name: str
    memory_bytes: int = Field(ge=0)


class Machine(_Value):
    """What a worker's machine has, as the worker reports it."""

    cpu_count: int = Field(ge=1)
    """CPUs that the worker may use."""
    memory_bytes: int = Field(ge=0)
    """Main memory that the worker may use."""
    cuda_devices: tuple[CudaDevice, ...] = Field(default=(), strict=False)


class Memory(_Value):
    """Bytes that a step needs at once on one device; an estimate, see `estimate`."""

    weights: int
    moments: int
    gradients: int
    operands: int
    activations: int
    total: int


class Estimate(_Value):
    """What a job costs."""

    parameters_total: int
    parameters_active: int
    """Parameters that one token meets: all but the experts it isn't routed to."""
    tokens_per_step: int
    flops_per_token: int
    """Forward and backward, a multiply and an add counted as two."""
    memory_bytes: Memory


class ParameterCount(_Value):
    """Parameters by kind."""

    embedding: int
    head: int        # 0 when tied to the embedding
    attention: int   # projections, all layers
    router: int
    expert: int      # one routed expert of one layer
    shared: int      # shared experts, all layers
    norms: int
    total: int
    active: int


def count_parameters(model: ModelSpec) -> ParameterCount:
    """The number of parameters of each kind (docs/arithmetic.md, 16)."""
    hidden, layers = model.hidden_size, model.layers
    queries, keys = model.heads * model.head_size, model.kv_heads * model.head_size
    qk_norm = {"none": 0, "head": 2 * model.head_size, "full": queries + keys}[model.qk_norm]
    embedding = model.vocabulary_size * hidden
    head = 0 if model.tie_embeddings else embedding
    attention = layers * (2 * hidden * queries + 2 * hidden * keys)
    router = layers * model.experts * hidden
    expert = 3 * hidden * model.expert_intermediate_size
    shared = layers * 3 * hidden * (model.shared_expert_intermediate_size or 0)
    norms = layers * (2 * hidden + qk_norm) + hidden
    dense = embedding + head + attention + router + shared + norms
    return ParameterCount(
        embedding=embedding, head=head, attention=attention, router=router, expert=expert, shared=shared, norms=norms,
        total=dense + layers * model.experts * expert, active=dense + layers * model.top_k * expert,
    )


def estimate(spec: JobSpec) -> Estimate:
    """What a job costs.

    FLOPs a token: three times the forward pass, whose products are those of the active weight matrices (2 a parameter; the
    embedding is a look-up) and the attention of a causal sequence (2 * 2 * heads * head_size * (length + 1) / 2 a layer).
    What a backend computes again isn't counted.

    Memory: fp32 master weights, two moments and gradients; bf16 copies of the weights where precision is bf16; and what one
    micro-batch keeps for its backward pass. It leaves out the data, and what allocator and framework need (about 0.5 GiB).
    """
    model, training = spec.training.model, spec.training
    parameters = count_parameters(model)
    products = (parameters.attention + parameters.router + parameters.shared
                + model.layers * model.top_k * parameters.expert + model.vocabulary_size * model.hidden_size)
    attention = model.layers * 2 * model.heads * model.head_size * (training.sequence_length + 1)
    weights = _FP32 * parameters.total
    operands = _BF16 * parameters.total if training.precision == "bf16" else 0
    moments, gradients, activations = 2 * weights, weights + _partial_sums(spec, parameters), _activations(spec)
    return Estimate(
        parameters_total=parameters.total, parameters_active=parameters.active,
        tokens_per_step=training.batch.sequences * training.sequence_length,
        flops_per_token=3 * (2 * products + attention),
        memory_bytes=Memory(weights=weights, moments=moments, gradients=gradients, operands=operands, activations=activations,
                            total=weights + moments + gradients + operands + activations),
    )


def _partial_sums(spec: JobSpec, parameters: ParameterCount) -> int:
    """Bytes of the partial gradients that a wave's tree holds at a time (docs/arithmetic.md, 15.3): none without shards; one
    tensor's, a level, where a micro-batch is whole waves; else those of all dense tensors."""
    model, shards = spec.training.model, spec.training.batch.shards
    levels = (shards - 1).bit_length()
    if spec.training.waves % spec.micro_batches:
        return _FP32 * levels * (parameters.total - model.layers * model.experts * parameters.expert)
    queries_keys_values = (model.heads + 2 * model.kv_heads) * model.head_size
    shared = 2 * (model.shared_expert_intermediate_size or 0)
    largest = max(parameters.embedding, queries_keys_values * model.hidden_size, shared * model.hidden_size)
    return _FP32 * (levels + 1) * largest if levels else 0


def _activations(spec: JobSpec) -> int:
    """Bytes of the workspace: what one micro-batch keeps for its backward pass, and what the layers share."""
    model, training = spec.training.model, spec.training
    operand = _BF16 if training.precision == "bf16" else _FP32
    groups = training.groups // spec.micro_batches
    group_tokens = training.group_sequences * training.sequence_length
    tokens = min(groups * training.group_sequences, training.batch.sequences) * training.sequence_length
    rows = tokens * model.top_k + 15 * model.experts * groups
    hidden, queries, keys = model.hidden_size, model.heads * model.head_size, model.kv_heads * model.head_size
    inner, shared = model.expert_intermediate_size, model.shared_expert_intermediate_size or 0
    kept = tokens * (
        _FP32 * (2 * hidden + 3 * model.heads + model.experts)          # residual stream, statistics of rows, probabilities
        + operand * (2 * hidden + 3 * queries + 3 * keys + 3 * shared)  # both norms, q|k|v, q, k, attention, shared expert
        + 3 * _FP32 * model.top_k                                       # routing: expert, weight, row
    ) + rows * (operand * 3 * inner + 2 * _FP32)                        # gate, up, their product; token and slot
    common = tokens * (
        _FP32 * (3 * hidden + queries + keys + model.experts + shared)
        + operand * (2 * hidden + 2 * queries + 2 * keys + model.experts + 2 * shared)
    ) + rows * (_FP32 * inner + operand * (3 * inner + hidden))
    logits_rows = min(group_tokens, max(16, LOGITS_ELEMENTS // model.vocabulary_size))
    chain = _FP32 * model.vocabulary_size * hidden if logits_rows < group_tokens else 0
    return model.layers * kept + common + logits_rows * model.vocabulary_size * (_FP32 + operand) + chain


def check_runnable(spec: JobSpec, machine: Machine) -> None:
    """Raises Unrunnable when `machine` can't run the job; `detail["reasons"]` lists them, each as a fault."""
    execution, devices = spec.execution, machine.cuda_devices
    reasons: list[Fault] = []
    if execution.count > 1:
        reasons.append(fault("execution.count", "asks for several devices, and a run uses one device in this version", "1",
                             execution.count))
    if execution.device == "cuda" and not devices:
        reasons.append(fault("execution.device", "asks for a CUDA device, and the machine has none", "cpu", "cuda"))
    needed = estimate(spec).memory_bytes.total
    available, place = machine.memory_bytes, "the machine"
    if execution.device == "cuda":
        available, place = max((device.memory_bytes for device in devices), default=needed), "the largest CUDA device"
    if needed > available:
        reasons.append(fault("training", f"needs about {_size(needed)} of memory, and {place} has {_size(available)}",
                             "a smaller model or batch, or more execution.micro_batches"))
    if reasons:
        raise Unrunnable("this job can't run here: " + "; ".join(sentence(item) for item in reasons),
                         reasons=[dict(item) for item in reasons])


def _size(count: int) -> str:
    """Bytes for people: 22.4 GiB."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while size >= 1024.0 and len(units) > 1:
        size, units = size / 1024.0, units[1:]
    return f"{size:.1f} {units[0]}" if units[0] != "B" else f"{count} B"

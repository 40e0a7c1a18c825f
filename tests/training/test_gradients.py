"""The whole model's loss and gradients against float64 autograd.

Bounds, in the 2-norm and relative. fp32: 2e-5 for all gradients together, and for each tensor's relative to its own norm plus a
twentieth of the whole (what is left after cancellation can't be better than what cancelled); chains have up to a few hundred
roundings of 2^-24. bf16: 0.05 for all gradients together; operands carry 2^-9 each, and a gradient passes about a dozen of them.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mok_service.kernels import load_backend, reference
from mok_service.spec import JobSpec
from mok_service.training.data import Batch
from mok_service.training.loop import Trainer
from tests.training.jobs import corpus_of, job

BACKEND = load_backend("cpu", threads=2)
ONE_PART = {"micro_batches": 1}  # so that the routing of the whole batch is in reach
BOUND = {"fp32": 2e-5, "bf16": 0.05}
LOSS_BOUND = {"fp32": 2e-6, "bf16": 2e-3}


def compare(spec: JobSpec) -> None:
    """One step's loss and gradients, ours against the reference's, with the experts that ours chose."""
    trainer = Trainer(spec, corpus_of(spec), BACKEND)
    training, model = spec.training, spec.training.model
    # A few updates first: the router's logits are then far enough apart, and norms are no longer 1.
    for _ in range(2):
        trainer.advance()
    batch = trainer.corpus.batch(3, training.batch.sequences, training.sequence_length, trainer._permutation)
    weights = dict(trainer.model.parameters.named(trainer.model.parameters.weights.double()))
    for tensor in weights.values():
        tensor.requires_grad_()
    sums = trainer._gradients(batch, batch.valid)
    got = dict(trainer.model.parameters.named(trainer.model.parameters.gradients.double() / batch.valid))
    out = reference_of(spec, trainer, batch, weights)
    total = out.total(model)
    total.backward()  # type: ignore[no-untyped-call]
    loss = int(sums.loss) * 2.0**-32 / batch.valid
    assert abs(loss - out.loss.item()) <= LOSS_BOUND[training.precision] * out.loss.item()
    wanted = {name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in weights.items()}
    errors = {name: (got[name] - value).norm().item() for name, value in wanted.items()}
    whole = math.hypot(*(value.norm().item() for value in wanted.values()))
    assert math.hypot(*errors.values()) <= BOUND[training.precision] * whole, errors
    if training.precision == "fp32":
        for name, error in errors.items():
            size = wanted[name].norm().item() + 0.05 * whole
            assert error <= BOUND["fp32"] * size, f"{name}: error {error:.3g} of {size:.3g}"


def reference_of(spec: JobSpec, trainer: Trainer, batch: Batch, weights: dict[str, torch.Tensor]) -> reference.ReferenceOutput:
    model = spec.training.model
    tokens = batch.inputs.size
    chosen = [trainer.model._routings[f"routing {layer} {tokens}"].index.long() for layer in range(model.layers)]
    return reference.forward(
        model, weights, torch.from_numpy(batch.inputs).long(), torch.from_numpy(batch.labels).long(),
        mask=torch.from_numpy(batch.mask).bool(), group_sequences=spec.training.batch.group_sequences, chosen=chosen,
    )  # fmt: skip


models = st.fixed_dictionaries(
    {
        "hidden_size": st.integers(8, 70),
        "heads": st.sampled_from([1, 2, 4]),
        "kv_heads": st.sampled_from([1, 2]),
        "head_size": st.sampled_from([4, 6, 16, 64]),
        "experts": st.integers(2, 9),
        "top_k": st.integers(1, 2),
        "expert_intermediate_size": st.integers(1, 70),
        "shared_expert_intermediate_size": st.sampled_from([None, 1, 33]),
        "vocabulary_size": st.integers(258, 330),
        "qk_norm": st.sampled_from(["none", "head", "full"]),
        "renormalise_top_k": st.booleans(),
        "tie_embeddings": st.booleans(),
        "aux_loss_coefficient": st.sampled_from([0.0, 0.05]),
        "z_loss_coefficient": st.sampled_from([0.0, 0.01]),
    }
).map(lambda m: m | {"heads": max(m["heads"], m["kv_heads"]), "initializer_range": 0.1})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(model=models, length=st.integers(2, 40), sequences=st.integers(1, 4), group=st.integers(1, 4))
def test_gradients_against_float64(precision: str, model: dict[str, Any], length: int, sequences: int, group: int) -> None:
    batch = {"sequences": sequences, "group_sequences": min(group, sequences)}
    compare(job(model=model, precision=precision, sequence_length=length, batch=batch, steps=3, execution=ONE_PART))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "model",
    [
        pytest.param({"experts": 1, "top_k": 1}, id="one expert"),
        pytest.param({"experts": 3, "top_k": 3}, id="every expert"),
        pytest.param({"experts": 64, "top_k": 1}, id="experts without tokens"),
        pytest.param({"head_size": 256, "heads": 2, "kv_heads": 1}, id="head size 256"),
    ],
)
def test_extremes_of_routing(precision: str, model: dict[str, Any]) -> None:
    compare(job(model=model | {"initializer_range": 0.1}, precision=precision, steps=3, execution=ONE_PART))

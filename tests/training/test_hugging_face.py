"""Checkpoints travel: tiny random Qwen3-MoE, OLMoE and Mixtral models load here and give the same logits and gradients;
ours load there.

Bounds: logits 1e-5 of the largest one, gradients 5e-5 of each tensor's norm (both sides compute in fp32).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
import transformers

from mok_service.errors import InvalidSpec
from mok_service.kernels import load_backend
from mok_service.training.checkpoint import CheckpointStore
from mok_service.training.data import Batch
from mok_service.training.hugging_face import initial_weights, read_weights
from mok_service.training.loop import Trainer
from tests.training.jobs import corpus_of, job, run

BACKEND = load_backend("cpu", threads=2)
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_experts_per_tok": 2, "vocab_size": 270,
    "max_position_embeddings": 64, "initializer_range": 0.1, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "router_aux_loss_coef": 0.0, "attention_dropout": 0.0,
}  # fmt: skip


def theirs(kind: str) -> tuple[Any, dict[str, Any]]:
    """A random model of theirs and our keys for it."""
    torch.manual_seed(5)
    common = {"hidden_size": 64, "layers": 2, "heads": 4, "experts": 4, "top_k": 2, "vocabulary_size": 270, "head_size": 16}
    if kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            **SIZES, num_key_value_heads=2, head_dim=16, num_experts=4, moe_intermediate_size=48, intermediate_size=48,
            norm_topk_prob=True, rms_norm_eps=1e-6,
        )  # fmt: skip
        ours = {"kv_heads": 2, "expert_intermediate_size": 48, "qk_norm": "head", "norm_epsilon": 1e-6}
        model: Any = transformers.Qwen3MoeForCausalLM(config)
    elif kind == "olmoe":
        config = transformers.OlmoeConfig(
            **SIZES, num_key_value_heads=4, num_experts=4, intermediate_size=48, norm_topk_prob=False, rms_norm_eps=1e-5
        )
        ours = {
            "kv_heads": 4,
            "expert_intermediate_size": 48,
            "qk_norm": "full",
            "renormalise_top_k": False,
            "norm_epsilon": 1e-5,
        }
        model = transformers.OlmoeForCausalLM(config)
    else:
        config = transformers.MixtralConfig(
            **SIZES, num_key_value_heads=2, head_dim=16, num_local_experts=4, intermediate_size=48, rms_norm_eps=1e-5
        )
        ours = {"kv_heads": 2, "expert_intermediate_size": 48, "qk_norm": "none", "norm_epsilon": 1e-5}
        model = transformers.MixtralForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.float().eval(), common | ours


@pytest.mark.parametrize("kind", ["qwen3_moe", "olmoe", "mixtral"])
def test_their_checkpoints_here(kind: str, tmp_path: Path) -> None:
    model, keys = theirs(kind)
    model.save_pretrained(tmp_path)
    spec = job(
        model=keys, sequence_length=24, batch={"sequences": 2, "group_sequences": 2}, optimizer={"warmup_steps": 0}, steps=1
    )
    trainer = Trainer(spec, corpus_of(spec), BACKEND, initial_weights=read_weights(tmp_path))
    rng = np.random.default_rng(3)
    inputs = rng.integers(0, 270, (2, 24), dtype=np.int32)
    labels = rng.integers(0, 270, (2, 24), dtype=np.int32)
    out = model(torch.from_numpy(inputs).long()).logits
    loss = torch.nn.functional.cross_entropy(out.reshape(-1, 270), torch.from_numpy(labels).long().reshape(-1))
    loss.backward()
    got = trainer.model.logits(torch.from_numpy(inputs.reshape(-1)), 2).view_as(out)
    assert (got - out).abs().max() <= 1e-5 * out.abs().max()
    batch = Batch(1, (0, 1), inputs, labels, np.ones((2, 24), np.uint8))
    sums = trainer._gradients(batch, batch.valid)
    assert abs(int(sums.loss) * 2.0**-32 / batch.valid - loss.item()) <= 1e-5
    model.zero_grad(set_to_none=False)
    gradients = dict(trainer.model.parameters.named(trainer.model.parameters.gradients / batch.valid))
    out = model(torch.from_numpy(inputs).long()).logits
    torch.nn.functional.cross_entropy(out.reshape(-1, 270), torch.from_numpy(labels).long().reshape(-1)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(tmp_path / "gradients")
    wanted = read_weights(tmp_path / "gradients")
    assert wanted.keys() == gradients.keys()
    for name, value in wanted.items():
        assert (gradients[name] - value).norm() <= 5e-5 * value.norm() + 1e-7, name


@pytest.mark.parametrize("qk_norm", ["head", "full"])
def test_our_checkpoints_there(qk_norm: str, tmp_path: Path) -> None:
    keys = {"qk_norm": qk_norm, "hidden_size": 64, "head_size": 16, "heads": 4, "kv_heads": 4, "vocabulary_size": 270}
    spec, store = job(model=keys, steps=2), CheckpointStore(tmp_path)
    list(run(spec, BACKEND, store))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "step-00000002").float().eval()
    assert type(model).__name__ == {"head": "Qwen3MoeForCausalLM", "full": "OlmoeForCausalLM"}[qk_norm]
    inputs = torch.arange(48, dtype=torch.int32) * 5 % 270
    trainer = Trainer(spec, corpus_of(spec), BACKEND, store)
    ours = trainer.model.logits(inputs, 2)
    out = model(inputs.view(2, 24).long()).logits.reshape(48, 270)
    assert (ours - out).abs().max() <= 1e-5 * out.abs().max()


def test_a_job_starts_from_a_folder(tmp_path: Path) -> None:
    """init_from: the weights are looked up below the data roots, and must have the digest that the job names."""
    list(run(job(steps=2), BACKEND, CheckpointStore(tmp_path / "parent")))
    source = "parent/step-00000002"
    parent = CheckpointStore(tmp_path / "parent").list()[-1].state.weights
    spec = job(init_from={"source": source, "weights": str(parent)})
    trainer = Trainer(spec, corpus_of(spec), BACKEND, initial_weights=initial_weights(spec, [tmp_path], None))
    assert trainer.record_zero is not None and trainer.record_zero.state is not None
    assert trainer.record_zero.state.weights == parent
    other = job(init_from={"source": source, "weights": "sha256:" + "0" * 64})
    with pytest.raises(InvalidSpec, match="the weights found have digest"):
        Trainer(other, corpus_of(other), BACKEND, initial_weights=initial_weights(other, [tmp_path], None))
    for missing, problem in (("elsewhere", "no such folder"), (f"run_{0:032x}@2", "known to a service only")):
        with pytest.raises(InvalidSpec, match=problem):
            initial_weights(job(init_from={"source": missing}), [tmp_path], None)

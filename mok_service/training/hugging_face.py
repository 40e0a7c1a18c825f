"""Checkpoints of Hugging Face models: our configuration in their terms, and their weights by our names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from mok_service.errors import InvalidSpec
from mok_service.spec import JobSpec, ModelSpec
from mok_service.training.checkpoint import folder_name, load_tensors
from mok_service.training.data import contained

PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
_MIXTRAL = ((".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."), (".w3.", ".up_proj."), (".w2.", ".down_proj."))


def config_of(model: ModelSpec, length: int) -> dict[str, Any]:
    """A config.json for a model: Qwen3-MoE where queries and keys are normed by head, OLMoE where all heads together."""
    kinds = {
        "head": ("qwen3_moe", "Qwen3MoeForCausalLM"),
        "full": ("olmoe", "OlmoeForCausalLM"),
        "none": ("mok", "MokForCausalLM"),
    }
    kind, architecture = kinds[model.qk_norm]
    if model.shared_expert_intermediate_size:
        kind, architecture = kinds["none"]
    config: dict[str, Any] = {
        "model_type": kind,
        "architectures": [architecture],
        "dtype": "float32",
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "num_experts": model.experts,
        "num_experts_per_tok": model.top_k,
        "intermediate_size": model.expert_intermediate_size,
        "vocab_size": model.vocabulary_size,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_base,
        "norm_topk_prob": model.renormalise_top_k,
        "router_aux_loss_coef": model.aux_loss_coefficient,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.initializer_range,
        "max_position_embeddings": length,
        "hidden_act": "silu",
        "attention_bias": False,
    }
    if kind != "olmoe":
        config |= {
            "moe_intermediate_size": model.expert_intermediate_size,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "shared_expert_intermediate_size": model.shared_expert_intermediate_size,
            "z_loss_coefficient": model.z_loss_coefficient,
        }
    return config


def read_weights(folder: Path, root: Path | None = None) -> dict[str, Tensor]:
    """The weights of a checkpoint folder (ours, Qwen3-MoE, OLMoE or Mixtral), float32, by our names.

    Reads model.safetensors, or every shard of model.safetensors.index.json; links must lead to files below `root` (None: the
    folder). Pickles (.bin, .pt) are never read. Raises InvalidSpec for a folder without safetensors, and for a file whose header
    isn't exactly that of its bytes.
    """
    tensors: dict[str, Tensor] = {}
    for name in _shards(folder, root or folder):
        path = folder / name
        if not path.is_file():
            pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
            why = f": {pickles[0]} is a pickle, which could run code and is never read; save the model as safetensors"
            raise _unusable(folder, f"has no {name}" + (why if pickles else ""))
        try:
            found = load_tensors(contained(path, root or folder, folder.name, "init_from.source"))
        except (ValueError, SafetensorError) as error:
            raise _unusable(folder, f"has a {name} that is no usable safetensors file: {error}") from None
        twice = sorted(found.keys() & tensors.keys())
        if twice:
            raise _unusable(folder, f"has the tensor {twice[0]!r} in two files")
        tensors |= found
    return by_our_names(tensors)


def _shards(folder: Path, root: Path) -> list[str]:
    """The names of the weights' files."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    try:
        document = json.loads(contained(index, root, folder.name, "init_from.source").read_bytes())
        names = sorted(set(document["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _unusable(folder, f"has a {index.name} without a usable weight_map") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise _unusable(folder, f"has a {index.name} that names {name!r:.80}, which is no safetensors file of the folder")
    return names


def _unusable(folder: Path, problem: str) -> InvalidSpec:
    return InvalidSpec(
        f"init_from.source: {folder.name!r} {problem}",
        errors=[{"field": "init_from.source", "value": folder.name, "problem": problem}],
    )


def initial_weights(job: JobSpec, roots: Sequence[Path], runs: Path | None) -> dict[str, Tensor] | None:
    """The weights that a job starts from, by our names; None for random ones.

    `runs` is the folder of all runs' checkpoints, None where there is no service. Raises InvalidSpec when the source isn't there.
    """
    if job.training.init_from is None:
        return None
    source = job.training.init_from.source
    run, at, step = source.partition("@")
    if at and runs is not None:
        return read_weights(runs / run / folder_name(int(step)))
    for root in roots:
        if not at and (root / source).is_dir():
            return read_weights(contained(root / source, root, source, "training.init_from.source"), root)
    problem = "a run's checkpoint is known to a service only" if at else "no such folder below the data roots"
    raise InvalidSpec(
        f"training.init_from.source = {source!r}: {problem}",
        errors=[{"field": "training.init_from.source", "value": source, "problem": problem}],
    )


def by_our_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames Mixtral's experts and takes stacked experts (gate_up_proj [E, 2I, H], down_proj [E, H, I]) apart; float32."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".block_sparse_moe." in name:
            for theirs, ours in _MIXTRAL:
                name = name.replace(theirs, ours)
        value = tensor.to(torch.float32)
        if name.endswith(".mlp.experts.gate_up_proj"):
            base = name.removesuffix(".gate_up_proj")
            for e, both in enumerate(value):
                gate, up = both.chunk(2)
                out[f"{base}.{e}.gate_proj.weight"], out[f"{base}.{e}.up_proj.weight"] = gate, up
        elif name.endswith(".mlp.experts.down_proj"):
            out |= {f"{name.removesuffix('.down_proj')}.{e}.down_proj.weight": down for e, down in enumerate(value)}
        else:
            out[name] = value
    return out

"""Named model shapes. A preset fills in what the spec doesn't say; a key that the spec does give always wins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

Preset = Literal["tiny", "olmoe-1b-7b", "qwen3-30b-a3b"]

# The last two are the public configurations of allenai/OLMoE-1B-7B-0924 and Qwen/Qwen3-30B-A3B.
PRESETS: Final[dict[str, dict[str, Any]]] = {
    "tiny": {
        "hidden_size": 256, "layers": 4, "heads": 8, "kv_heads": 4, "head_size": 32,
        "experts": 8, "top_k": 2, "expert_intermediate_size": 512, "shared_expert_intermediate_size": None,
        "vocabulary_size": 512, "rope_base": 10_000.0, "norm_epsilon": 1e-6, "qk_norm": "head",
        "renormalise_top_k": True, "aux_loss_coefficient": 0.0, "z_loss_coefficient": 0.0,
        "tie_embeddings": False, "initializer_range": 0.02,
    },
    "olmoe-1b-7b": {
        "hidden_size": 2048, "layers": 16, "heads": 16, "kv_heads": 16, "head_size": 128,
        "experts": 64, "top_k": 8, "expert_intermediate_size": 1024, "shared_expert_intermediate_size": None,
        "vocabulary_size": 50_304, "rope_base": 10_000.0, "norm_epsilon": 1e-5, "qk_norm": "full",
        "renormalise_top_k": False, "aux_loss_coefficient": 0.01, "z_loss_coefficient": 0.0,
        "tie_embeddings": False, "initializer_range": 0.02,
    },
    "qwen3-30b-a3b": {
        "hidden_size": 2048, "layers": 48, "heads": 32, "kv_heads": 4, "head_size": 128,
        "experts": 128, "top_k": 8, "expert_intermediate_size": 768, "shared_expert_intermediate_size": None,
        "vocabulary_size": 151_936, "rope_base": 1_000_000.0, "norm_epsilon": 1e-6, "qk_norm": "head",
        "renormalise_top_k": True, "aux_loss_coefficient": 0.001, "z_loss_coefficient": 0.0,
        "tie_embeddings": False, "initializer_range": 0.02,
    },
}
# By these a model is told to be a preset's. Migration 0006 has its own copy.
SIZES: Final = ("hidden_size", "layers", "heads", "kv_heads", "head_size", "experts", "top_k", "expert_intermediate_size",
                "vocabulary_size")


def preset_of(model: Mapping[str, Any]) -> str | None:
    """The preset whose sizes a resolved model has; None where it is no preset's."""
    return next((name for name, preset in PRESETS.items() if all(model[key] == preset[key] for key in SIZES)), None)

"""The reference: the same model in plain torch and float64, by autograd, for judging accuracy (never for comparing bits).

It follows the formulas of docs/arithmetic.md without its rounding points and reduction orders. Weights come by their
checkpoint names. Slow on purpose: one expert and one head at a time is the point.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mok_service.spec import ModelSpec


@dataclass(frozen=True)
class ReferenceOutput:
    """What a forward pass gives, float64."""

    logits: Tensor  # [sequences, length, V]
    loss: Tensor  # mean cross entropy over labels >= 0
    aux_loss: Tensor  # mean over layers and groups
    z_loss: Tensor  # mean over real tokens and layers
    chosen: list[Tensor]  # a layer: int64 [tokens, K]

    def total(self, model: ModelSpec) -> Tensor:
        """What training minimises."""
        return self.loss + model.aux_loss_coefficient * self.aux_loss + model.z_loss_coefficient * self.z_loss


def forward(
    model: ModelSpec,
    weights: Mapping[str, Tensor],
    inputs: Tensor,
    labels: Tensor,
    *,
    mask: Tensor | None = None,
    group_sequences: int | None = None,
    chosen: list[Tensor] | None = None,
) -> ReferenceOutput:
    """inputs, labels int64 [sequences, length] (label -1: does not count), mask bool of the same shape (False: padding).

    `chosen` replaces top-k by given experts a layer, so that another backend's choice at a near tie can be followed.
    """
    sequences, length = inputs.shape
    mask = torch.ones_like(inputs, dtype=torch.bool) if mask is None else mask
    x = weights["model.embed_tokens.weight"][inputs]
    aux, z, choices = [], [], []
    for i in range(model.layers):
        part = {k.removeprefix(f"model.layers.{i}."): v for k, v in weights.items() if k.startswith(f"model.layers.{i}.")}
        x = x + attention(model, part, rmsnorm(x, part["input_layernorm.weight"], model.norm_epsilon))
        normed = rmsnorm(x, part["post_attention_layernorm.weight"], model.norm_epsilon).reshape(sequences * length, -1)
        logits = normed @ part["mlp.gate.weight"].T
        index = logits.topk(model.top_k, dim=-1).indices if chosen is None else chosen[i]
        choices.append(index)
        x = x + experts(model, part, normed, logits, index, mask.reshape(-1)).view_as(x)
        size = (group_sequences or sequences) * length
        aux.append(balance_loss(model, logits, index, mask.reshape(-1), size))
        z.append(torch.logsumexp(logits, -1)[mask.reshape(-1)].square().mean())
    x = rmsnorm(x, weights["model.norm.weight"], model.norm_epsilon)
    head = weights["model.embed_tokens.weight" if model.tie_embeddings else "lm_head.weight"]
    out = x @ head.T
    loss = F.cross_entropy(out.reshape(-1, out.shape[-1]), labels.reshape(-1), ignore_index=-1)
    return ReferenceOutput(out, loss, torch.stack(aux).mean(), torch.stack(z).mean(), choices)


def rmsnorm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def rotate(x: Tensor, base: float) -> Tensor:
    """Rotary embedding of x [sequences, length, heads, D], halves paired as in Hugging Face's rotate_half."""
    length, half = x.shape[1], x.shape[3] // 2
    frequency = base ** (-torch.arange(half, dtype=torch.float64) * 2 / x.shape[3])
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos()[None, :, None, :], angle.sin()[None, :, None, :]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attention(model: ModelSpec, part: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Causal grouped-query attention with its output projection; x [sequences, length, H]."""
    sequences, length, _ = x.shape
    q, k, v = (x @ part[f"self_attn.{p}_proj.weight"].T for p in "qkv")
    if model.qk_norm == "full":
        q, k = (rmsnorm(t, part[f"self_attn.{p}_norm.weight"], model.norm_epsilon) for t, p in ((q, "q"), (k, "k")))
    q, k, v = (t.view(sequences, length, -1, model.head_size) for t in (q, k, v))
    if model.qk_norm == "head":
        q, k = (rmsnorm(t, part[f"self_attn.{p}_norm.weight"], model.norm_epsilon) for t, p in ((q, "q"), (k, "k")))
    q, k = rotate(q, model.rope_base), rotate(k, model.rope_base)
    repeat = model.heads // model.kv_heads
    k, v = (t.repeat_interleave(repeat, dim=2) for t in (k, v))
    score = torch.einsum("bihd,bjhd->bhij", q, k) / model.head_size**0.5
    score = score.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
    out = torch.einsum("bhij,bjhd->bihd", score.softmax(-1), v).reshape(sequences, length, -1)
    return out @ part["self_attn.o_proj.weight"].T


def experts(model: ModelSpec, part: Mapping[str, Tensor], x: Tensor, logits: Tensor, index: Tensor, mask: Tensor) -> Tensor:
    """The chosen experts' weighted sum and the shared expert; x [tokens, H], logits [tokens, E], index [tokens, K]."""
    weight = logits.softmax(-1).gather(1, index)
    if model.renormalise_top_k:
        weight = weight / weight.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for e in range(model.experts):
        token, slot = torch.where((index == e) & mask[:, None])
        if token.numel():
            out = out.index_add(0, token, swiglu(part, f"mlp.experts.{e}", x[token]) * weight[token, slot, None])
    if model.shared_expert_intermediate_size:
        out = out + swiglu(part, "mlp.shared_expert", x)
    return out


def swiglu(part: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """down(silu(gate(x)) * up(x))"""
    gate, up, down = (part[f"{name}.{p}_proj.weight"] for p in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def balance_loss(model: ModelSpec, logits: Tensor, index: Tensor, mask: Tensor, group_tokens: int) -> Tensor:
    """E * sum_e share[e] * mean probability[e], averaged over the groups that have real tokens (docs/arithmetic.md, 10.4)."""
    values = []
    for start in range(0, logits.shape[0], group_tokens):
        real = mask[start : start + group_tokens]
        if real.any():
            chosen = F.one_hot(index[start : start + group_tokens][real], model.experts).sum((0, 1)).to(logits.dtype)
            mean = logits[start : start + group_tokens][real].softmax(-1).mean(0)
            values.append(model.experts * (chosen / real.sum() * mean).sum())
    return torch.stack(values).mean()

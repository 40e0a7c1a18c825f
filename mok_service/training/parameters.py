"""Where every weight lies: one flat buffer, matrices that a kernel reads as one kept side by side, and the logical tensors
(Hugging Face names and shapes) as contiguous ranges of it. Digests and checkpoints see only the logical tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from mok_service.kernels.native import BF16, NativeBackend
from mok_service.spec import ModelSpec

_ALIGN = 64  # elements: every storage starts on its own cache lines


@dataclass(frozen=True)
class LogicalTensor:
    """A tensor as a checkpoint names it: `count` elements of the flat buffer from `offset` on."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass
class Layout:
    """Storages (what kernels see) and logical tensors (what people see) of a model; matrices first, then norm weights."""

    storages: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)  # key -> offset, shape
    tensors: list[LogicalTensor] = field(default_factory=list)
    size: int = 0
    decayed: int = 0  # elements before this one are matrices: weight decay applies

    def put(self, key: str, shape: tuple[int, ...], parts: list[tuple[str, tuple[int, ...]]]) -> None:
        offset = self.size
        self.storages[key] = (offset, shape)
        at = offset
        for name, part in parts:
            self.tensors.append(LogicalTensor(name, part, at))
            at += math.prod(part)
        assert at - offset == math.prod(shape), key
        self.size = -(-at // _ALIGN) * _ALIGN


def lay_out(model: ModelSpec) -> Layout:
    """The layout of a model; names and shapes are those of Hugging Face's Qwen3-MoE and OLMoE checkpoints."""
    h, d, experts, inner = model.hidden_size, model.head_size, model.experts, model.expert_intermediate_size
    q, kv, shared = model.heads * d, model.kv_heads * d, model.shared_expert_intermediate_size
    out = Layout()
    out.put("embedding", (model.vocabulary_size, h), [("model.embed_tokens.weight", (model.vocabulary_size, h))])
    for i in range(model.layers):
        at, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        out.put(
            f"{i}.qkv",
            (q + 2 * kv, h),
            [(f"{at}.q_proj.weight", (q, h)), (f"{at}.k_proj.weight", (kv, h)), (f"{at}.v_proj.weight", (kv, h))],
        )
        out.put(f"{i}.o", (h, q), [(f"{at}.o_proj.weight", (h, q))])
        out.put(f"{i}.router", (experts, h), [(f"{mlp}.gate.weight", (experts, h))])
        out.put(
            f"{i}.gate_up",
            (experts, 2 * inner, h),
            [(f"{mlp}.experts.{e}.{part}_proj.weight", (inner, h)) for e in range(experts) for part in ("gate", "up")],
        )
        out.put(f"{i}.down", (experts, h, inner), [(f"{mlp}.experts.{e}.down_proj.weight", (h, inner)) for e in range(experts)])
        if shared:
            out.put(
                f"{i}.shared_gate_up",
                (2 * shared, h),
                [(f"{mlp}.shared_expert.{part}_proj.weight", (shared, h)) for part in ("gate", "up")],
            )
            out.put(f"{i}.shared_down", (h, shared), [(f"{mlp}.shared_expert.down_proj.weight", (h, shared))])
    if not model.tie_embeddings:
        out.put("head", (model.vocabulary_size, h), [("lm_head.weight", (model.vocabulary_size, h))])
    out.decayed = out.size
    for i in range(model.layers):
        name = f"model.layers.{i}"
        out.put(f"{i}.norm1", (h,), [(f"{name}.input_layernorm.weight", (h,))])
        out.put(f"{i}.norm2", (h,), [(f"{name}.post_attention_layernorm.weight", (h,))])
        if model.qk_norm != "none":
            sizes = (d, d) if model.qk_norm == "head" else (q, kv)
            for part, size in zip("qk", sizes, strict=True):
                out.put(f"{i}.{part}_norm", (size,), [(f"{name}.self_attn.{part}_norm.weight", (size,))])
    out.put("norm", (h,), [("model.norm.weight", (h,))])
    return out


class Parameters:
    """Master weights, gradients, both moments (float32) and operands (bfloat16 copies, or the masters in fp32), all flat."""

    def __init__(self, model: ModelSpec, precision: str, backend: NativeBackend) -> None:
        self.layout = lay_out(model)
        size = self.layout.size
        self.weights, self.gradients, self.first, self.second = (backend.zeros(size) for _ in range(4))
        self.operands = self.weights if precision == "fp32" else backend.zeros(size, BF16)
        self._model, self._precision, self._backend = model, precision, backend
        self.weight = {key: self._view(self.weights, key) for key in self.layout.storages}
        self.gradient = {key: self._view(self.gradients, key) for key in self.layout.storages}
        self.operand = {key: self._view(self.operands, key) for key in self.layout.storages}

    def _view(self, flat: Tensor, key: str) -> Tensor:
        offset, shape = self.layout.storages[key]
        return flat[offset : offset + math.prod(shape)].view(shape)

    def initialise(self, seed: int) -> None:
        """Random matrices and unit norms, docs/arithmetic.md 14.3."""
        for tensor in self.layout.tensors:
            view = self.weights[tensor.offset : tensor.offset + tensor.count]
            if len(tensor.shape) == 1:
                view.fill_(1.0)
            else:
                self._backend.place = f"initial weights, {tensor.name}"
                self._backend.random_normal(view, seed, f"init/{tensor.name}", self._model.initializer_range)
        self.refresh_operands()

    def refresh_operands(self) -> None:
        """Make the operands follow the master weights, after these were set from outside."""
        if self._precision == "bf16":
            self._backend.to_operand(self.weights, "bf16", self.operands)

    def named(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The logical tensors of one flat buffer, as views."""
        for tensor in self.layout.tensors:
            yield tensor.name, flat[tensor.offset : tensor.offset + tensor.count].view(tensor.shape)

    def sums_of_squares(self) -> list[tuple[str, float]]:
        """(name, sum of squared gradients [13.1]) of every logical tensor, in ascending name order; one read from the device."""
        runs: list[list[LogicalTensor]] = []
        for tensor in self.layout.tensors:
            last = runs[-1][-1] if runs else None
            if last and last.shape == tensor.shape and last.offset + last.count == tensor.offset:
                runs[-1].append(tensor)
            else:
                runs.append([tensor])
        out = self._backend.empty(len(self.layout.tensors))
        at = 0
        for run in runs:
            rows, columns = (1, run[0].shape[0]) if len(run[0].shape) == 1 else run[0].shape
            flat = self.gradients[run[0].offset : run[-1].offset + run[-1].count]
            self._backend.sum_squares(flat.view(len(run), rows, columns), out[at : at + len(run)])
            at += len(run)
        names = [tensor.name for tensor in itertools.chain.from_iterable(runs)]
        return sorted(zip(names, out.tolist(), strict=True), key=lambda row: row[0].encode())

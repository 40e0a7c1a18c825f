"""The model: a decoder-only Mixture-of-Experts transformer, forward and backward, as a sequence of backend operations.

Nothing here computes: torch holds memory, the backend (docs/arithmetic.md, 16) does the arithmetic. Names of dimensions:
T tokens of a micro-batch, H hidden, D head size, E experts, K top-k, I expert inner size, R expert rows, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mok_service.kernels.layers import attention_scale
from mok_service.kernels.moe import routing_capacity
from mok_service.kernels.native import F32, I32, I64, OPERAND_DTYPES, U8, NativeBackend
from mok_service.spec import ModelSpec
from mok_service.training.parameters import Parameters
from mok_service.training.waves import Waves

_LOGITS_MAX = 1 << 26  # elements of the logits' workspace; no bit depends on it


@dataclass(frozen=True)
class MicroBatch:
    """A whole number of groups of one global batch, on the device."""

    inputs: Tensor  # int32 [T]
    labels: Tensor  # int32 [T], -1: does not count
    mask: Tensor  # uint8 [T]
    sequences: int
    first_group: int  # number of its first group in the global batch
    aux_scale: Tensor | None = None  # float32 [groups], docs/arithmetic.md 10.4
    z_scale: float = 0.0


@dataclass
class StepSums:
    """What a step adds up over its micro-batches."""

    loss: Tensor  # int64 [1], fixed point 2^-32
    status: Tensor  # int32 [1], not 0: something was not finite
    counts: Tensor  # int32 [layers, groups, E]
    probabilities: Tensor | None  # int64 [layers, groups, E], fixed point; only with auxiliary losses
    z: Tensor | None  # int64 [1]


class Model:
    """Weights, gradients and the workspace of one device."""

    def __init__(
        self, spec: ModelSpec, precision: str, backend: NativeBackend, length: int, group_sequences: int, shards: int
    ) -> None:
        self.spec, self.precision, self.backend = spec, precision, backend
        self.operand_dtype = OPERAND_DTYPES[precision]
        self.length, self.group_sequences, self.group_tokens = length, group_sequences, group_sequences * length
        self.parameters = Parameters(spec, precision, backend)
        self.scale = attention_scale(spec.head_size)
        backend.place = "table of the rotary embedding"
        self._rope = backend.rope_table(length, spec.head_size, spec.rope_base)
        self._buffers: dict[str, Tensor] = {}
        self._routings: dict[str, _Routing] = {}
        self._waves = Waves(backend, shards)
        self._head_gradient = torch.zeros_like(self.parameters.gradient["embedding"]) if spec.tie_embeddings else None

    # ---- a step --------------------------------------------------------------------------------------------------------

    def new_sums(self, groups: int) -> StepSums:
        """Room for the sums of a step of `groups` groups, all zero."""
        device, spec = self.backend.device, self.spec
        auxiliary = spec.aux_loss_coefficient > 0 or spec.z_loss_coefficient > 0
        shape = (spec.layers, groups, spec.experts)
        return StepSums(
            loss=torch.zeros(1, dtype=I64, device=device),
            status=torch.zeros(1, dtype=I32, device=device),
            counts=torch.zeros(shape, dtype=I32, device=device),
            probabilities=torch.zeros(shape, dtype=I64, device=device) if auxiliary else None,
            z=torch.zeros(1, dtype=I64, device=device) if auxiliary else None,
        )

    def start_step(self, sums: StepSums) -> None:
        """Zero the gradients and the step's sums."""
        for tensor in (
            self.parameters.gradients,
            self._head_gradient,
            sums.loss,
            sums.status,
            sums.counts,
            sums.probabilities,
            sums.z,
        ):
            if tensor is not None:
                tensor.zero_()

    def accumulate(self, batch: MicroBatch, sums: StepSums) -> None:
        """Forward and backward of one micro-batch: adds to the gradients and to the step's sums."""
        x = self._hidden(batch, sums)
        gradient = self._loss(x, batch, sums)
        for layer in reversed(range(self.spec.layers)):
            self._layer_backward(layer, batch, sums, gradient)
        self._at(batch, "embedding, backward")
        for g, rows in self._groups(batch):
            self._dense("embedding", g, functools.partial(self.backend.embedding_backward, batch.inputs[rows], gradient[rows]))

    def finish_step(self) -> None:
        """Join what is kept apart until all groups were seen: the two gradients of tied embeddings."""
        if self._head_gradient is not None:
            gradient = self.parameters.gradient["embedding"]
            self.backend.place = "embedding, backward: the gradient from the head joins"
            self.backend.add(gradient, self._head_gradient, gradient)

    def logits(self, inputs: Tensor, sequences: int) -> Tensor:
        """float32 [T, V] for token ids int32 [T]: the forward pass alone."""
        mask = torch.ones(inputs.numel(), dtype=U8, device=self.backend.device)
        batch = MicroBatch(inputs, torch.full_like(inputs, -1), mask, sequences, 0)
        x = self._hidden(batch, self.new_sums(-(-sequences // self.group_sequences)))
        final = self._operand("final", x.shape[0], self.spec.hidden_size)
        self.backend.rmsnorm(
            x, self.parameters.weight["norm"], self.spec.norm_epsilon, final, self._buffer("final.rstd", x.shape[0])
        )
        return self.backend.matmul(final, self._head(), trans_b=True)

    # ---- forward -------------------------------------------------------------------------------------------------------

    def _hidden(self, batch: MicroBatch, sums: StepSums) -> Tensor:
        """The residual stream after the last layer, float32 [T, H]; what backward needs stays in the workspace."""
        tokens = batch.inputs.numel()
        x = self._buffer("0.x", tokens, self.spec.hidden_size)
        self._at(batch, "embedding, forward")
        self.backend.embedding(batch.inputs, self.parameters.operand["embedding"], x)
        for layer in range(self.spec.layers):
            after_attention = self._attention(layer, x, batch)
            x = self._experts(layer, after_attention, batch, sums)
        return x

    def _attention(self, layer: int, x: Tensor, batch: MicroBatch) -> Tensor:
        b, spec, tokens = self.backend, self.spec, x.shape[0]
        weight, operand = self.parameters.weight, self.parameters.operand
        self._at(batch, f"layer {layer}, attention, forward")
        normed = self._operand(f"{layer}.n1", tokens, spec.hidden_size)
        b.rmsnorm(x, weight[f"{layer}.norm1"], spec.norm_epsilon, normed, self._buffer(f"{layer}.rstd1", tokens))
        qkv = self._operand(f"{layer}.qkv", tokens, operand[f"{layer}.qkv"].shape[0])
        b.matmul(normed, operand[f"{layer}.qkv"], trans_b=True, out=qkv)
        rotated = {}
        for part, heads, columns in self._q_and_k():
            rotated[part] = self._operand(f"{layer}.{part}", tokens, heads * spec.head_size)
            b.qk(
                qkv[:, columns],
                heads,
                weight.get(f"{layer}.{part}_norm"),
                spec.qk_norm,
                spec.norm_epsilon,
                self._positions(batch),
                self._rope,
                rotated[part],
                self._qk_rstd(layer, part, heads, tokens),
            )
        out = self._operand(f"{layer}.attention", tokens, spec.heads * spec.head_size)
        b.attention(
            rotated["q"],
            rotated["k"],
            qkv[:, self._v_columns()],
            sequences=batch.sequences,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            scale=self.scale,
            out=out,
            row_max=self._buffer(f"{layer}.row_max", tokens, spec.heads),
            row_recip=self._buffer(f"{layer}.row_recip", tokens, spec.heads),
        )
        after = self._buffer(f"{layer}.x2", tokens, spec.hidden_size)
        return b.matmul(out, operand[f"{layer}.o"], trans_b=True, out=after, addend=x)

    def _experts(self, layer: int, x: Tensor, batch: MicroBatch, sums: StepSums) -> Tensor:
        b, spec, tokens = self.backend, self.spec, x.shape[0]
        operand = self.parameters.operand
        self._at(batch, f"layer {layer}, experts, forward")
        normed = self._operand(f"{layer}.n2", tokens, spec.hidden_size)
        rstd = self._buffer(f"{layer}.rstd2", tokens)
        b.rmsnorm(x, self.parameters.weight[f"{layer}.norm2"], spec.norm_epsilon, normed, rstd)
        routing = self._route(layer, normed, batch, sums)
        gate_up = self._operand(f"{layer}.gate_up", routing.capacity, 2 * spec.expert_intermediate_size)
        b.grouped_matmul_rows(
            normed, operand[f"{layer}.gate_up"], routing.offsets, gate_up, trans_b=True, a_rows=routing.row_token
        )
        act = self._operand(f"{layer}.act", routing.capacity, spec.expert_intermediate_size)
        b.swiglu(gate_up, routing.rows, act)
        rows = self._operand("expert_rows", routing.capacity, spec.hidden_size)
        b.grouped_matmul_rows(act, operand[f"{layer}.down"], routing.offsets, rows, trans_b=True)
        out = b.combine(rows, routing.slot_row, self._buffer("moe_out", tokens, spec.hidden_size), weight=routing.weight)
        if spec.shared_expert_intermediate_size:
            shared = self._operand(f"{layer}.shared_gate_up", tokens, 2 * spec.shared_expert_intermediate_size)
            b.matmul(normed, operand[f"{layer}.shared_gate_up"], trans_b=True, out=shared)
            shared_act = self._operand(f"{layer}.shared_act", tokens, spec.shared_expert_intermediate_size)
            b.swiglu(shared, tokens, shared_act)
            b.matmul(shared_act, operand[f"{layer}.shared_down"], trans_b=True, out=out, addend=out)
        return b.add(x, out, self._buffer(f"{layer + 1}.x", tokens, spec.hidden_size))

    def _route(self, layer: int, normed: Tensor, batch: MicroBatch, sums: StepSums) -> _Routing:
        b, spec, tokens = self.backend, self.spec, normed.shape[0]
        logits = b.matmul(
            normed,
            self.parameters.operand[f"{layer}.router"],
            trans_b=True,
            out=self._buffer("router_logits", tokens, spec.experts),
        )
        routing = self._routing(layer, batch)
        b.router(
            logits,
            spec.top_k,
            spec.renormalise_top_k,
            routing.probabilities,
            routing.log_sum_exp,
            routing.index,
            routing.weight,
            sums.status,
        )
        groups = slice(batch.first_group, batch.first_group + len(self._groups(batch)))
        routing.counts = sums.counts[layer, groups]
        b.routing_plan(
            routing.index,
            batch.mask,
            spec.experts,
            self.group_tokens,
            routing.row_token,
            routing.row_slot,
            routing.slot_row,
            routing.offsets,
            routing.counts,
        )
        routing.rows = int(routing.offsets[-1]) if b.rows_are_counted else routing.capacity
        if sums.probabilities is not None and sums.z is not None:
            b.router_sums(
                routing.probabilities,
                routing.log_sum_exp,
                batch.mask,
                self.group_tokens,
                sums.probabilities[layer, groups],
                sums.z,
            )
        return routing

    # ---- loss ----------------------------------------------------------------------------------------------------------

    def _loss(self, x: Tensor, batch: MicroBatch, sums: StepSums) -> Tensor:
        """Adds the loss; returns its unscaled gradient by the residual stream, float32 [T, H]."""
        b, spec, tokens = self.backend, self.spec, x.shape[0]
        norm = self.parameters.weight["norm"]
        self._at(batch, "head and loss, forward and backward")
        final, rstd = self._operand("final", tokens, spec.hidden_size), self._buffer("final.rstd", tokens)
        b.rmsnorm(x, norm, spec.norm_epsilon, final, rstd)
        d_final = self._buffer("d_normed", tokens, spec.hidden_size)
        gradient = self._buffer("dx", tokens, spec.hidden_size)
        for g, rows in self._groups(batch):
            self._head_loss(g, rows, final, d_final, batch.labels, sums)

            def fill(out: Tensor, r: slice = rows) -> None:
                b.rmsnorm_backward(x[r], norm, rstd[r], d_final[r], gradient[r], grad_weight=out)

            self._dense("norm", g, fill)
        return gradient

    def _head_loss(self, g: int, rows: slice, final: Tensor, d_final: Tensor, labels: Tensor, sums: StepSums) -> None:
        """Logits, loss and their gradients for one group, in chunks of rows; the head's gradient is one chain over the group."""
        b, head, vocabulary = self.backend, self._head(), self.spec.vocabulary_size
        step = max(16, _LOGITS_MAX // vocabulary // 16 * 16)
        chunks = [slice(s, min(s + step, rows.stop)) for s in range(rows.start, rows.stop, step)]
        key = "embedding" if self._head_gradient is not None else "head"

        def chunk_gradient(chunk: slice) -> Tensor:
            count = chunk.stop - chunk.start
            logits = b.matmul(final[chunk], head, trans_b=True, out=self._buffer("logits", count, vocabulary))
            d_logits = self._operand("d_logits", count, vocabulary)
            b.cross_entropy(logits, labels[chunk], sums.loss, sums.status, d_logits)
            b.matmul(d_logits, head, out=d_final[chunk])
            return d_logits

        def fill(out: Tensor) -> None:
            if len(chunks) == 1:
                b.matmul(chunk_gradient(chunks[0]), final[chunks[0]], trans_a=True, out=out, addend=out)
                return
            chain = self._buffer("head_chain", *out.shape)
            for i, chunk in enumerate(chunks):
                b.matmul(chunk_gradient(chunk), final[chunk], trans_a=True, out=chain, initial=chain if i else None)
            b.add(out, chain, out)

        self._waves.add(
            f"head of {key}", self._head_gradient if self._head_gradient is not None else self._gradient("head"), g, fill
        )

    # ---- backward ------------------------------------------------------------------------------------------------------

    def _layer_backward(self, layer: int, batch: MicroBatch, sums: StepSums, gradient: Tensor) -> None:
        """Turns the gradient by a layer's output (float32 [T, H], in place) into the gradient by its input."""
        self._experts_backward(layer, batch, gradient)
        self._attention_backward(layer, batch, gradient)

    def _experts_backward(self, layer: int, batch: MicroBatch, gradient: Tensor) -> None:
        b, spec, tokens = self.backend, self.spec, gradient.shape[0]
        operand, inner = self.parameters.operand, spec.expert_intermediate_size
        self._at(batch, f"layer {layer}, experts, backward")
        routing, normed = self._routing(layer, batch), self._operand(f"{layer}.n2", tokens, spec.hidden_size)
        d_out = b.to_operand(gradient, self.precision, self._operand("d_out", tokens, spec.hidden_size))
        gate_up = self._operand(f"{layer}.gate_up", routing.capacity, 2 * inner)
        d_act = self._buffer("d_act", routing.capacity, inner)
        b.grouped_matmul_rows(d_out, operand[f"{layer}.down"], routing.offsets, d_act, trans_b=False, a_rows=routing.row_token)
        d_gate_up = self._operand("d_gate_up", routing.capacity, 2 * inner)
        weighted = self._operand("weighted_act", routing.capacity, inner)
        d_weight = self._buffer("d_expert_weight", tokens, spec.top_k)
        b.swiglu_backward(
            gate_up,
            d_act,
            routing.rows,
            d_gate_up,
            slot_weight=routing.weight,
            row_slot=routing.row_slot,
            weighted_act=weighted,
            grad_slot_weight=d_weight,
        )
        down, up = self._gradient(f"{layer}.down"), self._gradient(f"{layer}.gate_up")
        b.grouped_matmul_depth(d_out, weighted, routing.offsets, down, a_rows=routing.row_token, initial=down)
        b.grouped_matmul_depth(d_gate_up, normed, routing.offsets, up, b_rows=routing.row_token, initial=up)
        rows = self._operand("expert_rows", routing.capacity, spec.hidden_size)
        b.grouped_matmul_rows(d_gate_up, operand[f"{layer}.gate_up"], routing.offsets, rows, trans_b=False)
        d_normed = b.combine(rows, routing.slot_row, self._buffer("d_normed", tokens, spec.hidden_size))
        self._router_backward(layer, batch, routing, d_weight, normed, d_normed)
        if spec.shared_expert_intermediate_size:
            self._shared_expert_backward(layer, batch, d_out, normed, d_normed)
        self._norm_backward(layer, 2, batch, self._buffer(f"{layer}.x2", tokens, spec.hidden_size), d_normed, gradient)

    def _router_backward(
        self, layer: int, batch: MicroBatch, routing: _Routing, d_weight: Tensor, normed: Tensor, d_normed: Tensor
    ) -> None:
        b, spec, tokens = self.backend, self.spec, normed.shape[0]
        d_logits = self._operand("d_router_logits", tokens, spec.experts)
        assert routing.counts is not None
        b.router_backward(
            routing.probabilities,
            routing.log_sum_exp,
            routing.weight,
            routing.index,
            d_weight,
            batch.mask,
            routing.counts,
            renormalise=spec.renormalise_top_k,
            group_tokens=self.group_tokens,
            aux_scale=batch.aux_scale,
            z_scale=batch.z_scale,
            grad_logits=d_logits,
        )
        b.matmul(d_logits, self.parameters.operand[f"{layer}.router"], out=d_normed, addend=d_normed)
        self._weight_gradient(f"{layer}.router", batch, d_logits, normed)

    def _shared_expert_backward(self, layer: int, batch: MicroBatch, d_out: Tensor, normed: Tensor, d_normed: Tensor) -> None:
        b, tokens, inner = self.backend, normed.shape[0], self.spec.shared_expert_intermediate_size
        assert inner is not None
        operand = self.parameters.operand
        d_act = b.matmul(d_out, operand[f"{layer}.shared_down"], out=self._buffer("d_shared_act", tokens, inner))
        d_gate_up = self._operand("d_shared_gate_up", tokens, 2 * inner)
        b.swiglu_backward(self._operand(f"{layer}.shared_gate_up", tokens, 2 * inner), d_act, tokens, d_gate_up)
        self._weight_gradient(f"{layer}.shared_down", batch, d_out, self._operand(f"{layer}.shared_act", tokens, inner))
        self._weight_gradient(f"{layer}.shared_gate_up", batch, d_gate_up, normed)
        b.matmul(d_gate_up, operand[f"{layer}.shared_gate_up"], out=d_normed, addend=d_normed)

    def _attention_backward(self, layer: int, batch: MicroBatch, gradient: Tensor) -> None:
        b, spec, tokens = self.backend, self.spec, gradient.shape[0]
        weight, operand, width = self.parameters.weight, self.parameters.operand, spec.heads * spec.head_size
        self._at(batch, f"layer {layer}, attention, backward")
        d_y = b.to_operand(gradient, self.precision, self._operand("d_out", tokens, spec.hidden_size))
        out = self._operand(f"{layer}.attention", tokens, width)
        d_attention = b.matmul(d_y, operand[f"{layer}.o"], out=self._operand("d_attention", tokens, width))
        self._weight_gradient(f"{layer}.o", batch, d_y, out)
        qkv = self._operand(f"{layer}.qkv", tokens, operand[f"{layer}.qkv"].shape[0])
        d_qkv = self._operand("d_qkv", tokens, qkv.shape[1])
        d_q, d_k = self._buffer("d_q", tokens, width), self._buffer("d_k", tokens, spec.kv_heads * spec.head_size)
        q, k = self._operand(f"{layer}.q", tokens, width), self._operand(f"{layer}.k", tokens, d_k.shape[1])
        b.attention_backward(
            q,
            k,
            qkv[:, self._v_columns()],
            out,
            d_attention,
            self._buffer(f"{layer}.row_max", tokens, spec.heads),
            self._buffer(f"{layer}.row_recip", tokens, spec.heads),
            sequences=batch.sequences,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            scale=self.scale,
            grad_q=d_q,
            grad_k=d_k,
            grad_v=d_qkv[:, self._v_columns()],
        )
        positions = self._positions(batch)
        for (part, heads, columns), d_part in zip(self._q_and_k(), (d_q, d_k), strict=True):
            norm, rstd = weight.get(f"{layer}.{part}_norm"), self._qk_rstd(layer, part, heads, tokens)
            for g, rows in self._groups(batch):
                fill = functools.partial(
                    b.qk_backward,
                    qkv[rows, columns],
                    heads,
                    norm,
                    spec.qk_norm,
                    None if rstd is None else rstd[rows],
                    positions[rows],
                    self._rope,
                    d_part[rows],
                    d_qkv[rows, columns],
                )
                if norm is None:
                    fill()
                else:
                    self._dense(f"{layer}.{part}_norm", g, fill)
        normed = self._operand(f"{layer}.n1", tokens, spec.hidden_size)
        d_normed = b.matmul(d_qkv, operand[f"{layer}.qkv"], out=self._buffer("d_normed", tokens, spec.hidden_size))
        self._weight_gradient(f"{layer}.qkv", batch, d_qkv, normed)
        self._norm_backward(layer, 1, batch, self._buffer(f"{layer}.x", tokens, spec.hidden_size), d_normed, gradient)

    def _norm_backward(self, layer: int, number: int, batch: MicroBatch, x: Tensor, d_normed: Tensor, gradient: Tensor) -> None:
        """gradient += the norm's gradient by its input; the weight's gradient group by group."""
        key, rstd = f"{layer}.norm{number}", self._buffer(f"{layer}.rstd{number}", x.shape[0])
        weight = self.parameters.weight[key]
        for g, rows in self._groups(batch):

            def fill(out: Tensor, r: slice = rows) -> None:
                self.backend.rmsnorm_backward(
                    x[r], weight, rstd[r], d_normed[r], gradient[r], addend=gradient[r], grad_weight=out
                )

            self._dense(key, g, fill)

    def _weight_gradient(self, key: str, batch: MicroBatch, d_out: Tensor, x: Tensor) -> None:
        """A linear layer's weight gradient: one chain over each group's tokens, then the wave rule."""
        for g, rows in self._groups(batch):

            def fill(out: Tensor, r: slice = rows) -> None:
                self.backend.matmul(d_out[r], x[r], trans_a=True, out=out, addend=out)

            self._dense(key, g, fill)

    # ---- helpers -------------------------------------------------------------------------------------------------------

    def _at(self, batch: MicroBatch, what: str) -> None:
        """Say what the operations to come are, for a trace."""
        first, count = batch.first_group, len(self._groups(batch))
        self.backend.place = f"{what}, " + (f"group {first}" if count == 1 else f"groups {first} to {first + count - 1}")

    def _gradient(self, key: str) -> Tensor:
        return self.parameters.gradient[key]

    def _dense(self, key: str, group: int, fill: Callable[[Tensor], object]) -> None:
        self._waves.add(key, self._gradient(key), group, fill)

    def _head(self) -> Tensor:
        return self.parameters.operand["embedding" if self.spec.tie_embeddings else "head"]

    def _groups(self, batch: MicroBatch) -> list[tuple[int, slice]]:
        """(number in the global batch, rows) of each group of the micro-batch."""
        tokens, size = batch.inputs.numel(), self.group_tokens
        return [(batch.first_group + i, slice(s, min(s + size, tokens))) for i, s in enumerate(range(0, tokens, size))]

    def _positions(self, batch: MicroBatch) -> Tensor:
        key = f"positions of {batch.sequences}"
        if key not in self._buffers:
            self._buffers[key] = torch.arange(self.length, dtype=I32, device=self.backend.device).repeat(batch.sequences)
        return self._buffers[key]

    def _q_and_k(self) -> tuple[tuple[str, int, slice], tuple[str, int, slice]]:
        """(part, heads, its columns of the q|k|v product)"""
        q, kv = self.spec.heads * self.spec.head_size, self.spec.kv_heads * self.spec.head_size
        return ("q", self.spec.heads, slice(0, q)), ("k", self.spec.kv_heads, slice(q, q + kv))

    def _v_columns(self) -> slice:
        q, kv = self.spec.heads * self.spec.head_size, self.spec.kv_heads * self.spec.head_size
        return slice(q + kv, q + 2 * kv)

    def _qk_rstd(self, layer: int, part: str, heads: int, tokens: int) -> Tensor | None:
        if self.spec.qk_norm == "none":
            return None
        return self._buffer(f"{layer}.{part}_rstd", tokens, *([heads] if self.spec.qk_norm == "head" else []))

    def _routing(self, layer: int, batch: MicroBatch) -> _Routing:
        """The layer's routing of this micro-batch: fresh buffers in the forward pass, the same ones in the backward pass."""
        spec, tokens = self.spec, batch.inputs.numel()
        groups = len(self._groups(batch))
        capacity = routing_capacity(tokens, spec.top_k, spec.experts, groups, self.group_tokens)
        name = f"routing {layer} {tokens}"
        routing = self._routings.get(name)
        if routing is None:
            device = self.backend.device

            def ints(*shape: int) -> Tensor:
                return torch.empty(shape, dtype=I32, device=device)

            routing = self._routings[name] = _Routing(
                capacity,
                self.backend.empty(tokens, spec.experts),
                self.backend.empty(tokens),
                ints(tokens, spec.top_k),
                self.backend.empty(tokens, spec.top_k),
                ints(capacity),
                ints(capacity),
                ints(tokens, spec.top_k),
                ints(spec.experts + 1),
            )
        return routing

    def _buffer(self, name: str, *shape: int, dtype: torch.dtype = F32) -> Tensor:
        """A workspace tensor, kept between steps; contents survive as long as name and shape stay the same."""
        count = math.prod(shape)
        flat = self._buffers.get(name)
        if flat is None or flat.numel() < count:
            # Zeros: rows beyond the routed ones are read, and ignored, before anything has written them.
            flat = self._buffers[name] = self.backend.zeros(count, dtype)
        return flat[:count].view(shape)

    def workspace(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that is kept between operations, by a name for people."""
        layers = {f"{i}.": f"layer {i} " for i in range(self.spec.layers)}
        for name, buffer in self._buffers.items():
            at, _, rest = name.partition(".")
            yield (layers[f"{at}."] + rest if f"{at}." in layers else name), buffer
        for name, routing in self._routings.items():
            for field, value in vars(routing).items():
                if isinstance(value, Tensor):
                    yield f"layer {name.split()[1]} routing {field}", value

    def _operand(self, name: str, *shape: int) -> Tensor:
        return self._buffer(name, *shape, dtype=self.operand_dtype)


@dataclass
class _Routing:
    """One layer's routing of one micro-batch (docs/arithmetic.md, 10)."""

    capacity: int
    probabilities: Tensor  # float32 [T, E]
    log_sum_exp: Tensor  # float32 [T]
    index: Tensor  # int32 [T, K]
    weight: Tensor  # float32 [T, K]
    row_token: Tensor  # int32 [capacity]
    row_slot: Tensor  # int32 [capacity]
    slot_row: Tensor  # int32 [T, K]
    offsets: Tensor  # int32 [E + 1]
    rows: int = 0
    counts: Tensor | None = None  # int32 [groups, E], a view of the step's sums

"""The arithmetic's operations inside a user's own torch model: `torch.library` operators with autograd and fake tensors.

    import mok_service.torch as mok
    layer = mok.MoELayer(hidden_size=256, intermediate_size=512, experts=8, top_k=2, precision="bf16")
    y = layer(x)                       # x, y: float32 [tokens, 256]; same bits on every machine, for any number of threads
    y.sum().backward()

Tensors are float32 in and out; `precision` says what matrix products read (docs/arithmetic.md, 4): float32, or bfloat16 by the
tensor-core rule. Sums run in the fixed orders of that page, so gradients are the same bits on every machine as well. The
operators are `torch.ops.mok.{linear, rms_norm, attention, moe}`; each names its section.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from mok_service.kernels import load_backend
from mok_service.kernels.layers import attention_scale
from mok_service.kernels.moe import routing_capacity
from mok_service.kernels.native import F32, I32, OPERAND_DTYPES, U8, NativeBackend

__all__ = ["MoELayer", "attention", "linear", "moe", "rms_norm"]


@functools.cache
def _cpu_backend() -> NativeBackend:
    return load_backend("cpu")


@functools.cache
def _cuda_backend(stream: torch.cuda.Stream) -> NativeBackend:
    return NativeBackend("cuda", device=stream.device.index, stream=stream)


def _backend(tensor: Tensor) -> NativeBackend:
    """The kernels of the tensor's device, on torch's present stream."""
    return _cpu_backend() if tensor.device.type == "cpu" else _cuda_backend(torch.cuda.current_stream(tensor.device))


def _operand(backend: NativeBackend, tensor: Tensor, precision: str) -> Tensor:
    if precision not in OPERAND_DTYPES:
        raise ValueError(f"precision = {precision!r}; allowed: {', '.join(OPERAND_DTYPES)}")
    if tensor.dtype != F32:
        raise TypeError(f"a tensor has dtype {tensor.dtype}; allowed: torch.float32")
    return backend.to_operand(tensor.contiguous(), precision)


# ---- linear [4] ----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("mok::linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor, precision: str) -> Tensor:
    b = _backend(x)
    return b.matmul(_operand(b, x, precision), _operand(b, weight, precision), trans_b=True)


@_linear.register_fake
def _(x: Tensor, weight: Tensor, precision: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("mok::linear_backward", mutates_args=())
def _linear_backward(grad: Tensor, x: Tensor, weight: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    b = _backend(x)
    g, x_operand, w = (_operand(b, t, precision) for t in (grad, x, weight))
    return b.matmul(g, w), b.matmul(g, x_operand, trans_a=True)


@_linear_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.precision = inputs
    ctx.save_for_backward(x, weight)


def _linear_autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    return (*_linear_backward(grad.contiguous(), x, weight, ctx.precision), None)


_linear.register_autograd(_linear_autograd, setup_context=_linear_setup)


def linear(x: Tensor, weight: Tensor, *, precision: str = "fp32") -> Tensor:
    """x [tokens, K] times weight [N, K] transposed -> [tokens, N], all float32."""
    out: Tensor = torch.ops.mok.linear(x, weight, precision)
    return out


# ---- RMSNorm [7] ---------------------------------------------------------------------------------------------------------


@torch.library.custom_op("mok::rms_norm", mutates_args=())
def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    b = _backend(x)
    out, rstd = torch.empty_like(x), x.new_empty(x.shape[0])
    b.rmsnorm(x.contiguous(), weight.contiguous(), epsilon, out, rstd)
    return out, rstd


@_rms_norm.register_fake
def _(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[0])


@torch.library.custom_op("mok::rms_norm_backward", mutates_args=())
def _rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    grad_weight = torch.zeros_like(weight)
    grad_x = _backend(x).rmsnorm_backward(x, weight, rstd, grad, torch.empty_like(x), grad_weight=grad_weight)
    return grad_x, grad_weight


@_rms_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _rms_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])


def _rms_norm_autograd(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, rstd = ctx.saved_tensors
    return (*_rms_norm_backward(grad.contiguous(), x.contiguous(), weight.contiguous(), rstd), None)


_rms_norm.register_autograd(_rms_norm_autograd, setup_context=_rms_norm_setup)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float = 1e-6) -> Tensor:
    """x [rows, C] / sqrt(mean(x^2) + epsilon) * weight [C] -> [rows, C], float32."""
    out: Tensor = torch.ops.mok.rms_norm(x, weight, epsilon)[0]
    return out


# ---- attention [9] -------------------------------------------------------------------------------------------------------


@torch.library.custom_op("mok::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, sequences: int, head_size: int, precision: str) -> tuple[Tensor, Tensor, Tensor]:
    b = _backend(q)
    heads, kv_heads = q.shape[1] // head_size, k.shape[1] // head_size
    q_operand, k_operand, v_operand = (_operand(b, t, precision) for t in (q, k, v))
    out = torch.empty_like(q_operand)
    row_max, row_recip = q.new_empty(q.shape[0], heads), q.new_empty(q.shape[0], heads)
    b.attention(
        q_operand,
        k_operand,
        v_operand,
        sequences=sequences,
        heads=heads,
        kv_heads=kv_heads,
        scale=attention_scale(head_size),
        out=out,
        row_max=row_max,
        row_recip=row_recip,
    )
    return out.float(), row_max, row_recip


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sequences: int, head_size: int, precision: str) -> tuple[Tensor, Tensor, Tensor]:
    heads = q.shape[1] // head_size
    return torch.empty_like(q), q.new_empty(q.shape[0], heads), q.new_empty(q.shape[0], heads)


@torch.library.custom_op("mok::attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    row_max: Tensor,
    row_recip: Tensor,
    sequences: int,
    head_size: int,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    b = _backend(q)
    q_operand, k_operand, v_operand, out_operand, g = (_operand(b, t, precision) for t in (q, k, v, out, grad))
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v_operand)
    b.attention_backward(
        q_operand,
        k_operand,
        v_operand,
        out_operand,
        g,
        row_max,
        row_recip,
        sequences=sequences,
        heads=q.shape[1] // head_size,
        kv_heads=k.shape[1] // head_size,
        scale=attention_scale(head_size),
        grad_q=grad_q,
        grad_k=grad_k,
        grad_v=grad_v,
    )
    return grad_q, grad_k, grad_v.float()


@_attention_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    row_max: Tensor,
    row_recip: Tensor,
    sequences: int,
    head_size: int,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _attention_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(*output[1:])


def _attention_autograd(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return (*_attention_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.rest), None, None, None)


_attention.register_autograd(_attention_autograd, setup_context=_attention_setup)


def attention(q: Tensor, k: Tensor, v: Tensor, *, sequences: int, head_size: int, precision: str = "fp32") -> Tensor:
    """Causal grouped-query attention, float32: q [T, heads * D], k and v [T, kv_heads * D] -> [T, heads * D].

    T = sequences * length.
    """
    out: Tensor = torch.ops.mok.attention(q, k, v, sequences, head_size, precision)[0]
    return out


# ---- experts [10, 11] ----------------------------------------------------------------------------------------------------


class _Plan:
    """Which expert sees which token: the buffers of the routing plan, one group."""

    def __init__(self, backend: NativeBackend, index: Tensor, experts: int) -> None:
        tokens, top_k = index.shape
        self.capacity = routing_capacity(tokens, top_k, experts, 1, tokens)

        def ints(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=I32, device=index.device)

        self.row_token, self.row_slot, self.slot_row = ints(self.capacity), ints(self.capacity), ints(tokens, top_k)
        self.offsets, self.counts = ints(experts + 1), ints(1, experts)
        self.mask = torch.ones(tokens, dtype=U8, device=index.device)
        backend.routing_plan(
            index, self.mask, experts, max(tokens, 1), self.row_token, self.row_slot, self.slot_row, self.offsets, self.counts
        )


@torch.library.custom_op("mok::moe", mutates_args=())
def _moe(
    x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, top_k: int, renormalise: bool, precision: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    b = _backend(x)
    tokens, experts = x.shape[0], router.shape[0]
    x_operand, r, gu, d = (_operand(b, t, precision) for t in (x, router, gate_up, down))
    logits = b.matmul(x_operand, r, trans_b=True)
    probabilities, log_sum_exp, weight = torch.empty_like(logits), x.new_empty(tokens), x.new_empty(tokens, top_k)
    index = torch.empty(tokens, top_k, dtype=I32, device=x.device)
    status = torch.zeros(1, dtype=I32, device=x.device)
    b.router(logits, top_k, renormalise, probabilities, log_sum_exp, index, weight, status)
    plan = _Plan(b, index, experts)
    hidden = x.new_zeros(plan.capacity, gu.shape[1], dtype=gu.dtype)
    b.grouped_matmul_rows(x_operand, gu, plan.offsets, hidden, trans_b=True, a_rows=plan.row_token)
    act = b.swiglu(hidden, plan.capacity, x.new_empty(plan.capacity, down.shape[2], dtype=gu.dtype))
    rows = b.grouped_matmul_rows(act, d, plan.offsets, x.new_empty(plan.capacity, x.shape[1], dtype=gu.dtype), trans_b=True)
    out = b.combine(rows, plan.slot_row, torch.empty_like(x), weight=weight)
    return out, probabilities, log_sum_exp, index, weight, hidden


@_moe.register_fake
def _(
    x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, top_k: int, renormalise: bool, precision: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    tokens, experts = x.shape[0], router.shape[0]
    capacity = routing_capacity(tokens, top_k, experts, 1, tokens)
    return (
        torch.empty_like(x),
        x.new_empty(tokens, experts),
        x.new_empty(tokens),
        x.new_empty(tokens, top_k, dtype=I32),
        x.new_empty(tokens, top_k),
        x.new_empty(capacity, gate_up.shape[1], dtype=OPERAND_DTYPES[precision]),
    )


@torch.library.custom_op("mok::moe_backward", mutates_args=())
def _moe_backward(
    grad: Tensor,
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    probabilities: Tensor,
    log_sum_exp: Tensor,
    index: Tensor,
    weight: Tensor,
    hidden: Tensor,
    renormalise: bool,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b = _backend(x)
    g, x_operand, r, gu, d = (_operand(b, t, precision) for t in (grad, x, router, gate_up, down))
    plan = _Plan(b, index, router.shape[0])
    inner, dtype = down.shape[2], hidden.dtype
    d_act = b.grouped_matmul_rows(g, d, plan.offsets, x.new_zeros(plan.capacity, inner), trans_b=False, a_rows=plan.row_token)
    d_hidden, weighted = torch.empty_like(hidden), x.new_empty(plan.capacity, inner, dtype=dtype)
    d_weight = torch.empty_like(weight)
    b.swiglu_backward(
        hidden,
        d_act,
        plan.capacity,
        d_hidden,
        slot_weight=weight,
        row_slot=plan.row_slot,
        weighted_act=weighted,
        grad_slot_weight=d_weight,
    )
    grad_down, grad_gate_up = torch.zeros_like(down), torch.zeros_like(gate_up)
    b.grouped_matmul_depth(g, weighted, plan.offsets, grad_down, a_rows=plan.row_token)
    b.grouped_matmul_depth(d_hidden, x_operand, plan.offsets, grad_gate_up, b_rows=plan.row_token)
    rows = b.grouped_matmul_rows(d_hidden, gu, plan.offsets, x.new_empty(plan.capacity, x.shape[1], dtype=dtype), trans_b=False)
    grad_x = b.combine(rows, plan.slot_row, torch.empty_like(x))
    d_logits = b.router_backward(
        probabilities,
        log_sum_exp,
        weight,
        index,
        d_weight,
        plan.mask,
        plan.counts,
        renormalise=renormalise,
        group_tokens=max(x.shape[0], 1),
        aux_scale=None,
        z_scale=0.0,
        grad_logits=torch.empty_like(probabilities, dtype=dtype),
    )
    b.matmul(d_logits, r, out=grad_x, addend=grad_x)
    return grad_x, b.matmul(d_logits, x_operand, trans_a=True), grad_gate_up, grad_down


@_moe_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    probabilities: Tensor,
    log_sum_exp: Tensor,
    index: Tensor,
    weight: Tensor,
    hidden: Tensor,
    renormalise: bool,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(router), torch.empty_like(gate_up), torch.empty_like(down)


def _moe_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, router, gate_up, down, _, ctx.renormalise, ctx.precision = inputs
    ctx.save_for_backward(x, router, gate_up, down, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _moe_autograd(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    return (*_moe_backward(grad.contiguous(), *ctx.saved_tensors, ctx.renormalise, ctx.precision), None, None, None)


_moe.register_autograd(_moe_autograd, setup_context=_moe_setup)


def moe(
    x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, *, top_k: int, renormalise: bool = True, precision: str = "fp32"
) -> Tensor:
    """Top-k routed SwiGLU experts, dropless, float32.

    x [T, H], router [E, H], gate_up [E, 2I, H] (gate first), down [E, H, I] -> [T, H]
    """
    out: Tensor = torch.ops.mok.moe(x, router, gate_up, down, top_k, renormalise, precision)[0]
    return out


class MoELayer(nn.Module):
    """A Mixture-of-Experts block: router, top-k SwiGLU experts, weighted sum; float32 [..., hidden_size] in and out."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        experts: int,
        top_k: int,
        *,
        renormalise: bool = True,
        precision: str = "fp32",
        initializer_range: float = 0.02,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k = {top_k}; allowed: 1 to {experts}, the number of experts")
        if precision not in OPERAND_DTYPES:
            raise ValueError(f"precision = {precision!r}; allowed: {', '.join(OPERAND_DTYPES)}")
        self.top_k, self.renormalise, self.precision = top_k, renormalise, precision
        self.router = nn.Parameter(torch.randn(experts, hidden_size) * initializer_range)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * intermediate_size, hidden_size) * initializer_range)
        self.down = nn.Parameter(torch.randn(experts, hidden_size, intermediate_size) * initializer_range)

    def forward(self, x: Tensor) -> Tensor:
        """x float32 [..., hidden_size] -> the same shape."""
        out = moe(
            x.reshape(-1, x.shape[-1]),
            self.router,
            self.gate_up,
            self.down,
            top_k=self.top_k,
            renormalise=self.renormalise,
            precision=self.precision,
        )
        return out.view_as(x)

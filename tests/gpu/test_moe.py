"""Router, routing plan and what lies between the experts' products: CPU against GPU by bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mok_service.errors import KernelError
from tests.gpu.twins import CODES, I32, OPERANDS, backends, compare, generator, normal, poison

pytestmark = pytest.mark.gpu
PRECISIONS = ["fp32", "bf16"]
# tokens, experts, top_k, tokens of a group
SHAPES = [(1, 1, 1, 1), (37, 5, 2, 10), (300, 8, 2, 300), (1000, 64, 8, 256), (513, 128, 8, 100), (65, 300, 7, 64)]


def logits_of(g: torch.Generator, tokens: int, experts: int, kind: str) -> torch.Tensor:
    if kind == "ties":
        return torch.randint(-2, 3, (tokens, experts), generator=g).float()
    if kind == "one":
        x = torch.full((tokens, experts), -5.0)
        x[:, experts // 2] = 5.0
        return x
    return normal(g, tokens, experts) * 3


def routed(g: torch.Generator, shape: tuple[int, int, int, int], kind: str, renormalise: int) -> dict[str, Any]:
    tokens, experts, top_k, _ = shape
    return compare(
        "mok_router_forward",
        ("probabilities", "log_sum_exp", "expert_index", "expert_weight", "status"),
        tokens=tokens,
        experts=experts,
        top_k=top_k,
        renormalise=renormalise,
        logits=logits_of(g, tokens, experts, kind),
        probabilities=poison(tokens, experts),
        log_sum_exp=poison(tokens),
        expert_index=poison(tokens, top_k, dtype=I32),
        expert_weight=poison(tokens, top_k),
        status=torch.zeros(1, dtype=I32),
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["normal", "ties", "one"])
@pytest.mark.parametrize("renormalise", [0, 1])
def test_router_and_plan(shape: tuple[int, int, int, int], kind: str, renormalise: int) -> None:
    g = generator(11)
    tokens, experts, top_k, group_tokens = shape
    found = routed(g, shape, kind, renormalise)
    mask = (torch.rand(tokens, generator=g) > 0.1).to(torch.uint8)
    groups = -(-tokens // group_tokens)
    capacity = tokens * top_k + groups * experts * 15 + 33
    plan = compare(
        "mok_routing_plan",
        ("row_token", "row_slot", "slot_row", "expert_offsets", "counts"),
        tokens=tokens,
        experts=experts,
        top_k=top_k,
        groups=groups,
        rows_capacity=capacity,
        group_tokens=group_tokens,
        expert_index=found["expert_index"],
        token_mask=mask,
        row_token=poison(capacity, dtype=I32),
        row_slot=poison(capacity, dtype=I32),
        slot_row=poison(tokens, top_k, dtype=I32),
        expert_offsets=poison(experts + 1, dtype=I32),
        counts=poison(groups, experts, dtype=I32),
    )
    compare(
        "mok_router_sums",
        ("probability_sum", "z_sum"),
        tokens=tokens,
        experts=experts,
        group_tokens=group_tokens,
        probabilities=found["probabilities"],
        log_sum_exp=found["log_sum_exp"],
        token_mask=mask,
        probability_sum=torch.full((groups, experts), 7),
        z_sum=torch.tensor([-3]),
    )
    for precision in PRECISIONS:
        for z_scale, aux in ((0.0, None), (0.125, normal(g, groups).abs())):
            compare(
                "mok_router_backward",
                ("grad_logits",),
                precision=CODES[precision],
                renormalise=renormalise,
                tokens=tokens,
                experts=experts,
                top_k=top_k,
                group_tokens=group_tokens,
                probabilities=found["probabilities"],
                log_sum_exp=found["log_sum_exp"],
                expert_weight=found["expert_weight"],
                expert_index=found["expert_index"],
                grad_weight=normal(g, tokens, top_k),
                token_mask=mask,
                counts=plan["counts"],
                aux_scale=aux,
                z_scale=z_scale,
                grad_logits=poison(tokens, experts, dtype=OPERANDS[precision]),
            )


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_logit_that_is_not_finite_sets_the_status(value: float) -> None:
    logits = normal(generator(12), 20, 16)
    logits[7, 3] = value
    compare(
        "mok_router_forward",
        ("status",),
        tokens=20,
        experts=16,
        top_k=4,
        renormalise=1,
        logits=logits,
        probabilities=poison(20, 16),
        log_sum_exp=poison(20),
        expert_index=poison(20, 4, dtype=I32),
        expert_weight=poison(20, 4),
        status=torch.zeros(1, dtype=I32),
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("rows", "intermediate", "slots"), [(1, 1, 1), (33, 70, 40), (300, 200, 280), (700, 1024, 690), (5, 3000, 9)]
)
def test_swiglu(precision: str, rows: int, intermediate: int, slots: int) -> None:
    g = generator(13)
    dtype = OPERANDS[precision]
    gate_up = normal(g, rows, 2 * intermediate, dtype=dtype) * 3
    common = dict(precision=CODES[precision], rows=rows, intermediate=intermediate, gate_up=gate_up)
    compare("mok_swiglu_forward", ("out",), out=poison(rows, intermediate, dtype=dtype), **common)
    order = torch.randperm(slots, generator=g)[: min(rows, slots)].to(I32)
    row_slot = torch.full((rows,), -1, dtype=I32)
    row_slot[torch.randperm(rows, generator=g)[: order.numel()]] = order
    grad_act = normal(g, rows, intermediate, spread=3)
    compare(
        "mok_swiglu_backward",
        ("grad_gate_up", "weighted_act", "grad_slot_weight"),
        slots=slots,
        grad_act=grad_act,
        slot_weight=torch.rand(slots, generator=g),
        row_slot=row_slot,
        grad_gate_up=poison(rows, 2 * intermediate, dtype=dtype),
        weighted_act=poison(rows, intermediate, dtype=dtype),
        grad_slot_weight=poison(slots),
        **common,
    )
    compare(
        "mok_swiglu_backward",
        ("grad_gate_up",),
        slots=0,
        grad_act=grad_act,
        slot_weight=None,
        row_slot=None,
        grad_gate_up=poison(rows, 2 * intermediate, dtype=dtype),
        weighted_act=None,
        grad_slot_weight=None,
        **common,
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("tokens", "top_k", "hidden"), [(1, 1, 1), (40, 2, 70), (300, 8, 1030)])
def test_combine(precision: str, tokens: int, top_k: int, hidden: int) -> None:
    g = generator(14)
    rows = normal(g, tokens * top_k + 16, hidden, dtype=OPERANDS[precision])
    slot_row = torch.randperm(tokens * top_k + 16, generator=g)[: tokens * top_k].to(I32)
    slot_row[torch.rand(tokens * top_k, generator=g) < 0.05] = -1
    common = dict(precision=CODES[precision], tokens=tokens, top_k=top_k, hidden=hidden, rows=rows, slot_row=slot_row)
    weight = torch.rand(tokens, top_k, generator=g)
    compare("mok_combine", ("out",), weight=weight, addend=None, out=poison(tokens, hidden), **common)
    residual = normal(g, tokens, hidden)
    compare("mok_combine", ("out",), weight=None, addend=residual, out=residual, **common)


def test_a_full_plan_is_an_error_with_its_numbers() -> None:
    backends()
    from mok_service.kernels.native import NativeBackend

    gpu = NativeBackend("cuda")
    index = torch.zeros(40, 1, dtype=I32, device="cuda")
    outputs = {
        name: torch.zeros(64, dtype=I32, device="cuda")
        for name in ("row_token", "row_slot", "slot_row", "expert_offsets", "counts")
    }
    mask = torch.ones(40, dtype=torch.uint8, device="cuda")
    gpu.call(
        "mok_routing_plan",
        tokens=40,
        experts=2,
        top_k=1,
        groups=1,
        rows_capacity=32,
        group_tokens=40,
        expert_index=index,
        token_mask=mask,
        **outputs,
    )
    torch.cuda.synchronize()
    with pytest.raises(KernelError, match=r"expert_offsets\[2\] = 48; allowed: 0 to 32"):
        gpu.call("mok_add", count=1, a=gpu.empty(1), b=gpu.empty(1), out=gpu.empty(1))

"""Router, routing plan, SwiGLU and combine: bits against the definition, gradients against float64, ties, padding, errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mok_service.errors import KernelError
from mok_service.kernels.native import NativeBackend
from tests.kernels import moe_definition as definition
from tests.kernels.moe_definition import F32, I32
from tests.kernels.moe_harness import (
    UNIT,
    Results,
    array,
    assert_all_backends,
    assert_close,
    assert_same_bits,
    blank,
    functions,
    operand_dtype,
    plain,
    spread_normal,
    tensor,
)

PRECISIONS = ("fp32", "bf16")
PROPERTY = settings(max_examples=30, deadline=None, derandomize=True)


# ---- router


@dataclass(frozen=True)
class Routing:
    """One problem: logits [T, E], mask [T]; the rest feeds the backward pass."""

    precision: str
    top_k: int
    renormalise: bool
    group_tokens: int
    logits: F32
    mask: NDArray[np.uint8]
    grad_weight: F32
    aux_scale: F32 | None
    z_scale: np.float32

    @property
    def groups(self) -> int:
        return -(-len(self.logits) // self.group_tokens)


def routing_problem(
    precision: str,
    tokens: int,
    experts: int,
    top_k: int,
    *,
    renormalise: bool = True,
    group_tokens: int = 8,
    losses: bool = True,
    padding: float = 0.2,
    binades: int = 2,
    seed: int = 0,
) -> Routing:
    rng = np.random.default_rng(seed)
    groups = -(-tokens // group_tokens)
    return Routing(
        precision,
        top_k,
        renormalise,
        group_tokens,
        spread_normal(rng, (tokens, experts), binades),
        (rng.random(tokens) >= padding).astype(np.uint8),
        spread_normal(rng, (tokens, top_k), binades),
        spread_normal(rng, (groups,), 1) if losses else None,
        np.float32(0.03) if losses else np.float32(0),
    )


def run_routing(backend: NativeBackend, p: Routing) -> Results:
    """Router, plan, backward and sums as a training step calls them."""
    tokens, experts = p.logits.shape
    probabilities, lse, status = blank(tokens, experts), blank(tokens), torch.zeros(1, dtype=torch.int32)
    index, weight = torch.full((tokens, p.top_k), -7, dtype=torch.int32), blank(tokens, p.top_k)
    backend.router(tensor(p.logits), p.top_k, p.renormalise, probabilities, lse, index, weight, status)
    assert status.item() == 0
    mask, counts = tensor(p.mask), torch.full((p.groups, experts), -7, dtype=torch.int32)
    capacity = tokens * p.top_k + 16 * experts * p.groups
    row_token, row_slot = (torch.full((capacity,), -7, dtype=torch.int32) for _ in range(2))
    slot_row, offsets = torch.full_like(index, -7), torch.full((experts + 1,), -7, dtype=torch.int32)
    backend.routing_plan(index, mask, experts, p.group_tokens, row_token, row_slot, slot_row, offsets, counts)
    grad_logits = blank(tokens, experts, precision=p.precision)
    backend.router_backward(
        probabilities,
        lse,
        weight,
        index,
        tensor(p.grad_weight),
        mask,
        counts,
        renormalise=p.renormalise,
        group_tokens=p.group_tokens,
        aux_scale=None if p.aux_scale is None else tensor(p.aux_scale),
        z_scale=float(p.z_scale),
        grad_logits=grad_logits,
    )
    sums, z_sum = torch.full((p.groups, experts), 5, dtype=torch.int64), torch.full((1,), 7, dtype=torch.int64)
    backend.router_sums(probabilities, lse, mask, p.group_tokens, sums, z_sum)
    tensors = {
        "probabilities": probabilities,
        "lse": lse,
        "index": index,
        "weight": weight,
        "row_token": row_token,
        "row_slot": row_slot,
        "slot_row": slot_row,
        "expert_offsets": offsets,
        "counts": counts,
        "grad_logits": grad_logits,
        "sums": sums,
        "z_sum": z_sum,
    }
    return {name: array(t) for name, t in tensors.items()}


def define_routing(p: Routing) -> Results:
    tokens, experts = p.logits.shape
    probabilities, lse, index, weight = definition.router_forward(functions(), p.logits, p.top_k, p.renormalise)
    capacity = tokens * p.top_k + 16 * experts * p.groups
    plan = definition.routing_plan(index, p.mask, experts, p.group_tokens, capacity)
    grad_logits = definition.router_backward(
        p.precision,
        p.renormalise,
        probabilities,
        lse,
        index,
        weight,
        p.grad_weight,
        p.mask,
        plan.counts,
        p.group_tokens,
        p.aux_scale,
        p.z_scale,
    )
    sums, z_sum = definition.router_sums(probabilities, lse, p.mask, p.group_tokens)
    return {
        "probabilities": probabilities,
        "lse": lse,
        "index": index,
        "weight": weight,
        "row_token": plan.row_token,
        "row_slot": plan.row_slot,
        "slot_row": plan.slot_row,
        "expert_offsets": plan.expert_offsets,
        "counts": plan.counts,
        "grad_logits": grad_logits,
        "sums": sums + 5,
        "z_sum": np.array([z_sum + 7]),
    }


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 1, 1), (40, 8, 2), (37, 70, 8), (9, 5, 5), (0, 4, 2), (30, 200, 3)])
def test_routing_has_the_defined_bits(precision: str, tokens: int, experts: int, top_k: int) -> None:
    problem = routing_problem(precision, tokens, experts, top_k, seed=tokens)
    assert_all_backends(lambda backend: run_routing(backend, problem), define_routing(problem))


@PROPERTY
@given(st.data())
def test_routing_has_the_defined_bits_for_ragged_shapes(data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 40), "experts")
    problem = routing_problem(
        data.draw(st.sampled_from(PRECISIONS), "precision"),
        data.draw(st.integers(1, 70), "tokens"),
        experts,
        data.draw(st.integers(1, min(experts, 9)), "top_k"),
        renormalise=data.draw(st.booleans(), "renormalise"),
        group_tokens=data.draw(st.integers(1, 80), "group_tokens"),
        losses=data.draw(st.booleans(), "losses"),
        padding=data.draw(st.sampled_from([0.0, 0.3, 1.0]), "padding"),
        binades=data.draw(st.sampled_from([0, 4, 6]), "binades"),
        seed=data.draw(st.integers(0, 2**32 - 1), "seed"),
    )
    assert_all_backends(lambda backend: run_routing(backend, problem), define_routing(problem))


@pytest.mark.parametrize("renormalise", [False, True])
def test_ties_go_to_the_lower_expert(renormalise: bool) -> None:
    """All logits equal: experts 0..k-1; -0 and +0 are equal; a tie at the border is the lower index's."""
    logits = np.zeros((4, 6), np.float32)
    logits[1] = [-0.0, 0.0, -0.0, 0.0, 0.0, -0.0]
    logits[2] = [1, 2, 2, 3, 2, 1]
    logits[3] = [0, 1, 0, 1, 0, 1]
    problem = routing_problem("fp32", 4, 6, 3, renormalise=renormalise, padding=0)
    problem = Routing(**{**problem.__dict__, "logits": logits})
    result = run_routing(plain(), problem)
    np.testing.assert_array_equal(result["index"], [[0, 1, 2], [0, 1, 2], [3, 1, 2], [1, 3, 5]])
    assert_all_backends(lambda backend: run_routing(backend, problem), define_routing(problem))


@pytest.mark.parametrize("top_k", [1, 3])
def test_all_tokens_to_the_same_experts_leaves_the_others_empty(top_k: int) -> None:
    problem = routing_problem("fp32", 50, 6, top_k, group_tokens=20, padding=0)
    logits = problem.logits.copy()
    logits[:, 2 : 2 + top_k] += 1000
    problem = Routing(**{**problem.__dict__, "logits": logits})
    result = run_routing(plain(), problem)
    starts = np.diff(result["expert_offsets"])
    np.testing.assert_array_equal(starts, [32 + 32 + 16 if 2 <= e < 2 + top_k else 0 for e in range(6)])
    assert_all_backends(lambda backend: run_routing(backend, problem), define_routing(problem))


def test_the_plan_is_a_bijection_of_slots_and_rows() -> None:
    result = run_routing(plain(), routing_problem("fp32", 100, 12, 4, group_tokens=30))
    rows, slots = np.flatnonzero(result["row_slot"] >= 0), result["slot_row"].reshape(-1)
    np.testing.assert_array_equal(slots[result["row_slot"][rows]], rows)
    assert len(rows) == (slots >= 0).sum() == result["counts"].sum()
    assert (result["expert_offsets"] % 16 == 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("token", [0, 39])
def test_a_non_finite_logit_sets_the_status_and_chooses_valid_experts(bad: float, token: int) -> None:
    problem = routing_problem("fp32", 40, 8, 3)
    logits = problem.logits.copy()
    logits[token, 5] = bad

    def run(backend: NativeBackend) -> Results:
        index, status = torch.full((40, 3), -7, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        probabilities, lse, weight = blank(40, 8), blank(40), blank(40, 3)
        backend.router(tensor(logits), 3, True, probabilities, lse, index, weight, status)
        tensors = {"index": index, "status": status, "probabilities": probabilities, "lse": lse, "weight": weight}
        return {name: array(t) for name, t in tensors.items()}

    result = run(plain())
    assert result["status"][0] == 1
    assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < 8 for row in result["index"].tolist())
    assert_all_backends(run, result)


def test_the_status_is_never_cleared() -> None:
    status = torch.ones(1, dtype=torch.int32)
    plain().router(torch.zeros(3, 4), 1, False, blank(3, 4), blank(3), torch.zeros(3, 1, dtype=torch.int32), blank(3, 1), status)
    assert status.item() == 1


@PROPERTY
@given(st.data())
def test_router_gradients_match_float64_autograd(data: st.DataObject) -> None:
    """Bound: 60 + experts + 4*max|logit - M| roundings of 2^-24 of the formula over absolute values, in bf16 one of 2^-8 more."""
    experts = data.draw(st.integers(1, 40), "experts")
    p = routing_problem(
        data.draw(st.sampled_from(PRECISIONS), "precision"),
        data.draw(st.integers(1, 40), "tokens"),
        experts,
        data.draw(st.integers(1, min(experts, 8)), "top_k"),
        renormalise=data.draw(st.booleans(), "renormalise"),
        group_tokens=data.draw(st.integers(1, 50), "group_tokens"),
        losses=data.draw(st.booleans(), "losses"),
        seed=data.draw(st.integers(0, 999), "seed"),
    )
    got = run_routing(plain(), p)
    logits = torch.tensor(p.logits.astype(np.float64), requires_grad=True)
    probabilities, lse = torch.softmax(logits, 1), torch.logsumexp(logits, 1)
    index = torch.tensor(got["index"].astype(np.int64))
    chosen = probabilities.gather(1, index)
    total = chosen.sum(1, keepdim=True) if p.renormalise else torch.ones(len(logits), 1, dtype=torch.float64)
    weight, dw = chosen / total, torch.tensor(p.grad_weight.astype(np.float64))
    loss = (weight * dw).sum(1)
    direct = torch.zeros_like(probabilities)
    if p.aux_scale is not None:
        group = np.arange(len(p.logits)) // p.group_tokens
        direct = torch.tensor(p.aux_scale[group, None].astype(np.float64) * got["counts"][group])
        loss = loss + (direct * probabilities).sum(1) + float(p.z_scale) / 2 * lse**2
    (loss * torch.tensor(p.mask)).sum().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        slots = (dw.abs() + ((dw.abs() * weight).sum(1, keepdim=True) if p.renormalise else 0)) / total
        dp = torch.zeros_like(probabilities).scatter(1, index, slots) + direct.abs()
        magnitude = probabilities * (dp + (dp * probabilities).sum(1, keepdim=True) + float(p.z_scale) * lse.abs()[:, None])
        reach = float((logits.max(1, keepdim=True).values - logits).max())
    assert logits.grad is not None
    relative = (60 + experts + 4 * reach) * UNIT["fp32"]
    assert_close(got["probabilities"], probabilities.detach().numpy(), probabilities.detach().numpy(), relative, "p")
    assert_close(got["weight"], weight.detach().numpy(), weight.detach().numpy(), relative, "weight")
    lse_magnitude = lse.detach().abs() + logits.detach().abs().max(1).values + 1
    assert_close(got["lse"], lse.detach().numpy(), lse_magnitude.numpy(), relative, "lse")
    relative += UNIT["bf16"] if p.precision == "bf16" else 0
    assert_close(got["grad_logits"], logits.grad.numpy(), magnitude.numpy(), relative, "grad_logits")


@pytest.mark.parametrize(("lse", "units"), [(0.5, 2**30), (1e-5, 0), (3e4, 900_000_000 << 32), (1e30, 1 << 62)])
def test_reported_sums_round_to_fixed_point_and_saturate(lse: float, units: int) -> None:
    sums, z_sum = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    probabilities = torch.tensor([[2.0**-33, 3 * 2.0**-33]])
    plain().router_sums(probabilities, torch.tensor([lse]), torch.ones(1, dtype=torch.uint8), 1, sums, z_sum)
    assert sums.tolist() == [[0, 2]]
    assert z_sum.item() == units


# ---- experts


@dataclass(frozen=True)
class Activation:
    """One problem. gate_up [rows, 2I], grad_act [rows, I]; with routing row_slot [rows] and slot_weight."""

    precision: str
    gate_up: F32
    grad_act: F32
    row_slot: I32 | None
    slot_weight: F32 | None
    slots: int


def activation_problem(precision: str, rows: int, width: int, *, routed: bool, binades: int = 2, seed: int = 0) -> Activation:
    rng = np.random.default_rng(seed)
    slots = rows + 3
    row_slot = rng.permutation(slots)[:rows].astype(np.int32)
    row_slot[rng.random(rows) < 0.3] = -1
    return Activation(
        precision,
        definition.op(precision, spread_normal(rng, (rows, 2 * width), binades)),
        spread_normal(rng, (rows, width), binades),
        row_slot if routed else None,
        spread_normal(rng, (slots,), 1) if routed else None,
        slots if routed else 0,
    )


def run_activation(backend: NativeBackend, p: Activation) -> Results:
    rows, width = p.grad_act.shape
    gate_up, grad_act = tensor(p.gate_up, p.precision), tensor(p.grad_act)
    act, weighted_act = (blank(rows, width, precision=p.precision) for _ in range(2))
    backend.swiglu(gate_up, rows, act)
    grad_gate_up, grad_slot = torch.full_like(gate_up, float("nan")), blank(p.slots)
    routed: dict[str, Any] = {}
    if p.row_slot is not None and p.slot_weight is not None:
        routed = {
            "row_slot": tensor(p.row_slot),
            "slot_weight": tensor(p.slot_weight),
            "grad_slot_weight": grad_slot,
        }
    backend.swiglu_backward(gate_up, grad_act, rows, grad_gate_up, weighted_act=weighted_act, **routed)
    result = {"act": array(act), "grad_gate_up": array(grad_gate_up), "weighted_act": array(weighted_act)}
    return result | ({"grad_slot": array(grad_slot)} if routed else {})


def define_activation(p: Activation) -> Results:
    act = definition.swiglu_forward(functions(), p.precision, p.gate_up)
    grad_gate_up, weighted_act, grad_slot = definition.swiglu_backward(
        functions(), p.precision, p.gate_up, p.grad_act, p.row_slot, p.slot_weight, p.slots
    )
    result = {"act": act, "grad_gate_up": grad_gate_up, "weighted_act": weighted_act}
    return result | ({"grad_slot": grad_slot} if p.row_slot is not None else {})


@PROPERTY
@given(st.data())
def test_swiglu_has_the_defined_bits(data: st.DataObject) -> None:
    problem = activation_problem(
        data.draw(st.sampled_from(PRECISIONS), "precision"),
        data.draw(st.integers(1, 40), "rows"),
        data.draw(st.integers(1, 200), "width"),
        routed=data.draw(st.booleans(), "routed"),
        binades=data.draw(st.sampled_from([0, 3, 40]), "binades"),
        seed=data.draw(st.integers(0, 2**32 - 1), "seed"),
    )
    with np.errstate(over="ignore", invalid="ignore"):
        assert_all_backends(lambda backend: run_activation(backend, problem), define_activation(problem))


@PROPERTY
@given(st.data())
def test_swiglu_gradients_match_float64_autograd(data: st.DataObject) -> None:
    """Bound: 40 + width/8 roundings of 2^-24 of the formula over absolute values, in bf16 two of 2^-8 more."""
    p = activation_problem(
        data.draw(st.sampled_from(PRECISIONS), "precision"),
        data.draw(st.integers(1, 20), "rows"),
        data.draw(st.integers(1, 200), "width"),
        routed=True,
        seed=data.draw(st.integers(0, 999), "seed"),
    )
    assert p.row_slot is not None and p.slot_weight is not None
    got, width = run_activation(plain(), p), p.grad_act.shape[1]
    gate_up = torch.tensor(p.gate_up.astype(np.float64), requires_grad=True)
    slot_weight = torch.tensor(p.slot_weight.astype(np.float64), requires_grad=True)
    gradient = torch.tensor(p.grad_act.astype(np.float64))
    gate, up = gate_up[:, :width], gate_up[:, width:]
    act = torch.nn.functional.silu(gate) * up
    real = torch.tensor(p.row_slot >= 0)
    slots = torch.tensor(p.row_slot[p.row_slot >= 0].astype(np.int64))
    (gradient[real] * act[real] * slot_weight[slots, None]).sum().backward()  # type: ignore[no-untyped-call]
    assert gate_up.grad is not None and slot_weight.grad is not None
    with torch.no_grad():
        w = torch.zeros(len(real), 1, dtype=torch.float64)
        w[real] = slot_weight[slots, None].abs()
        s = torch.sigmoid(gate)
        weighted, silu_grad = w * gradient.abs(), s * (1 + gate.abs() * (1 - s))
        both = torch.cat([weighted * up.abs() * silu_grad, weighted * (gate * s).abs()], dim=1)
        dot = torch.zeros(p.slots, dtype=torch.float64).scatter(0, slots, (gradient * act).abs().sum(1)[real])
    relative = (40 + width / 8) * UNIT["fp32"] + (2 * UNIT["bf16"] if p.precision == "bf16" else 0)
    assert_close(got["act"], act.detach().numpy(), act.detach().abs().numpy(), relative, "act")
    assert_close(got["grad_gate_up"], gate_up.grad.numpy(), both.numpy(), relative, "grad_gate_up")
    assert_close(got["grad_slot"], slot_weight.grad.numpy(), dot.numpy(), relative, "grad_slot")


@PROPERTY
@given(st.data())
def test_combine_has_the_defined_bits(data: st.DataObject) -> None:
    precision = data.draw(st.sampled_from(PRECISIONS), "precision")
    tokens, top_k = data.draw(st.integers(0, 40), "tokens"), data.draw(st.integers(1, 6), "top_k")
    hidden, weighted = data.draw(st.integers(1, 150), "hidden"), data.draw(st.booleans(), "weighted")
    with_addend, in_place = data.draw(st.booleans(), "addend"), data.draw(st.booleans(), "in place")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    rows = definition.op(precision, spread_normal(rng, (tokens * top_k + 1, hidden), 30))
    slot_row = rng.integers(-1, len(rows), (tokens, top_k)).astype(np.int32)
    weight = spread_normal(rng, (tokens, top_k), 30) if weighted else None
    addend = spread_normal(rng, (tokens, hidden), 30) if with_addend else None

    def run(backend: NativeBackend) -> Results:
        base = None if addend is None else tensor(addend)
        out = base if in_place and base is not None else blank(tokens, hidden)
        w = None if weight is None else tensor(weight)
        return {"out": array(backend.combine(tensor(rows, precision), tensor(slot_row), out, weight=w, addend=base))}

    expected = definition.combine(rows, slot_row, weight, addend)
    assert_all_backends(run, {"out": expected})
    exact = np.zeros((tokens, hidden)) if addend is None else addend.astype(np.float64)
    magnitude = np.abs(exact)
    for k in range(top_k):
        w = 1.0 if weight is None else weight[:, k, None].astype(np.float64)
        y = np.where(slot_row[:, k, None] >= 0, rows[slot_row[:, k]].astype(np.float64), 0)
        exact, magnitude = exact + w * y, magnitude + np.abs(w * y)
    assert_close(expected, exact, magnitude, (top_k + 1) * UNIT["fp32"], "out")


def test_padding_rows_and_slots_without_a_row_are_zero() -> None:
    """Whatever the padding rows hold: they are +0 in every output, so that products over them add nothing."""
    p = activation_problem("fp32", 6, 9, routed=True)
    assert p.row_slot is not None
    row_slot = np.array([4, -1, 0, -1, 2, -1], np.int32)
    gate_up = p.gate_up.copy()
    gate_up[row_slot < 0] = np.nan
    result = run_activation(plain(), Activation("fp32", gate_up, p.grad_act, row_slot, p.slot_weight, p.slots))
    for name in ("grad_gate_up", "weighted_act"):
        assert_same_bits(result[name][row_slot < 0], np.zeros_like(result[name][row_slot < 0]), name)
    unused = [slot for slot in range(p.slots) if slot not in row_slot]
    assert_same_bits(result["grad_slot"][unused], np.zeros(len(unused), np.float32), "grad_slot")


def test_a_nan_leaves_as_the_one_pattern() -> None:
    """Payloads and signs of NaNs differ between machines: operators write 0x7FFFFFFF or 0x7FFF (2.3)."""
    negative = np.array([0xFFC01234], np.uint32).view(np.float32)[0]
    for precision, pattern in (("fp32", 0x7FFFFFFF), ("bf16", 0x7FFF0000)):
        act = blank(1, 1, precision=precision)
        gate_up = tensor(np.array([[negative, 1]], np.float32)).to(operand_dtype(precision))
        plain().swiglu(gate_up, 1, act)
        assert array(act).view(np.uint32)[0, 0] == pattern
    out = plain().combine(tensor(np.array([[negative]])), torch.zeros(1, 1, dtype=torch.int32), blank(1, 1))
    assert array(out).view(np.uint32)[0, 0] == 0x7FFFFFFF


# ---- errors


def test_wrong_arguments_are_named() -> None:
    backend, x = plain(), torch.zeros(64)
    integers, mask = torch.zeros(64, dtype=torch.int32), torch.ones(8, dtype=torch.uint8)
    sentinel = torch.full((64,), -7, dtype=torch.int32)
    plan: dict[str, Any] = {
        "tokens": 2, "experts": 3, "top_k": 2, "groups": 1, "group_tokens": 2, "rows_capacity": 64,
        "expert_index": torch.tensor([[0, 1], [0, 2]], dtype=torch.int32), "token_mask": mask, "row_token": sentinel,
        "row_slot": sentinel, "slot_row": sentinel, "expert_offsets": sentinel, "counts": sentinel,
    }  # fmt: skip
    swiglu: dict[str, Any] = {
        "precision": 0, "rows": 2, "intermediate": 4, "slots": 4, "gate_up": x, "grad_act": x, "slot_weight": x,
        "row_slot": integers, "grad_gate_up": x.clone(),
    }  # fmt: skip
    router: dict[str, Any] = {
        "tokens": 2, "experts": 4, "top_k": 2, "logits": x, "probabilities": x.clone(), "log_sum_exp": x.clone(),
        "expert_index": sentinel, "expert_weight": x.clone(), "status": torch.zeros(1, dtype=torch.int32),
    }  # fmt: skip

    def chosen(*experts: int) -> dict[str, Any]:
        return {"expert_index": torch.tensor(experts, dtype=torch.int32)}

    cases: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
        ("router_forward", router, {"top_k": 5}, r"top_k is 5; allowed: 1 to 4"),
        ("router_forward", router, {"top_k": 0}, r"top_k is 0; allowed: 1 to 4"),
        ("router_forward", router, {"status": None}, r"status is NULL"),
        ("routing_plan", plan, {"groups": 2}, r"groups is 2; allowed: 1 for 2 tokens in groups of 2"),
        ("routing_plan", plan, {"rows_capacity": 32}, r"rows_capacity is 32; allowed: 48 or more for this routing"),
        ("routing_plan", plan, chosen(0, 1, 3, 2), r"\[1,0\] is 3; allowed: 0 to 2"),
        ("routing_plan", plan, chosen(0, 1, 2, 2), r"\[1,1\] is 2, which the token has chosen before"),
        ("swiglu_backward", swiglu, {"intermediate": 0}, r"intermediate is 0"),
        ("swiglu_backward", swiglu, {"row_slot": None}, r"row_slot is NULL; allowed with slot_weight"),
        ("swiglu_backward", swiglu, {"slots": 0}, r"row_slot\[0\] is 0; allowed: -1 to -1"),
        ("combine", {"precision": 7}, {}, r"precision is 7"),
    ]
    for operation, fields, wrong, message in cases:
        with pytest.raises(KernelError, match=message):
            backend.call(f"mok_{operation}", **{**fields, **wrong})
    assert (sentinel == -7).all()

"""Time the CUDA backend's other operations at the sizes of a 1B-class Mixture-of-Experts step on one GPU.

usage: python benchmarks/gpu_operations.py [--library libmok_cuda.so] [--repeats 5]

A row gives the median time and the rate at which the fewest necessary bytes moved (inputs read once, outputs written once);
attention is given in TFLOP/s (forward 2 products, backward 5, halved by causality) beside torch's scaled_dot_product_attention.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_product import BF16, F32, Library, milliseconds, row

from mok_service.kernels import abi

TOKENS, HIDDEN, INNER, EXPERTS, TOP_K, VOCABULARY, GROUP = 32768, 2048, 1024, 64, 8, 50304, 8192
I32 = torch.int32


def random(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def call(library: Library, operation: str, **fields: Any) -> Callable[[], None]:
    struct = abi.OPERATIONS[operation]()
    return lambda: library.call(operation, struct, **fields)


def size(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def rate(name: str, run: Callable[[], None], moved: int, repeats: int) -> None:
    (ms,) = milliseconds([run], repeats, budget_ms=15.0)
    row(what=name, ms=ms, terabytes_per_s=moved / ms / 1e9)


def rows(library: Library, repeats: int) -> None:
    x, gradient, weight = random(TOKENS, HIDDEN), random(TOKENS, HIDDEN), random(HIDDEN)
    out, rstd, weight_gradient = random(TOKENS, HIDDEN, dtype=BF16), random(TOKENS), random(HIDDEN)
    shape = dict(rows=TOKENS, columns=HIDDEN)
    run = call(library, "mok_rmsnorm_forward", precision=1, epsilon=1e-5, x=x, weight=weight, out=out, rstd=rstd, **shape)
    rate("rmsnorm forward", run, size(x, out), repeats)
    run = call(
        library,
        "mok_rmsnorm_backward",
        x=x,
        weight=weight,
        rstd=rstd,
        grad_out=gradient,
        addend=x,
        grad_x=x,
        grad_weight=weight_gradient,
        **shape,
    )
    rate("rmsnorm backward", run, size(x, x, x, gradient), repeats)
    run = call(library, "mok_sum_squares", matrices=1, rows=TOKENS, columns=HIDDEN, **{"in": x, "out": rstd})
    rate("sum of squares", run, size(x), repeats)
    state = [random(TOKENS, HIDDEN) for _ in range(4)]
    run = call(
        library,
        "mok_adamw",
        count=x.numel(),
        weight=state[0],
        first=state[1],
        second=state[2].abs_(),
        grad=state[3],
        operand=out,
        grad_scale=1.0,
        clip_scale=1.0,
        lr=1e-4,
        beta1=0.9,
        beta2=0.95,
        one_minus_beta1=0.1,
        one_minus_beta2=0.05,
        correction1=1.0,
        correction2=1.0,
        epsilon=1e-8,
        weight_decay=0.1,
        status=torch.zeros(1, dtype=I32, device="cuda"),
    )
    rate("AdamW", run, size(*state, *state[:3], out), repeats)
    run = call(library, "mok_to_bf16", count=x.numel(), **{"in": x, "out": out})
    rate("to bf16", run, size(x, out), repeats)


def model_ends(library: Library, repeats: int) -> None:
    ids = torch.randint(0, VOCABULARY, (GROUP,), device="cuda", dtype=I32)
    table, gradient = random(VOCABULARY, HIDDEN), random(GROUP, HIDDEN)
    common = dict(tokens=GROUP, vocabulary=VOCABULARY, hidden=HIDDEN, ids=ids)
    run = call(library, "mok_embedding_backward", grad_out=gradient, grad_table=table, **common)
    rate("embedding backward, one group", run, 3 * size(gradient), repeats)
    logits, labels = random(4096, VOCABULARY), torch.randint(0, VOCABULARY, (4096,), device="cuda", dtype=I32)
    out = random(4096, VOCABULARY, dtype=BF16)
    run = call(
        library,
        "mok_cross_entropy",
        precision=1,
        rows=4096,
        vocabulary=VOCABULARY,
        logits=logits,
        labels=labels,
        grad_logits=out,
        loss_sum=torch.zeros(1, dtype=torch.int64, device="cuda"),
        status=torch.zeros(1, dtype=I32, device="cuda"),
    )
    rate("cross entropy", run, size(logits, out), repeats)


def experts(library: Library, repeats: int) -> None:
    logits, p, lse = random(TOKENS, EXPERTS), random(TOKENS, EXPERTS), random(TOKENS)
    index, weight = torch.zeros(TOKENS, TOP_K, device="cuda", dtype=I32), random(TOKENS, TOP_K)
    run = call(
        library,
        "mok_router_forward",
        tokens=TOKENS,
        experts=EXPERTS,
        top_k=TOP_K,
        renormalise=1,
        logits=logits,
        probabilities=p,
        log_sum_exp=lse,
        expert_index=index,
        expert_weight=weight,
        status=torch.zeros(1, dtype=I32, device="cuda"),
    )
    rate("router forward", run, size(logits, p), repeats)
    groups, capacity = TOKENS // GROUP, TOKENS * TOP_K + TOKENS // GROUP * EXPERTS * 15
    names = dict(
        row_token=capacity, row_slot=capacity, slot_row=TOKENS * TOP_K, expert_offsets=EXPERTS + 1, counts=groups * EXPERTS
    )
    plan = {name: torch.zeros(count, device="cuda", dtype=I32) for name, count in names.items()}
    mask = torch.ones(TOKENS, device="cuda", dtype=torch.uint8)
    run = call(
        library,
        "mok_routing_plan",
        tokens=TOKENS,
        experts=EXPERTS,
        top_k=TOP_K,
        groups=groups,
        rows_capacity=capacity,
        group_tokens=GROUP,
        expert_index=index,
        token_mask=mask,
        **plan,
    )
    rate("routing plan", run, size(index, *plan.values()), repeats)
    gate_up, act = random(capacity, 2 * INNER, dtype=BF16), random(capacity, INNER, dtype=BF16)
    shape = dict(precision=1, rows=capacity, intermediate=INNER, gate_up=gate_up)
    rate("swiglu forward", call(library, "mok_swiglu_forward", out=act, **shape), size(gate_up, act), repeats)
    gradient, out = random(capacity, INNER), random(capacity, 2 * INNER, dtype=BF16)
    run = call(
        library,
        "mok_swiglu_backward",
        slots=TOKENS * TOP_K,
        grad_act=gradient,
        slot_weight=weight,
        row_slot=plan["row_slot"],
        grad_gate_up=out,
        weighted_act=act,
        grad_slot_weight=random(TOKENS * TOP_K),
        **shape,
    )
    rate("swiglu backward", run, size(gate_up, gradient, out, act), repeats)
    y, total = random(capacity, HIDDEN, dtype=BF16), random(TOKENS, HIDDEN)
    run = call(
        library,
        "mok_combine",
        precision=1,
        tokens=TOKENS,
        top_k=TOP_K,
        hidden=HIDDEN,
        rows=y,
        slot_row=plan["slot_row"],
        weight=weight,
        addend=total,
        out=total,
    )
    rate("combine", run, size(y, total, total), repeats)


def attention(library: Library, repeats: int) -> None:
    sequences, length, heads, kv_heads, head = 4, 4096, 16, 16, 128
    tokens = sequences * length
    q, k, v, out = (random(tokens, heads * head, dtype=BF16) for _ in range(4))
    row_max, row_recip = random(tokens, heads), random(tokens, heads)
    common = dict(
        precision=1,
        sequences=sequences,
        length=length,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head,
        ld_v=kv_heads * head,
        scale=head**-0.5,
        q=q,
        k=k,
        v=v,
        out=out,
        row_max=row_max,
        row_recip=row_recip,
    )
    forward = call(library, "mok_attention_forward", **common)
    grad_out = random(tokens, heads * head, dtype=BF16)
    backward = call(
        library,
        "mok_attention_backward",
        ld_grad_v=kv_heads * head,
        grad_out=grad_out,
        grad_q=random(tokens, heads * head),
        grad_k=random(tokens, kv_heads * head),
        grad_v=random(tokens, kv_heads * head, dtype=BF16),
        **common,
    )
    peers = [t.view(sequences, length, heads, head).transpose(1, 2).detach().requires_grad_() for t in (q, k, v)]

    def peer_forward() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(peers[0], peers[1], peers[2], is_causal=True)

    result = peer_forward()
    peer_gradient = torch.randn_like(result)

    def peer_backward() -> Any:
        return torch.autograd.grad(result, peers, peer_gradient, retain_graph=True)

    flops = 2.0 * sequences * heads * length * length * head
    for name, ours, peer, products in (("forward", forward, peer_forward, 2), ("backward", backward, peer_backward, 5)):
        ms, peer_ms = milliseconds([ours, peer], repeats, budget_ms=15.0)
        work = flops * products / 2
        row(what=f"attention {name}", ms=ms, tflops=work / ms / 1e9, sdpa_tflops=work / peer_ms / 1e9, ratio=peer_ms / ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.environ.get("MOK_CUDA_LIBRARY", "mok_service/_native/libmok_cuda.so")
    parser.add_argument("--library", type=Path, default=Path(default))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(1)
    library = Library(options.library)
    for part in (rows, model_ends, experts, attention):
        part(library, options.repeats)


if __name__ == "__main__":
    main()

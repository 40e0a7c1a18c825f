"""One result, whatever else the GPU does: repeated runs beside random work, on another stream, and replayed from a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from mok_service.kernels.native import NativeBackend
from tests.gpu.twins import BF16, F32, I32, backends, generator, normal

pytestmark = pytest.mark.gpu
RUNS = 50
ROWS, COLUMNS, DEPTH, HEADS, HEAD, LENGTH, EXPERTS, TOP_K = 512, 768, 1000, 4, 128, 500, 12, 3


class Work:
    """A product, attention forward and backward, a norm's gradient and a routing plan, with all their tensors."""

    def __init__(self) -> None:
        g = generator(31)
        self.a, self.b = normal(g, ROWS, DEPTH, dtype=BF16).cuda(), normal(g, COLUMNS, DEPTH, dtype=BF16).cuda()
        self.q, self.k, self.v, self.grad_out = (normal(g, LENGTH, HEADS * HEAD, dtype=BF16).cuda() for _ in range(4))
        self.rstd, self.weight = torch.rand(ROWS, generator=g).cuda(), normal(g, COLUMNS).cuda()
        self.experts = torch.stack([torch.randperm(EXPERTS, generator=g)[:TOP_K] for _ in range(LENGTH)]).to(I32).cuda()
        self.mask = (torch.rand(LENGTH, generator=g) > 0.1).to(torch.uint8).cuda()
        capacity = LENGTH * TOP_K + EXPERTS * 16

        def empty(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device="cuda")

        self.c, self.out, self.grad_x = empty(ROWS, COLUMNS), empty(LENGTH, HEADS * HEAD, dtype=BF16), empty(ROWS, COLUMNS)
        self.row_max, self.row_recip = empty(LENGTH, HEADS), empty(LENGTH, HEADS)
        self.grads = [empty(LENGTH, HEADS * HEAD, dtype=dtype) for dtype in (F32, F32, BF16)]
        self.grad_weight = empty(COLUMNS)
        names = dict(row_token=capacity, row_slot=capacity, slot_row=LENGTH * TOP_K, expert_offsets=EXPERTS + 1, counts=EXPERTS)
        self.plan = {name: empty(count, dtype=I32) for name, count in names.items()}

    def outputs(self) -> list[torch.Tensor]:
        plan = list(self.plan.values())
        return [self.c, self.out, self.row_max, self.row_recip, *self.grads, self.grad_x, self.grad_weight, *plan]

    def clear(self) -> None:
        for tensor in self.outputs():
            tensor.zero_()

    def run(self, gpu: NativeBackend) -> None:
        gpu.matmul(self.a, self.b, trans_b=True, out=self.c)
        shape = dict(precision=1, sequences=1, length=LENGTH, heads=HEADS, kv_heads=HEADS, head_size=HEAD, ld_v=HEADS * HEAD)
        operands = dict(q=self.q, k=self.k, v=self.v, out=self.out, row_max=self.row_max, row_recip=self.row_recip)
        gpu.call("mok_attention_forward", scale=HEAD**-0.5, **shape, **operands)
        names = dict(zip(("grad_q", "grad_k", "grad_v"), self.grads, strict=True))
        gpu.call(
            "mok_attention_backward",
            scale=HEAD**-0.5,
            ld_grad_v=HEADS * HEAD,
            grad_out=self.grad_out,
            **shape,
            **operands,
            **names,
        )
        gpu.call(
            "mok_rmsnorm_backward",
            rows=ROWS,
            columns=COLUMNS,
            x=self.c,
            weight=self.weight,
            rstd=self.rstd,
            grad_out=self.c,
            addend=None,
            grad_x=self.grad_x,
            grad_weight=self.grad_weight,
        )
        gpu.call(
            "mok_routing_plan",
            tokens=LENGTH,
            experts=EXPERTS,
            top_k=TOP_K,
            groups=1,
            rows_capacity=self.plan["row_token"].numel(),
            group_tokens=LENGTH,
            expert_index=self.experts,
            token_mask=self.mask,
            **self.plan,
        )


def same(first: list[torch.Tensor], again: list[torch.Tensor]) -> bool:
    """Whether all tensors hold the same bits."""
    return all(
        torch.equal(*(t.view(torch.int16 if t.dtype == BF16 else torch.int32) for t in pair))
        for pair in zip(first, again, strict=True)
    )


def test_one_result_beside_other_work() -> None:
    _, gpu = backends()
    work = Work()
    work.run(gpu)
    first = [tensor.clone() for tensor in work.outputs()]
    torch.cuda.synchronize()
    noise_stream, own_stream = (torch.cuda.Stream() for _ in range(2))  # type: ignore[no-untyped-call]
    elsewhere = NativeBackend("cuda", stream=own_stream)
    x = torch.randn(4096, 4096, device="cuda", dtype=BF16)
    for run in range(RUNS):
        with torch.cuda.stream(noise_stream):
            for _ in range(run % 5):
                x = (x @ x).tanh()
        stream, backend = (own_stream, elsewhere) if run % 2 else (torch.cuda.default_stream(), gpu)
        with torch.cuda.stream(stream):
            work.clear()
            work.run(backend)
        stream.synchronize()
        assert same(first, work.outputs()), f"run {run} gave other bits than the first"


def test_one_result_from_a_graph() -> None:
    _, gpu = backends()
    work = Work()
    work.run(gpu)
    first = [tensor.clone() for tensor in work.outputs()]
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    captured = NativeBackend("cuda", stream=stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work.run(captured)
    for replay in range(3):
        work.clear()
        graph.replay()
        torch.cuda.synchronize()
        assert same(first, work.outputs()), f"replay {replay} gave other bits than the first run"

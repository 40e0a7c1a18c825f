"""One result, whatever else the GPU does: repeated runs beside random work, and on another stream."""

from __future__ import annotations

import pytest
import torch

from mok_service.kernels.native import NativeBackend
from tests.gpu.twins import BF16, F32, backends, generator, normal

pytestmark = pytest.mark.gpu
RUNS = 50


def one_run(gpu: NativeBackend) -> list[torch.Tensor]:
    """A product, attention forward and backward, and a norm's gradient; every tensor that they write."""
    g = generator(31)
    m, n, k, heads, size, length = 512, 768, 1000, 4, 128, 500
    a, b = normal(g, m, k, dtype=BF16).cuda(), normal(g, n, k, dtype=BF16).cuda()
    q, key, v, gradient = (normal(g, length, heads * size, dtype=BF16).cuda() for _ in range(4))
    c, out = torch.empty(m, n, device="cuda"), torch.empty_like(q)
    row_max, row_recip = torch.empty(length, heads, device="cuda"), torch.empty(length, heads, device="cuda")
    grads = [torch.empty(length, heads * size, device="cuda", dtype=dtype) for dtype in (F32, F32, BF16)]
    gpu.call(
        "mok_product",
        precision=1,
        out_bf16=0,
        trans_a=0,
        trans_b=1,
        m=m,
        n=n,
        k=k,
        lda=k,
        ldb=k,
        ldc=n,
        a=a,
        b=b,
        c=c,
        initial=None,
        addend=None,
    )
    shape = dict(precision=1, sequences=1, length=length, heads=heads, kv_heads=heads, head_size=size, ld_v=heads * size)
    tensors = dict(scale=size**-0.5, q=q, k=key, v=v, out=out, row_max=row_max, row_recip=row_recip)
    gpu.call("mok_attention_forward", **shape, **tensors)
    gpu.call(
        "mok_attention_backward",
        ld_grad_v=heads * size,
        grad_out=gradient,
        grad_q=grads[0],
        grad_k=grads[1],
        grad_v=grads[2],
        **shape,
        **tensors,
    )
    weight, weight_gradient = torch.ones(n, device="cuda"), torch.zeros(n, device="cuda")
    rstd, grad_x = torch.rand(m, generator=g).cuda(), torch.empty(m, n, device="cuda")
    gpu.call(
        "mok_rmsnorm_backward",
        rows=m,
        columns=n,
        x=c,
        weight=weight,
        rstd=rstd,
        grad_out=c,
        addend=None,
        grad_x=grad_x,
        grad_weight=weight_gradient,
    )
    return [c, out, row_max, row_recip, *grads, grad_x, weight_gradient]


def same(first: list[torch.Tensor], again: list[torch.Tensor]) -> bool:
    """Whether all tensors hold the same bits."""
    return all(
        torch.equal(*(t.view(torch.int16 if t.dtype == BF16 else torch.int32) for t in pair))
        for pair in zip(first, again, strict=True)
    )


def test_one_result_beside_other_work() -> None:
    _, gpu = backends()
    first = one_run(gpu)
    torch.cuda.synchronize()
    noise_stream, own_stream = (torch.cuda.Stream() for _ in range(2))  # type: ignore[no-untyped-call]
    elsewhere = NativeBackend("cuda", stream=own_stream.cuda_stream)
    x = torch.randn(4096, 4096, device="cuda", dtype=BF16)
    for run in range(RUNS):
        with torch.cuda.stream(noise_stream):
            for _ in range(run % 5):
                x = (x @ x).tanh()
        if run % 2:
            with torch.cuda.stream(own_stream):
                own_stream.wait_stream(torch.cuda.default_stream())
                again = one_run(elsewhere)
            own_stream.synchronize()
        else:
            again = one_run(gpu)
            torch.cuda.default_stream().synchronize()
        assert same(first, again), f"run {run} gave other bits than the first"

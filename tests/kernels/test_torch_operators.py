"""The operators inside a user's own model: autograd against float64, torch's own checks, compiled, same bits for any threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mok_service.torch as mok
from mok_service.kernels import load_backend, reference
from mok_service.spec import ModelSpec

BOUND = {"fp32": 1e-5, "bf16": 0.03}  # 2-norm of the error, relative


def tensors(*shapes: tuple[int, ...], seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def close(got: Tensor, wanted: Tensor, precision: str) -> bool:
    return bool((got.double() - wanted).norm() <= BOUND[precision] * wanted.norm())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_linear(precision: str) -> None:
    x, w, g = tensors((37, 50), (21, 50), (37, 21))
    y = mok.linear(x, w, precision=precision)
    y.backward(g)
    assert close(y, x.double() @ w.double().T, precision)
    assert x.grad is not None and w.grad is not None
    assert close(x.grad, g.double() @ w.double(), precision) and close(w.grad, g.double().T @ x.double(), precision)


def test_rms_norm() -> None:
    x, w, g = tensors((19, 70), (70,), (19, 70))
    mok.rms_norm(x, w, 1e-5).backward(g)
    a, b = (t.detach().double().requires_grad_() for t in (x, w))
    reference.rmsnorm(a, b, 1e-5).backward(g.double())
    for got, wanted in ((x.grad, a.grad), (w.grad, b.grad)):
        assert got is not None and wanted is not None and close(got, wanted, "fp32")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_attention(precision: str) -> None:
    q, k, v, g = tensors((2 * 23, 4 * 16), (2 * 23, 2 * 16), (2 * 23, 2 * 16), (2 * 23, 4 * 16))
    out = mok.attention(q, k, v, sequences=2, head_size=16, precision=precision)
    out.backward(g)
    a, b, c = (t.detach().double().requires_grad_() for t in (q, k, v))
    heads = [t.view(2, 23, -1, 16).transpose(1, 2) for t in (a, b, c)]
    wanted = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).transpose(1, 2)
    wanted.reshape(46, 64).backward(g.double())
    assert close(out, wanted.reshape(46, 64), precision)
    for got, grad in ((q.grad, a.grad), (k.grad, b.grad), (v.grad, c.grad)):
        assert got is not None and grad is not None and close(got, grad, precision)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_moe_layer(precision: str, renormalise: bool) -> None:
    torch.manual_seed(2)
    layer = mok.MoELayer(40, 24, 6, 2, renormalise=renormalise, precision=precision, initializer_range=0.3)
    (x,) = tensors((3, 11, 40))
    y = layer(x)
    y.square().sum().backward()
    a, r, gu, d = (t.detach().double().requires_grad_() for t in (x, layer.router, layer.gate_up, layer.down))
    part = {"mlp.gate.weight": r} | {
        f"mlp.experts.{e}.{name}_proj.weight": w
        for e in range(6)
        for name, w in (("gate", gu[e, :24]), ("up", gu[e, 24:]), ("down", d[e]))
    }
    spec = ModelSpec(
        hidden_size=40, layers=1, heads=1, kv_heads=1, head_size=2, experts=6, top_k=2, expert_intermediate_size=24,
        vocabulary_size=300, renormalise_top_k=renormalise,
    )  # fmt: skip
    flat = a.view(33, 40)
    logits = flat @ r.T
    index = torch.ops.mok.moe(x.detach().view(33, 40), layer.router, layer.gate_up, layer.down, 2, renormalise, precision)[
        3
    ].long()
    wanted = reference.experts(spec, part, flat, logits, index, torch.ones(33, dtype=torch.bool))
    wanted.square().sum().backward()
    assert close(y.view(33, 40), wanted, precision)
    for got, grad in ((x.grad, a.grad), (layer.router.grad, r.grad), (layer.gate_up.grad, gu.grad), (layer.down.grad, d.grad)):
        assert got is not None and grad is not None and close(got, grad, precision)


def test_torch_accepts_the_operators() -> None:
    """opcheck: schema, fake tensors, autograd registration, tracing."""
    x, w, q, k, v, n = tensors((8, 16), (12, 16), (6, 8), (6, 4), (6, 4), (16,))
    torch.library.opcheck(torch.ops.mok.linear, (x, w, "bf16"))
    torch.library.opcheck(torch.ops.mok.rms_norm, (x, n, 1e-6))
    torch.library.opcheck(torch.ops.mok.attention, (q, k, v, 2, 4, "fp32"))
    router, gate_up, down = tensors((4, 16), (4, 20, 16), (4, 16, 10))
    torch.library.opcheck(torch.ops.mok.moe, (x, router, gate_up, down, 2, True, "fp32"))


def test_a_traced_graph_gives_the_same_bits() -> None:
    layer = mok.MoELayer(16, 8, 4, 2, precision="bf16")
    x = torch.randn(5, 16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x).view(torch.int32), layer(x).view(torch.int32))


def test_threads_do_not_show() -> None:
    """The operators run on all cores; a backend of one thread gives the same bytes."""
    x, w = tensors((301, 130), (77, 130))
    one = load_backend("cpu", threads=1)
    assert torch.equal(mok.linear(x, w).view(torch.int32), one.matmul(x.detach(), w.detach(), trans_b=True).view(torch.int32))


def test_mistakes_are_named() -> None:
    x, w = tensors((4, 8), (6, 8))
    with pytest.raises(ValueError, match="precision = 'fp8'; allowed: fp32, bf16"):
        mok.linear(x, w, precision="fp8")
    with pytest.raises(TypeError, match=r"dtype torch\.float64; allowed: torch\.float32"):
        mok.linear(x.double(), w.double())
    with pytest.raises(ValueError, match="their inner sizes are 8 and 7"):
        mok.linear(x, w[:, :7])
    with pytest.raises(ValueError, match="top_k = 5; allowed: 1 to 4"):
        mok.MoELayer(16, 8, 4, 5)

"""Time the CUDA backend's matrix products and digests beside torch (cuBLAS) on one GPU, in one run.

usage: python benchmarks/gpu_product.py [--library libmok_cuda.so] [--repeats 5] [--only bf16,fp32,grouped,tiles,blake3]

Every row is the median of several timings of a few calls each, on random operands; ours and the peer's alternate. A product is
2*m*n*k floating-point operations. Needs torch with CUDA; the library is loaded through the ABI alone.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mok_service.kernels import abi

BF16, F32 = torch.bfloat16, torch.float32


class Blake3Args(ctypes.Structure):
    """csrc/cuda/blake3.h"""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("pointers", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


class Library:
    """Calls of one context; a tensor stands for its pointer."""

    def __init__(self, path: Path, tile: int = 0) -> None:
        self.native = ctypes.CDLL(str(path))
        self.native.mok_last_error.restype = ctypes.c_char_p
        self.context = ctypes.c_void_p()
        options = abi.ContextOptions(tile_limit=tile)
        self.check(self.native.mok_context_create(ctypes.byref(options), ctypes.byref(self.context)))

    def check(self, status: int) -> None:
        if status != abi.OK:
            raise RuntimeError(self.native.mok_last_error().decode())

    def call(self, operation: str, struct: ctypes.Structure, **fields: Any) -> None:
        for name, value in fields.items():
            setattr(struct, name, value.data_ptr() if isinstance(value, torch.Tensor) else value)
        self.check(getattr(self.native, operation)(self.context, ctypes.byref(struct)))


def milliseconds(calls: list[Callable[[], Any]], repeats: int, budget_ms: float = 60.0) -> list[float]:
    """Median time of each call; the calls take turns, so that clocks and heat are shared."""
    counts = []
    for call in calls:
        call()
        counts.append(max(1, min(50, int(budget_ms / max(1e-3, timed(call, 2))))))
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, count, sample in zip(calls, counts, samples, strict=True):
            sample.append(timed(call, count))
    return [statistics.median(sample) for sample in samples]


def timed(call: Callable[[], Any], count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / count


def row(**fields: Any) -> None:
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in fields.items()}), flush=True)


def product_call(library: Library, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, ta: bool, tb: bool) -> Callable[[], None]:
    m, k = (a.shape[1], a.shape[0]) if ta else (a.shape[0], a.shape[1])
    n = b.shape[0] if tb else b.shape[1]
    struct = abi.ProductArgs()
    fields = dict(
        precision=int(a.dtype == BF16),
        out_bf16=int(c.dtype == BF16),
        trans_a=int(ta),
        trans_b=int(tb),
        m=m,
        n=n,
        k=k,
        lda=a.stride(0),
        ldb=b.stride(0),
        ldc=c.stride(0),
        a=a,
        b=b,
        c=c,
    )
    return lambda: library.call("mok_product", struct, **fields)


def products(library: Library, dtype: torch.dtype, sizes: list[tuple[int, int, int]], repeats: int, label: str = "") -> None:
    for m, n, k in sizes:
        for ta, tb in ((False, True), (False, False), (True, False)):
            a = torch.randn((k, m) if ta else (m, k), device="cuda").to(dtype)
            b = torch.randn((n, k) if tb else (k, n), device="cuda").to(dtype)
            left, right = a.T if ta else a, b.T if tb else b
            for out in (BF16, F32) if dtype == BF16 else (F32,):
                c = torch.empty(m, n, device="cuda", dtype=out)
                peer_out = torch.empty(m, n, device="cuda", dtype=dtype)
                ours, peer = milliseconds(
                    [product_call(library, a, b, c, ta, tb), functools.partial(torch.mm, left, right, out=peer_out)], repeats
                )
                rows = min(m, 256)
                reference = left[:rows].float() @ right.float()
                relative = float((c[:rows].float() - reference).norm() / reference.norm())
                flops = 2.0 * m * n * k
                row(
                    what="product" + label,
                    dtype=str(dtype)[6:],
                    out=str(out)[6:],
                    m=m,
                    n=n,
                    k=k,
                    ta=int(ta),
                    tb=int(tb),
                    ms=ours,
                    tflops=flops / ours / 1e9,
                    cublas_tflops=flops / peer / 1e9,
                    ratio=peer / ours,
                    relative=relative,
                )


def grouped(library: Library, repeats: int) -> None:
    tokens, hidden, inner, experts, top_k = 32768, 2048, 1024, 64, 8
    x = torch.randn(tokens, hidden, device="cuda").to(BF16)
    up = (torch.randn(experts, 2 * inner, hidden, device="cuda") * hidden**-0.5).to(BF16)
    flat = torch.rand(tokens, experts, device="cuda").topk(top_k).indices.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=experts)
    padded = (counts + 15) // 16 * 16
    offsets = torch.zeros(experts + 1, dtype=torch.int64, device="cuda")
    offsets[1:] = padded.cumsum(0)
    capacity = int(offsets[-1])
    starts = offsets[:-1].repeat_interleave(counts)
    within = torch.arange(flat.numel(), device="cuda") - (counts.cumsum(0) - counts).repeat_interleave(counts)
    rows = torch.full((capacity,), -1, dtype=torch.int32, device="cuda")
    rows[starts + within] = (order // top_k).int()
    offsets = offsets.int()
    gathered = torch.zeros(capacity, hidden, device="cuda", dtype=BF16)
    gathered[rows >= 0] = x[rows[rows >= 0].long()]
    out = torch.empty(capacity, 2 * inner, device="cuda", dtype=BF16)
    weight_gradient = torch.empty(experts, 2 * inner, hidden, device="cuda")
    act = torch.randn(capacity, 2 * inner, device="cuda").to(BF16)
    common = dict(precision=1, groups=experts, row_offsets=offsets)
    shape = dict(m=capacity, n=2 * inner, k=hidden, out_bf16=1, trans_b=1, b=up, c=out)
    depth = dict(m=2 * inner, n=hidden, k=capacity, a=act, c=weight_gradient)
    peer = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    cases: dict[str, tuple[str, dict[str, Any], Callable[[], Any] | None]] = {
        "by_rows, rows gathered": ("mok_grouped_product_by_rows", dict(shape, a=x, a_rows=rows), None),
        "by_rows, rows in place": (
            "mok_grouped_product_by_rows",
            dict(shape, a=gathered),
            lambda: peer(gathered, up.transpose(1, 2), offs=offsets[1:]),
        ),
        "by_depth, B gathered": ("mok_grouped_product_by_depth", dict(depth, b=x, b_rows=rows), None),
        "by_depth, rows in place": (
            "mok_grouped_product_by_depth",
            dict(depth, b=gathered),
            lambda: peer(act.T, gathered, offs=offsets[1:]),
        ),
        "by_depth, carried": ("mok_grouped_product_by_depth", dict(depth, b=gathered, initial=weight_gradient), None),
    }
    flops = 2.0 * tokens * top_k * hidden * 2 * inner
    for name, (operation, fields, torch_call) in cases.items():
        struct = abi.GroupedProductArgs()
        calls: list[Callable[[], Any]] = [functools.partial(library.call, operation, struct, **common, **fields)]
        if torch_call is not None:
            calls.append(torch_call)
        times = milliseconds(calls, repeats)
        peer_tflops = flops / times[1] / 1e9 if len(times) > 1 else None
        row(
            what=name,
            experts=experts,
            rows=capacity,
            n=2 * inner,
            k=hidden,
            ms=times[0],
            tflops=flops / times[0] / 1e9,
            torch_tflops=peer_tflops,
        )


def tiles(path: Path, repeats: int) -> None:
    for tile in range(1, 6):
        library = Library(path, tile)
        products_of = [(8192, 8192, 4096), (1024, 4096, 4096), (64, 4096, 4096)]
        for m, n, k in products_of:
            a, b = torch.randn(m, k, device="cuda").to(BF16), torch.randn(n, k, device="cuda").to(BF16)
            c = torch.empty(m, n, device="cuda", dtype=BF16)
            (ours,) = milliseconds([product_call(library, a, b, c, False, True)], repeats)
            row(what="tile", tile=tile, m=m, n=n, k=k, ms=ours, tflops=2.0 * m * n * k / ours / 1e9)


def blake3(library: Library, repeats: int) -> None:
    for count, size in ((1, 4 << 30), (128, 64 << 20), (1000, 1 << 20), (1, 64 << 20)):
        buffers = [torch.randint(0, 256, (size,), device="cuda", dtype=torch.uint8) for _ in range(count)]
        pointers = (ctypes.c_void_p * count)(*[b.data_ptr() for b in buffers])
        lengths = (ctypes.c_int64 * count)(*[size] * count)
        out = torch.empty(count, 32, device="cuda", dtype=torch.uint8)
        struct = Blake3Args()
        fields = dict(count=count, pointers=ctypes.addressof(pointers), lengths=ctypes.addressof(lengths), out=out)
        (ours,) = milliseconds([functools.partial(library.call, "mok_blake3", struct, **fields)], repeats)
        row(what="blake3", buffers=count, bytes_each=size, ms=ours, terabytes_per_s=count * size / ours / 1e9)


def copy_rate(repeats: int) -> None:
    source = torch.randint(0, 256, (1 << 31,), device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    (ours,) = milliseconds([lambda: target.copy_(source)], repeats)
    row(what="copy, read and written", ms=ours, terabytes_per_s=2 * source.numel() / ours / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.environ.get("MOK_CUDA_LIBRARY", "mok_service/_native/libmok_cuda.so")
    parser.add_argument("--library", type=Path, default=Path(default))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="bf16,fp32,grouped,tiles,blake3")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(1)
    library = Library(options.library)
    row(device=torch.cuda.get_device_name(), torch=torch.__version__, cuda=torch.version.cuda)
    chosen = set(options.only.split(","))
    if "bf16" in chosen:
        products(library, BF16, [(4096, 4096, 4096), (8192, 8192, 8192), (8192, 2048, 2048), (512, 4096, 4096)], options.repeats)
    if "fp32" in chosen:
        products(library, F32, [(4096, 4096, 4096)], options.repeats)
    if "grouped" in chosen:
        grouped(library, options.repeats)
    if "tiles" in chosen:
        tiles(options.library, options.repeats)
    if "blake3" in chosen:
        blake3(library, options.repeats)
        copy_rate(options.repeats)


if __name__ == "__main__":
    main()

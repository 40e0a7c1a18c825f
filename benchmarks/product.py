"""Matrix products of the CPU library against torch and OpenBLAS (through numpy): a markdown table on standard output.

    python benchmarks/product.py [--threads 1 2] [--seconds 4] [--statistic median|min] [--only TEXT]

Each thread count has a process of its own, in which all contenders take turns until the time of the shape is over, so that a busy
machine disturbs all alike. Packing is part of every time. Numbers are 10^9 multiply-adds a second and ratios of times.
The OpenMP pool of torch sleeps between its turns (OMP_WAIT_POLICY=PASSIVE); a spinning one slows the others.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mok_service.errors import KernelError
from mok_service.kernels import abi
from mok_service.kernels.native import NativeBackend

SOFTMAX_DEVIATION = 20.0  # of the logits of the softmax-like operand: many probabilities lie far below the window

PAUSE_SECONDS, BURST_SECONDS, BURST_RUNS = 0.2, 0.06, 4


@dataclass(frozen=True)
class Shape:
    """`rows` of each expert (one entry: a plain product) times a [n, k] weight of each; depth: weight gradients [k, n]."""

    name: str
    rows: tuple[int, ...]
    n: int
    k: int
    depth: bool = False

    @property
    def work(self) -> int:
        return sum(self.rows) * self.n * self.k


RAGGED = (688, 112, 400, 256, 560, 144, 320, 528)
SHAPES = (
    Shape("512 x 512 x 512", (512,), 512, 512),
    Shape("1024 x 1024 x 1024", (1024,), 1024, 1024),
    Shape("2048 x 2048 x 2048", (2048,), 2048, 2048),
    Shape("2048 x 1024 x 256", (2048,), 1024, 256),
    Shape("2048 x 256 x 256", (2048,), 256, 256),
    Shape("256 x 256 x 64", (256,), 256, 64),
    Shape("8 experts, 112-688 rows x 1024 x 256", RAGGED, 1024, 256),
    Shape("8 experts, 112-688 rows x 256 x 1024", RAGGED, 256, 1024),
    Shape("8 experts, 112-688 rows x 256 x 512", RAGGED, 256, 512),
    Shape("8 experts, gradient 1024 x 256 over 112-688", RAGGED, 256, 1024, depth=True),
)


def prepared(backend: NativeBackend, operation: str, **fields: Any) -> Callable[[], object]:
    """The call of the library itself, as NativeBackend.call makes it, with its argument struct filled in once."""
    struct = abi.OPERATIONS[operation](**{k: v.data_ptr() if isinstance(v, torch.Tensor) else v for k, v in fields.items()})
    function = getattr(backend._library, operation)

    def run() -> None:  # keeps the backend and the tensors
        status = function(backend._context, ctypes.byref(struct))
        assert status == abi.OK, (status, fields)

    return run


def contenders(shape: Shape, threads: int) -> dict[str, Callable[[], object]]:
    """One closure a contender; all compute the same product in their precision."""
    generator = torch.Generator().manual_seed(7)
    total = sum(shape.rows)
    offsets = [0]
    for rows in shape.rows:
        offsets.append(offsets[-1] + rows)
    row_offsets = torch.tensor(offsets, dtype=torch.int32)
    groups = len(shape.rows)
    a = torch.randn(total, shape.k, generator=generator)
    probabilities = torch.softmax(torch.randn(total, shape.k, generator=generator) * SOFTMAX_DEVIATION, dim=1)
    b = torch.randn((total, shape.n) if shape.depth else (groups, shape.n, shape.k), generator=generator)
    out = torch.empty((groups, shape.k, shape.n) if shape.depth else (total, shape.n))
    ranges = list(itertools.pairwise(offsets))

    def ours(backend: NativeBackend, left: torch.Tensor, right: torch.Tensor) -> Callable[[], object]:
        precision = 1 if left.dtype == torch.bfloat16 else 0
        if groups == 1 and not shape.depth:
            fields = {"m": total, "n": shape.n, "k": shape.k, "lda": shape.k, "ldb": shape.k, "ldc": shape.n}
            return prepared(backend, "mok_product", precision=precision, trans_b=1, a=left, b=right, c=out, **fields)
        kind, m, k = ("depth", shape.k, total) if shape.depth else ("rows", total, shape.k)
        fields = {"m": m, "n": shape.n, "k": k, "groups": groups, "trans_b": int(not shape.depth)}
        operands = {"row_offsets": row_offsets, "a": left, "b": right, "c": out}
        return prepared(backend, f"mok_grouped_product_by_{kind}", precision=precision, **fields, **operands)

    def by_torch() -> None:
        for g, (first, last) in enumerate(ranges):
            if shape.depth:
                torch.mm(a[first:last].t(), b[first:last], out=out[g])
            else:
                torch.mm(a[first:last], b[g].t(), out=out[first:last])

    a_np, b_np, out_np = a.numpy(), b.numpy(), out.numpy()

    def by_numpy() -> None:
        for g, (first, last) in enumerate(ranges):
            if shape.depth:
                np.matmul(a_np[first:last].T, b_np[first:last], out=out_np[g])
            else:
                np.matmul(a_np[first:last], b_np[g].T, out=out_np[first:last])

    torch.set_num_threads(threads)
    result: dict[str, Callable[[], object]] = {"torch": by_torch, "openblas": by_numpy}
    for isa in ("avx512", "avx2"):
        try:
            backend = NativeBackend("cpu", threads=threads, isa=isa)
        except KernelError as error:
            print(f"without {isa}: {error}", file=sys.stderr)
            continue
        result[f"fp32 {isa}"] = ours(backend, a, b)
        result[f"bf16 {isa}"] = ours(backend, a.bfloat16(), b.bfloat16())
        result[f"softmax {isa}"] = ours(backend, probabilities.bfloat16(), b.bfloat16())
    return result


def measure(shape: Shape, threads: int, seconds: float) -> dict[str, list[float]]:
    """Seconds of each run of each contender. They take turns of a burst each, after a pause in which the threads of the one
    before stop spinning; the burst's first runs wake the contender's own threads, and aren't counted.
    """
    runs = contenders(shape, threads)
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["torch"]) < 3 * BURST_RUNS:
        for name, run in runs.items():
            time.sleep(PAUSE_SECONDS)
            awake = time.perf_counter() + BURST_SECONDS
            run()
            while time.perf_counter() < awake:
                run()
            for _ in range(BURST_RUNS):
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
    return times


def child(threads: int, seconds: float, only: str, statistic: str) -> None:
    choose = min if statistic == "min" else statistics.median
    for shape in SHAPES:
        if only in shape.name:
            times = measure(shape, threads, seconds)
            speed = {name: shape.work / choose(t) / 1e9 for name, t in times.items()}
            print(json.dumps({"shape": shape.name, "speed": speed}), flush=True)


def row(shape: str, threads: int, speed: dict[str, float]) -> str:
    best = max(speed["torch"], speed["openblas"])
    cells = [shape, str(threads), f"{speed['torch']:.1f}", f"{speed['openblas']:.1f}"]
    for isa in ("avx512", "avx2"):
        if f"fp32 {isa}" not in speed:
            cells += ["-"] * 6
            continue
        fp32, bf16, softmax = (speed[f"{kind} {isa}"] for kind in ("fp32", "bf16", "softmax"))
        cells += [f"{fp32:.1f}", f"{fp32 / best:.2f}", f"{bf16:.1f}", f"{fp32 / bf16:.2f}", f"{bf16 / speed['torch']:.2f}"]
        cells += [f"{softmax / speed['torch']:.2f}"]
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=4.0, help="for each shape and thread count")
    parser.add_argument("--statistic", choices=("median", "min"), default="median")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.seconds, options.only, options.statistic)
        return 0
    isa_head = "{0} fp32 | of best | {0} bf16 | bf16 time / fp32 | of torch | softmax of torch"
    head = ["shape (rows x columns x depth)", "threads", "torch fp32", "OpenBLAS fp32"]
    head += [isa_head.format(isa) for isa in ("avx512", "avx2")]
    print("| " + " | ".join(head) + " |\n" + "| --- " * 16 + "|")
    for threads in options.threads:
        environment = {name: value for name, value in os.environ.items() if name not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
        limits = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        environment |= limits | {"OMP_WAIT_POLICY": "PASSIVE"}
        command = [sys.executable, str(Path(__file__).resolve()), "--child", str(threads), "--seconds", str(options.seconds)]
        command += ["--statistic", options.statistic, "--only", options.only]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                result = json.loads(line)
                print(row(result["shape"], threads, result["speed"]), flush=True)
        if process.returncode != 0:
            return process.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())

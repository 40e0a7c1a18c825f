"""Matrix products, conversions, functions and sums (docs/arithmetic.md, 2 to 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from mok_service.kernels.context import BF16, CODES, F32, I32, Context, check, check_rows


class Products(Context):
    """Products and elementwise operations."""

    # ---- products [4] ----------------------------------------------------------------------------------------------------

    def matmul(
        self,
        a: Tensor,
        b: Tensor,
        *,
        trans_a: bool = False,
        trans_b: bool = False,
        out: Tensor | None = None,
        out_dtype: torch.dtype = F32,
        initial: Tensor | None = None,
        addend: Tensor | None = None,
    ) -> Tensor:
        """out[m,n] = addend[m,n] + chain over k of op(a)[m,k] * op(b)[k,n]; both operands float32 or both bfloat16.

        a: [M,K], or [K,M] with trans_a; b: [K,N], or [N,K] with trans_b (a weight [out,in]); rows may lie apart (slices).
        out: [M,N] float32 or bfloat16. initial: the accumulator's first value (a carried chain), may be `out` itself.
        """
        if a.dtype not in CODES or b.dtype != a.dtype:
            raise TypeError(f"a and b have dtypes {a.dtype} and {b.dtype}; allowed: both torch.float32 or both torch.bfloat16")
        if a.dim() != 2 or b.dim() != 2:
            raise ValueError(f"a and b have shapes {list(a.shape)} and {list(b.shape)}; allowed: two dimensions each")
        m, k = (a.shape[1], a.shape[0]) if trans_a else (a.shape[0], a.shape[1])
        kb, n = (b.shape[1], b.shape[0]) if trans_b else (b.shape[0], b.shape[1])
        if k != kb:
            raise ValueError(f"a is {list(a.shape)} and b {list(b.shape)}: their inner sizes are {k} and {kb}; allowed: equal")
        lda = check_rows(a, "a", a.dtype, (a.shape[0], a.shape[1]))
        ldb = check_rows(b, "b", b.dtype, (b.shape[0], b.shape[1]))
        if out is None:
            out = self.empty(m, n, dtype=out_dtype)
        if out.dtype not in CODES:
            raise TypeError(f"out has dtype {out.dtype}; allowed: torch.float32, torch.bfloat16")
        ldc = check_rows(out, "out", out.dtype, (m, n))
        for name, extra in (("initial", initial), ("addend", addend)):
            if extra is not None and check_rows(extra, name, F32, (m, n)) != ldc:
                raise ValueError(f"{name} has row stride {extra.stride(0)}; allowed: that of out, {ldc}")
        self.call(
            "mok_product",
            precision=CODES[a.dtype],
            out_bf16=CODES[out.dtype],
            trans_a=trans_a,
            trans_b=trans_b,
            m=m,
            n=n,
            k=k,
            lda=lda,
            ldb=ldb,
            ldc=ldc,
            a=a,
            b=b,
            c=out,
            initial=initial,
            addend=addend,
        )
        return out

    def grouped_matmul_rows(
        self, a: Tensor, b: Tensor, row_offsets: Tensor, out: Tensor, *, trans_b: bool, a_rows: Tensor | None = None
    ) -> Tensor:
        """out[r] = a[a_rows[r]] . op(b[g]) for the rows r of run g (row_offsets[g] .. row_offsets[g+1]).

        a: operand [*, K]; b: operand [G, N, K] (trans_b) or [G, K, N]; row_offsets: int32 [G+1]; a_rows: int32 [rows], -1 a
        row of
        zeros; out: [capacity, N]. Rows from row_offsets[G] on are not written.
        """
        groups = b.shape[0]
        n, k = (b.shape[1], b.shape[2]) if trans_b else (b.shape[2], b.shape[1])
        check(a, "a", b.dtype, (a.shape[0], k))
        check(b, "b", (F32, BF16))
        check(row_offsets, "row_offsets", I32, (groups + 1,))
        check(out, "out", (F32, BF16), (out.shape[0], n))
        if a_rows is not None:
            check(a_rows, "a_rows", I32, (out.shape[0],))
        self.call(
            "mok_grouped_product_by_rows",
            precision=CODES[b.dtype],
            out_bf16=CODES[out.dtype],
            trans_b=trans_b,
            groups=groups,
            m=out.shape[0],
            n=n,
            k=k,
            row_offsets=row_offsets,
            a_rows=a_rows,
            b_rows=None,
            a=a,
            b=b,
            c=out,
            initial=None,
        )
        return out

    def grouped_matmul_depth(
        self,
        a: Tensor,
        b: Tensor,
        row_offsets: Tensor,
        out: Tensor,
        *,
        a_rows: Tensor | None = None,
        b_rows: Tensor | None = None,
        initial: Tensor | None = None,
    ) -> Tensor:
        """out[g] = chain over the rows r of run g of a[r]^T b[r]: expert weight gradients.

        a: operand [*, M]; b: operand [*, N]; out, initial: float32 [G, M, N] (may be one tensor); runs start at multiples of
        16 rows.
        """
        groups, m, n = out.shape
        check(a, "a", (F32, BF16), (a.shape[0], m))
        check(b, "b", a.dtype, (b.shape[0], n))
        check(row_offsets, "row_offsets", I32, (groups + 1,))
        check(out, "out", F32)
        capacity = int(a.shape[0] if a_rows is None else a_rows.shape[0])
        for name, rows in (("a_rows", a_rows), ("b_rows", b_rows)):
            if rows is not None:
                check(rows, name, I32, (capacity,))
        if initial is not None:
            check(initial, "initial", F32, (groups, m, n))
        self.call(
            "mok_grouped_product_by_depth",
            precision=CODES[a.dtype],
            out_bf16=0,
            trans_b=0,
            groups=groups,
            m=m,
            n=n,
            k=capacity,
            row_offsets=row_offsets,
            a_rows=a_rows,
            b_rows=b_rows,
            a=a,
            b=b,
            c=out,
            initial=initial,
        )
        return out

    # ---- elementwise, functions, sums [2, 3, 5] ---------------------------------------------------------------------------

    def to_operand(self, x: Tensor, precision: str, out: Tensor | None = None) -> Tensor:
        """x (float32) rounded to the operand dtype: bfloat16 by nearest even, or x itself in fp32."""
        check(x, "x", F32)
        if precision == "fp32":
            return x
        out = self.empty(*x.shape, dtype=BF16) if out is None else check(out, "out", BF16, tuple(x.shape))
        self.call("mok_to_bf16", count=x.numel(), **{"in": x, "out": out})
        return out

    def add(self, a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        """a + b, float32, one shape; out may be a or b."""
        check(a, "a", F32)
        check(b, "b", F32, tuple(a.shape))
        out = torch.empty_like(a) if out is None else check(out, "out", F32, tuple(a.shape))
        self.call("mok_add", count=a.numel(), a=a, b=b, out=out)
        return out

    def sum_squares(self, x: Tensor, out: Tensor) -> Tensor:
        """Sums of squares [13.1] of x float32 [matrices, rows, columns] into out float32 [matrices]."""
        check(x, "x", F32)
        check(out, "out", F32, (x.shape[0],))
        self.call("mok_sum_squares", matrices=x.shape[0], rows=x.shape[1], columns=x.shape[2], **{"in": x, "out": out})
        return out

    def function(self, name: str, x: Tensor, out: Tensor | None = None) -> Tensor:
        """A one-argument function of section 3 on every element, float32: exp, exp2, log, sigmoid, silu, silu_grad, rsqrt,
        sqrt, recip, sin, cos.
        """
        check(x, "x", F32)
        out = torch.empty_like(x) if out is None else check(out, "out", F32, tuple(x.shape))
        self.call("mok_function", name=name.encode(), count=x.numel(), **{"in": x, "out": out})
        return out

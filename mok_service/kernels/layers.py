"""Embedding, norms, rotary embedding and attention (docs/arithmetic.md, 6 to 9)."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from mok_service.kernels import abi
from mok_service.kernels.context import BF16, CODES, F32, I32, Context, check, check_rows


def attention_scale(head_size: int) -> float:
    """1 / sqrt(head_size), the root and the quotient rounded to binary32 [9]."""
    return float(np.float32(1) / np.sqrt(np.float32(head_size)))


class Layers(Context):
    """The dense layers."""

    # ---- embedding, norms, rotary [6, 7, 8] --------------------------------------------------------------------------------

    def embedding(self, ids: Tensor, table: Tensor, out: Tensor) -> Tensor:
        """out float32 [T, H] = table[ids]; ids int32 [T], table operand [V, H]."""
        check(ids, "ids", I32)
        check(table, "table", (F32, BF16))
        check(out, "out", F32, (ids.numel(), table.shape[1]))
        self.call(
            "mok_embedding_forward",
            precision=CODES[table.dtype],
            tokens=ids.numel(),
            vocabulary=table.shape[0],
            hidden=table.shape[1],
            ids=ids,
            table=table,
            out=out,
        )
        return out

    def embedding_backward(self, ids: Tensor, grad_out: Tensor, grad_table: Tensor) -> None:
        """grad_table[id] += sum of the gradients of id's positions in one group; grad_out float32 [T, H]."""
        check(ids, "ids", I32)
        check(grad_table, "grad_table", F32)
        check(grad_out, "grad_out", F32, (ids.numel(), grad_table.shape[1]))
        self.call(
            "mok_embedding_backward",
            tokens=ids.numel(),
            vocabulary=grad_table.shape[0],
            hidden=grad_table.shape[1],
            ids=ids,
            grad_out=grad_out,
            grad_table=grad_table,
        )

    def rmsnorm(self, x: Tensor, weight: Tensor, epsilon: float, out: Tensor, rstd: Tensor) -> Tensor:
        """x float32 [rows, C], weight float32 [C] -> out operand [rows, C], rstd float32 [rows]."""
        rows, columns = x.shape
        check(x, "x", F32)
        check(weight, "weight", F32, (columns,))
        check(out, "out", (F32, BF16), (rows, columns))
        check(rstd, "rstd", F32, (rows,))
        self.call(
            "mok_rmsnorm_forward",
            precision=CODES[out.dtype],
            rows=rows,
            columns=columns,
            epsilon=epsilon,
            x=x,
            weight=weight,
            out=out,
            rstd=rstd,
        )
        return out

    def rmsnorm_backward(
        self,
        x: Tensor,
        weight: Tensor,
        rstd: Tensor,
        grad_out: Tensor,
        grad_x: Tensor,
        *,
        addend: Tensor | None = None,
        grad_weight: Tensor | None = None,
    ) -> Tensor:
        """grad_x = addend + the norm's gradient; grad_weight += the sum over these rows (those of one group)."""
        rows, columns = x.shape
        for name, tensor in (("x", x), ("grad_out", grad_out), ("grad_x", grad_x)):
            check(tensor, name, F32, (rows, columns))
        check(weight, "weight", F32, (columns,))
        check(rstd, "rstd", F32, (rows,))
        self.call(
            "mok_rmsnorm_backward",
            rows=rows,
            columns=columns,
            x=x,
            weight=weight,
            rstd=rstd,
            grad_out=grad_out,
            addend=addend,
            grad_x=grad_x,
            grad_weight=grad_weight,
        )
        return grad_x

    def rope_table(self, positions: int, head_size: int, base: float) -> Tensor:
        """float32 [positions, head_size]: cosines of head_size/2 frequencies, then sines."""
        out = self.empty(positions, head_size)
        self.call("mok_rope_table", positions=positions, head_size=head_size, base=base, cos_sin=out)
        return out

    def qk(
        self,
        x: Tensor,
        heads: int,
        weight: Tensor | None,
        norm: str,
        epsilon: float,
        positions: Tensor,
        table: Tensor,
        out: Tensor,
        rstd: Tensor | None,
    ) -> Tensor:
        """Query/key norm and rotation: x operand [T, heads*D] (rows may lie apart) -> out operand [T, heads*D]."""
        tokens, width = out.shape
        ld = check_rows(x, "x", out.dtype, (tokens, width))
        check(out, "out", (F32, BF16))
        check(positions, "positions", I32, (tokens,))
        self.call(
            "mok_qk_forward",
            precision=CODES[out.dtype],
            norm=abi.QK_NORMS[norm],
            tokens=tokens,
            heads=heads,
            head_size=width // heads,
            ld_in=ld,
            epsilon=epsilon,
            weight=weight,
            positions=positions,
            cos_sin=table,
            out=out,
            rstd=rstd,
            **{"in": x},
        )
        return out

    def qk_backward(
        self,
        x: Tensor,
        heads: int,
        weight: Tensor | None,
        norm: str,
        rstd: Tensor | None,
        positions: Tensor,
        table: Tensor,
        grad_out: Tensor,
        grad_x: Tensor,
        grad_weight: Tensor | None = None,
    ) -> None:
        """grad_out float32 [T, heads*D] -> grad_x operand (rows may lie apart); grad_weight += this group's sum."""
        tokens, width = grad_out.shape
        ld, ld_grad = (check_rows(t, n, x.dtype, (tokens, width)) for t, n in ((x, "x"), (grad_x, "grad_x")))
        check(grad_out, "grad_out", F32)
        check(positions, "positions", I32, (tokens,))
        self.call(
            "mok_qk_backward",
            precision=CODES[x.dtype],
            norm=abi.QK_NORMS[norm],
            tokens=tokens,
            heads=heads,
            head_size=width // heads,
            ld_in=ld,
            ld_grad_in=ld_grad,
            weight=weight,
            rstd=rstd,
            positions=positions,
            cos_sin=table,
            grad_out=grad_out,
            grad_in=grad_x,
            grad_weight=grad_weight,
            **{"in": x},
        )

    # ---- attention [9] -------------------------------------------------------------------------------------------------------

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sequences: int,
        heads: int,
        kv_heads: int,
        scale: float,
        out: Tensor,
        row_max: Tensor,
        row_recip: Tensor,
    ) -> Tensor:
        """Causal grouped-query attention: q, out operand [T, heads*D], k operand [T, kv_heads*D], v the same with rows
        apart; T = sequences*length.
        """
        tokens, width = q.shape
        size = width // heads
        check(q, "q", (F32, BF16))
        check(k, "k", q.dtype, (tokens, kv_heads * size))
        check(out, "out", q.dtype, (tokens, width))
        ld_v = check_rows(v, "v", q.dtype, (tokens, kv_heads * size))
        for name, tensor in (("row_max", row_max), ("row_recip", row_recip)):
            check(tensor, name, F32, (tokens, heads))
        self.call(
            "mok_attention_forward",
            precision=CODES[q.dtype],
            sequences=sequences,
            length=tokens // sequences,
            heads=heads,
            kv_heads=kv_heads,
            head_size=size,
            ld_v=ld_v,
            scale=scale,
            q=q,
            k=k,
            v=v,
            out=out,
            row_max=row_max,
            row_recip=row_recip,
        )
        return out

    def attention_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        grad_out: Tensor,
        row_max: Tensor,
        row_recip: Tensor,
        *,
        sequences: int,
        heads: int,
        kv_heads: int,
        scale: float,
        grad_q: Tensor,
        grad_k: Tensor,
        grad_v: Tensor,
    ) -> None:
        """grad_out operand -> grad_q, grad_k float32, grad_v operand (rows may lie apart)."""
        tokens, width = q.shape
        size = width // heads
        for name, tensor in (("q", q), ("out", out), ("grad_out", grad_out)):
            check(tensor, name, q.dtype, (tokens, width))
        check(k, "k", q.dtype, (tokens, kv_heads * size))
        check(grad_q, "grad_q", F32, (tokens, width))
        check(grad_k, "grad_k", F32, (tokens, kv_heads * size))
        ld_v, ld_grad_v = (check_rows(t, n, q.dtype, (tokens, kv_heads * size)) for t, n in ((v, "v"), (grad_v, "grad_v")))
        self.call(
            "mok_attention_backward",
            precision=CODES[q.dtype],
            sequences=sequences,
            length=tokens // sequences,
            heads=heads,
            kv_heads=kv_heads,
            head_size=size,
            ld_v=ld_v,
            ld_grad_v=ld_grad_v,
            scale=scale,
            q=q,
            k=k,
            v=v,
            out=out,
            grad_out=grad_out,
            row_max=row_max,
            row_recip=row_recip,
            grad_q=grad_q,
            grad_k=grad_k,
            grad_v=grad_v,
        )

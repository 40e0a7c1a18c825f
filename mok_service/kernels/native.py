"""The native backend: the operations of csrc/include/mok.h on torch tensors.

Every method checks dtypes, shapes and layout, passes pointers, and writes into `out` tensors that the caller gives (or that it
allocates). The definitions are in docs/arithmetic.md; the section is named with each method. "operand" means the dtype of the
chosen precision: float32 for fp32, bfloat16 for bf16. Raises TypeError or ValueError for tensors that don't fit, KernelError for
what the library refuses (message, file and line inside).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mok_service.errors import KernelError
from mok_service.kernels import abi
from mok_service.kernels.library import load_library
from mok_service.provenance.digest import blake3_of

F32, BF16, I32, I64, U8 = torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8
OPERAND_DTYPES = {"fp32": F32, "bf16": BF16}
_CODES = {F32: 0, BF16: 1}
_OPERATIONS = abi.OPERATIONS | abi.CUDA_OPERATIONS
_STATUS = {
    abi.INVALID: "invalid argument",
    abi.OUT_OF_MEMORY: "out of memory",
    abi.UNSUPPORTED: "unsupported",
    abi.DEVICE: "device",
    abi.INTERNAL: "internal",
}


def stream_number(name: str) -> int:
    """The 64-bit number of a random stream [14.1]: the low 64 bits, little endian, of SHA-256 of its name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def check(
    tensor: Tensor, name: str, dtype: torch.dtype | tuple[torch.dtype, ...], shape: tuple[int, ...] | None = None
) -> Tensor:
    """`tensor` itself, when it is contiguous and has the dtype and (if given) the shape that an operation needs."""
    allowed = dtype if isinstance(dtype, tuple) else (dtype,)
    if tensor.dtype not in allowed:
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: {', '.join(map(str, allowed))}")
    if shape is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; allowed: {list(shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {list(tensor.stride())}; allowed: contiguous, row-major")
    return tensor


def check_rows(tensor: Tensor, name: str, dtype: torch.dtype, shape: tuple[int, int]) -> int:
    """Like `check` for a 2-D slice whose rows may lie apart; returns the distance of two rows in elements."""
    if tensor.dtype != dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: {dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; allowed: {list(shape)}")
    if tensor.stride(1) != 1 or tensor.stride(0) < shape[1]:
        raise ValueError(f"{name} has strides {list(tensor.stride())}; allowed: [>= {shape[1]}, 1]")
    return int(tensor.stride(0))


def host_blake3(tensor: Tensor) -> str:
    """BLAKE3 (64 hex digits) of the little-endian, row-major bytes of a tensor in host memory."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return blake3_of(memoryview(data.numpy())).hex  # type: ignore[arg-type]


class NativeBackend:
    """One device's kernels. `name` is "cpu" or "cuda", `device` the torch device that tensors must be on."""

    def __init__(
        self,
        name: str,
        *,
        threads: int = 0,
        isa: str = "auto",
        device: int = 0,
        tile_limit: int = 0,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """`threads` 0: all cores of this process. `isa`: auto, portable, avx2, avx512. `tile_limit` > 0 shrinks cache
        blocks (tests). `stream` (cuda): where operations are enqueued, None for the default stream; work of torch on the same
        tensors belongs inside `active()`.
        """
        self.name = name
        self._library = load_library(name)
        self.device = torch.device("cpu") if name == "cpu" else torch.device("cuda", device)
        if isa not in abi.ISAS:
            raise ValueError(f"isa = {isa!r}; allowed: {', '.join(abi.ISAS)}")
        self.stream = stream
        options = abi.ContextOptions(
            threads=threads,
            isa=abi.ISAS[isa],
            device=device,
            tile_limit=tile_limit,
            stream=None if stream is None else stream.cuda_stream or None,
        )
        self._context = ctypes.c_void_p()
        self._raise(self._library.mok_context_create(ctypes.byref(options), ctypes.byref(self._context)), "mok_context_create")

    def __del__(self) -> None:
        context = getattr(self, "_context", None)
        if context:
            self._library.mok_context_destroy(context)
            context.value = None

    # ---- plumbing --------------------------------------------------------------------------------------------------------

    def active(self) -> contextlib.AbstractContextManager[object]:
        """Inside it, torch's own work goes to this backend's stream as well."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def info(self) -> dict[str, Any]:
        """What runs: instruction set and threads, or the device's name; and how the library was built."""
        return {
            "backend": self.name,
            "arithmetic": self._library.mok_arithmetic().decode(),
            "context": json.loads(self._library.mok_context_info(self._context)),
            "build": json.loads(self._library.mok_build_info()),
        }

    def _raise(self, status: int, operation: str) -> None:
        if status != abi.OK:
            message = self._library.mok_last_error().decode(errors="replace")
            raise KernelError(f"{operation}: {_STATUS.get(status, status)}: {message}", operation=operation, status=status)

    def call(self, operation: str, **fields: Any) -> Any:
        """Run one operation of mok.h; a tensor stands for its pointer, None for NULL. Returns the struct."""
        struct = _OPERATIONS[operation]()
        for name, value in fields.items():
            if isinstance(value, Tensor):
                if value.device != self.device:
                    raise ValueError(f"{name} is on {value.device}; allowed: {self.device}")
                value = value.data_ptr()
            setattr(struct, name, value)
        self._raise(getattr(self._library, operation)(self._context, ctypes.byref(struct)), operation)
        return struct

    def empty(self, *shape: int, dtype: torch.dtype = F32) -> Tensor:
        """An uninitialised tensor on this backend's device."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def blake3(self, tensors: Sequence[Tensor]) -> list[str]:
        """BLAKE3 (64 hex digits) of each tensor's little-endian, row-major bytes; on a GPU only these 32 bytes come back."""
        if self.name == "cpu":
            return [host_blake3(tensor) for tensor in tensors]
        for tensor in tensors:
            check(tensor, "tensor", tensor.dtype)
        pointers = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
        lengths = (ctypes.c_int64 * len(tensors))(*(tensor.numel() * tensor.element_size() for tensor in tensors))
        out = self.empty(len(tensors), 32, dtype=U8)
        self.call(
            "mok_blake3", count=len(tensors), pointers=ctypes.addressof(pointers), lengths=ctypes.addressof(lengths), out=out
        )
        return [bytes(row).hex() for row in out.tolist()]

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
        if a.dtype not in _CODES or b.dtype != a.dtype:
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
        if out.dtype not in _CODES:
            raise TypeError(f"out has dtype {out.dtype}; allowed: torch.float32, torch.bfloat16")
        ldc = check_rows(out, "out", out.dtype, (m, n))
        for name, extra in (("initial", initial), ("addend", addend)):
            if extra is not None and check_rows(extra, name, F32, (m, n)) != ldc:
                raise ValueError(f"{name} has row stride {extra.stride(0)}; allowed: that of out, {ldc}")
        self.call(
            "mok_product",
            precision=_CODES[a.dtype],
            out_bf16=_CODES[out.dtype],
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
            precision=_CODES[b.dtype],
            out_bf16=_CODES[out.dtype],
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
            precision=_CODES[a.dtype],
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

    # ---- embedding, norms, rotary [6, 7, 8] --------------------------------------------------------------------------------

    def embedding(self, ids: Tensor, table: Tensor, out: Tensor) -> Tensor:
        """out float32 [T, H] = table[ids]; ids int32 [T], table operand [V, H]."""
        check(ids, "ids", I32)
        check(table, "table", (F32, BF16))
        check(out, "out", F32, (ids.numel(), table.shape[1]))
        self.call(
            "mok_embedding_forward",
            precision=_CODES[table.dtype],
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
            precision=_CODES[out.dtype],
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
            precision=_CODES[out.dtype],
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
            precision=_CODES[x.dtype],
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
            precision=_CODES[q.dtype],
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
            precision=_CODES[q.dtype],
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

    # ---- router and experts [10, 11] -----------------------------------------------------------------------------------------

    def router(
        self,
        logits: Tensor,
        top_k: int,
        renormalise: bool,
        probabilities: Tensor,
        log_sum_exp: Tensor,
        index: Tensor,
        weight: Tensor,
        status: Tensor,
    ) -> None:
        """logits float32 [T, E] -> softmax [T, E], log-sum-exp [T], expert index int32 [T, k] and weight float32 [T, k],
        ties to the lower index.
        """
        tokens, experts = logits.shape
        check(logits, "logits", F32)
        check(probabilities, "probabilities", F32, (tokens, experts))
        check(log_sum_exp, "log_sum_exp", F32, (tokens,))
        check(index, "index", I32, (tokens, top_k))
        check(weight, "weight", F32, (tokens, top_k))
        check(status, "status", I32, (1,))
        self.call(
            "mok_router_forward",
            tokens=tokens,
            experts=experts,
            top_k=top_k,
            renormalise=renormalise,
            logits=logits,
            probabilities=probabilities,
            log_sum_exp=log_sum_exp,
            expert_index=index,
            expert_weight=weight,
            status=status,
        )

    def routing_plan(
        self,
        index: Tensor,
        mask: Tensor,
        experts: int,
        group_tokens: int,
        row_token: Tensor,
        row_slot: Tensor,
        slot_row: Tensor,
        expert_offsets: Tensor,
        counts: Tensor,
    ) -> None:
        """Rows for the experts: expert-major, then group, then token, each (expert, group) segment padded to 16 rows; all
        int32, mask uint8 [T].
        """
        tokens, top_k = index.shape
        groups = -(-tokens // group_tokens)
        check(index, "index", I32)
        check(mask, "mask", U8, (tokens,))
        check(row_token, "row_token", I32)
        check(row_slot, "row_slot", I32, (row_token.numel(),))
        check(slot_row, "slot_row", I32, (tokens, top_k))
        check(expert_offsets, "expert_offsets", I32, (experts + 1,))
        check(counts, "counts", I32, (groups, experts))
        self.call(
            "mok_routing_plan",
            tokens=tokens,
            experts=experts,
            top_k=top_k,
            groups=groups,
            rows_capacity=row_token.numel(),
            group_tokens=group_tokens,
            expert_index=index,
            token_mask=mask,
            row_token=row_token,
            row_slot=row_slot,
            slot_row=slot_row,
            expert_offsets=expert_offsets,
            counts=counts,
        )

    def router_backward(
        self,
        probabilities: Tensor,
        log_sum_exp: Tensor,
        weight: Tensor,
        index: Tensor,
        grad_weight: Tensor,
        mask: Tensor,
        counts: Tensor,
        *,
        renormalise: bool,
        group_tokens: int,
        aux_scale: Tensor | None,
        z_scale: float,
        grad_logits: Tensor,
    ) -> Tensor:
        """grad_weight float32 [T, k] (and the auxiliary losses' scales) -> grad_logits operand [T, E]."""
        tokens, experts = probabilities.shape
        check(grad_weight, "grad_weight", F32, tuple(weight.shape))
        check(grad_logits, "grad_logits", (F32, BF16), (tokens, experts))
        if aux_scale is not None:
            check(aux_scale, "aux_scale", F32, (counts.shape[0],))
        self.call(
            "mok_router_backward",
            precision=_CODES[grad_logits.dtype],
            renormalise=renormalise,
            tokens=tokens,
            experts=experts,
            top_k=weight.shape[1],
            group_tokens=group_tokens,
            probabilities=probabilities,
            log_sum_exp=log_sum_exp,
            expert_weight=weight,
            expert_index=index,
            grad_weight=grad_weight,
            token_mask=mask,
            counts=counts,
            aux_scale=aux_scale,
            z_scale=z_scale,
            grad_logits=grad_logits,
        )
        return grad_logits

    def router_sums(
        self, probabilities: Tensor, log_sum_exp: Tensor, mask: Tensor, group_tokens: int, probability_sum: Tensor, z_sum: Tensor
    ) -> None:
        """Adds fixed-point (2^-32) sums into probability_sum int64 [groups, E] and z_sum int64 [1]."""
        tokens, experts = probabilities.shape
        check(probability_sum, "probability_sum", I64, (-(-tokens // group_tokens), experts))
        check(z_sum, "z_sum", I64, (1,))
        self.call(
            "mok_router_sums",
            tokens=tokens,
            experts=experts,
            group_tokens=group_tokens,
            probabilities=probabilities,
            log_sum_exp=log_sum_exp,
            token_mask=mask,
            probability_sum=probability_sum,
            z_sum=z_sum,
        )

    def swiglu(self, gate_up: Tensor, rows: int, out: Tensor) -> Tensor:
        """out operand [*, I] = round(silu(gate) * up) for the first `rows` rows of gate_up operand [*, 2I]."""
        size = gate_up.shape[1] // 2
        check(gate_up, "gate_up", (F32, BF16))
        check(out, "out", gate_up.dtype, (gate_up.shape[0], size))
        self.call("mok_swiglu_forward", precision=_CODES[out.dtype], rows=rows, intermediate=size, gate_up=gate_up, out=out)
        return out

    def swiglu_backward(
        self,
        gate_up: Tensor,
        grad_act: Tensor,
        rows: int,
        grad_gate_up: Tensor,
        *,
        slot_weight: Tensor | None = None,
        row_slot: Tensor | None = None,
        weighted_act: Tensor | None = None,
        grad_slot_weight: Tensor | None = None,
    ) -> None:
        """grad_act float32 [*, I] (unweighted) -> grad_gate_up operand [*, 2I], weighted_act operand [*, I],
        grad_slot_weight float32 [slots].
        """
        size = gate_up.shape[1] // 2
        check(gate_up, "gate_up", (F32, BF16))
        check(grad_act, "grad_act", F32, (gate_up.shape[0], size))
        check(grad_gate_up, "grad_gate_up", gate_up.dtype, tuple(gate_up.shape))
        self.call(
            "mok_swiglu_backward",
            precision=_CODES[gate_up.dtype],
            rows=rows,
            intermediate=size,
            slots=0 if slot_weight is None else slot_weight.numel(),
            gate_up=gate_up,
            grad_act=grad_act,
            slot_weight=slot_weight,
            row_slot=row_slot,
            grad_gate_up=grad_gate_up,
            weighted_act=weighted_act,
            grad_slot_weight=grad_slot_weight,
        )

    def combine(
        self, rows: Tensor, slot_row: Tensor, out: Tensor, *, weight: Tensor | None = None, addend: Tensor | None = None
    ) -> Tensor:
        """out float32 [T, H]: the weighted (or plain) sum of each token's rows in top-k order, after `addend` if given."""
        tokens, top_k = slot_row.shape
        check(rows, "rows", (F32, BF16), (rows.shape[0], out.shape[1]))
        check(out, "out", F32, (tokens, out.shape[1]))
        self.call(
            "mok_combine",
            precision=_CODES[rows.dtype],
            tokens=tokens,
            top_k=top_k,
            hidden=out.shape[1],
            rows=rows,
            slot_row=slot_row,
            weight=weight,
            addend=addend,
            out=out,
        )
        return out

    # ---- loss and update [12, 13] --------------------------------------------------------------------------------------------

    def cross_entropy(
        self, logits: Tensor, labels: Tensor, loss_sum: Tensor, status: Tensor, grad_logits: Tensor | None = None
    ) -> None:
        """logits float32 [rows, V], labels int32 [rows] (-1: none); adds to loss_sum int64 [1] (2^-32); grad_logits
        operand, unscaled.
        """
        rows, vocabulary = logits.shape
        check(logits, "logits", F32)
        check(labels, "labels", I32, (rows,))
        check(loss_sum, "loss_sum", I64, (1,))
        check(status, "status", I32, (1,))
        if grad_logits is not None:
            check(grad_logits, "grad_logits", (F32, BF16), (rows, vocabulary))
        self.call(
            "mok_cross_entropy",
            precision=0 if grad_logits is None else _CODES[grad_logits.dtype],
            rows=rows,
            vocabulary=vocabulary,
            logits=logits,
            labels=labels,
            loss_sum=loss_sum,
            grad_logits=grad_logits,
            status=status,
        )

    def adamw(
        self,
        weight: Tensor,
        first: Tensor,
        second: Tensor,
        grad: Tensor,
        operand: Tensor | None,
        status: Tensor,
        **scalars: float,
    ) -> None:
        """One update of float32 master weights and moments [n]; writes bf16 copies into `operand`. Scalars: see
        mok_adamw_args.
        """
        count = weight.numel()
        for name, tensor in (("weight", weight), ("first", first), ("second", second), ("grad", grad)):
            check(tensor, name, F32, (count,))
        if operand is not None:
            check(operand, "operand", BF16, (count,))
        self.call(
            "mok_adamw",
            count=count,
            weight=weight,
            first=first,
            second=second,
            grad=grad,
            operand=operand,
            status=status,
            **scalars,
        )

    # ---- random streams [14] -------------------------------------------------------------------------------------------------

    def random_normal(self, out: Tensor, seed: int, stream: str, std: float) -> Tensor:
        """out float32 = std * normal(seed, stream, i) for the row-major index i."""
        check(out, "out", F32)
        self.call("mok_random_normal", seed=seed, stream=stream_number(stream), first=0, count=out.numel(), std=std, out=out)
        return out

    def permutation(self, seed: int, stream: str, n: int, first: int, count: int) -> list[int]:
        """Where first .. first+count-1 go in a random permutation of [0, n)."""
        out = (ctypes.c_int64 * max(count, 1))()
        self.call(
            "mok_permutation",
            seed=seed,
            stream=stream_number(stream),
            n=n,
            first=first,
            count=count,
            out=ctypes.cast(out, ctypes.c_void_p).value,
        )
        return list(out[:count])

    def scalar(self, name: str, x: float, y: float = 0.0) -> float:
        """binary64 pow, cos, exp, log by our own functions (the same on every machine)."""
        return float(self.call("mok_scalar", name=name.encode(), x=x, y=y).out)

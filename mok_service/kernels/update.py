"""Loss, update and random streams (docs/arithmetic.md, 12 to 14)."""

from __future__ import annotations

import ctypes

from torch import Tensor

from mok_service.kernels.context import BF16, CODES, F32, I32, I64, Context, check, stream_number


class Update(Context):
    """Loss, optimizer and random streams."""

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
            precision=0 if grad_logits is None else CODES[grad_logits.dtype],
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

"""Router, routing plan and experts (docs/arithmetic.md, 10 and 11)."""

from __future__ import annotations

from torch import Tensor

from mok_service.kernels.context import BF16, CODES, F32, I32, I64, U8, Context, check


def routing_capacity(tokens: int, top_k: int, experts: int, groups: int, group_tokens: int) -> int:
    """The most rows that a routing plan can have (10.3): an upper bound for any routing, a multiple of 16."""
    padded = (tokens * top_k + 15 * groups * experts + 15) // 16 * 16
    return min(padded, groups * experts * ((group_tokens + 15) // 16 * 16))


class Experts(Context):
    """Routing and experts."""

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
            precision=CODES[grad_logits.dtype],
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
        self.call("mok_swiglu_forward", precision=CODES[out.dtype], rows=rows, intermediate=size, gate_up=gate_up, out=out)
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
            precision=CODES[gate_up.dtype],
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
            precision=CODES[rows.dtype],
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

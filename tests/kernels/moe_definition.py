"""Sections 4, 5 and 7 to 11 of docs/arithmetic.md, written a second time in numpy, as plainly as the page itself.

The kernels are compared with this by bytes. Everything is an fp32 array operation, an exact fused multiply-add (`fma`) or
exact integer arithmetic (the 16-block rule). Operands are fp32 arrays whose values fit the operand dtype. Masked terms are
multiplied as +0 here, while kernels skip them: the page says that both give the same bits. The functions of section 3
come from the caller: they have tests of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
Function = Callable[[F32], F32]

ZERO, ONE = np.float32(0), np.float32(1)
LOG2E = np.array(0x3FB8AA3B, np.uint32).view(np.float32)[()]
BLOCK = 16


@dataclass(frozen=True)
class Functions:
    """Functions of section 3 on fp32 arrays."""

    exp: Function
    exp2: Function
    log: Function
    silu: Function
    silu_grad: Function


# ---- 2. Numbers


def to_bf16(x: F32) -> NDArray[np.uint16]:
    """Nearest even on the bit pattern; NaN gives 0x7FFF (2.2)."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def from_bf16(bits: NDArray[np.uint16]) -> F32:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def op(precision: str, x: F32) -> F32:
    """Rounds to the operand dtype and widens again."""
    return from_bf16(to_bf16(x)) if precision == "bf16" else np.asarray(x, np.float32)


def fma(a: F32 | np.float32, b: F32 | np.float32, c: F32 | np.float32) -> F32:
    """One rounding: the product is exact in binary64, the sum is rounded to odd there, then once to fp32."""
    with np.errstate(all="ignore"):
        p = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        c64 = np.asarray(c, np.float64)
        s = np.asarray(p + c64)
        back = s - p
        error = (p - (s - back)) + (c64 - back)
        even = (s.view(np.int64) & 1) == 0
        inexact = np.isfinite(s) & (error != 0)
        odd = np.nextafter(s, np.where(error > 0, np.inf, -np.inf))
        return np.where(inexact & even, odd, s).astype(np.float32)


# ---- 4. Products


def _split(x: F32, fraction_bits: int) -> tuple[I64, I64, I64]:
    """Sign, exponent (-126 where subnormal) and integer significand with `fraction_bits` fraction bits."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.int64)
    field = (u >> 23) & 0xFF
    significand = (u & 0x7FFFFF) | np.where(field > 0, 1 << 23, 0)
    return np.where(u >> 31, -1, 1), np.maximum(field, 1) - 127, significand >> (23 - fraction_bits)


def _tensor_core_block(a: F32, b: F32, c: F32) -> F32:
    """Rule 4.2 for finite operands: a [M, 16], b [N, 16], c [M, N]."""
    sign_a, exponent_a, significand_a = _split(a, 7)
    sign_b, exponent_b, significand_b = _split(b, 7)
    sign_c, exponent_c, significand_c = _split(c, 23)
    sign = sign_a[:, None, :] * sign_b[None, :, :]
    significand = significand_a[:, None, :] * significand_b[None, :, :]
    exponent = np.where(significand == 0, -133, exponent_a[:, None, :] + exponent_b[None, :, :])
    exponent_c = np.where(significand_c == 0, -133, exponent_c)
    largest = np.maximum(exponent.max(axis=2), exponent_c)
    shift = np.minimum(largest[:, :, None] - exponent, 62)
    total = (sign * ((significand << 11) >> shift)).sum(axis=2)
    total += sign_c * ((significand_c << 2) >> np.minimum(largest - exponent_c, 62))
    exact = np.ldexp(total.astype(np.float64), (largest - 25).astype(np.int32))
    with np.errstate(over="ignore"):
        near = exact.astype(np.float32)
    cut = np.where(np.abs(near.astype(np.float64)) > np.abs(exact), np.nextafter(near, ZERO), near)
    return np.asarray(np.where(np.abs(exact) >= 2.0**128, near, cut), np.float32)


def chain(precision: str, a: F32, b: F32, initial: F32 | None = None) -> F32:
    """out[m, n] = chain over k of a[m, k] * b[n, k], finished by + 0.0 (4.1 to 4.3). Finite operands."""
    acc = np.zeros((a.shape[0], b.shape[0]), np.float32) if initial is None else initial
    if precision == "fp32":
        for k in range(a.shape[1]):
            acc = fma(a[:, k, None], b[None, :, k], acc)
        return acc + ZERO
    padding = ((0, 0), (0, -a.shape[1] % BLOCK))
    a, b = np.pad(a, padding), np.pad(b, padding)
    for k in range(0, a.shape[1], BLOCK):
        acc = _tensor_core_block(a[:, k : k + BLOCK], b[:, k : k + BLOCK], acc)
    return acc + ZERO


# ---- 5. Sums


def tree(x: F32) -> F32:
    """Tree over the first axis (5.1)."""
    if len(x) == 0:
        return np.zeros(x.shape[1:], np.float32)
    x, s = x.copy(), 1
    while s < len(x):
        for i in range(0, len(x) - s, 2 * s):
            x[i] = x[i] + x[i + s]
        s *= 2
    return np.asarray(x[0])


def fold(lanes: F32) -> F32:
    """((0+1)+(2+3))+((4+5)+(6+7)) over the last axis."""
    t = [lanes[..., i] for i in range(8)]
    return ((t[0] + t[1]) + (t[2] + t[3])) + ((t[4] + t[5]) + (t[6] + t[7]))


def row_sum(a: F32, b: F32 | None = None) -> F32:
    """Sum of a, or of the products a*b (fma terms), over the last axis (5.2)."""
    columns, segments = a.shape[-1], []
    for start in range(0, columns, 64):
        lanes = np.zeros((*a.shape[:-1], 8), np.float32)
        for j in range(start, min(start + 64, columns)):
            lane = lanes[..., j % 8]
            lanes[..., j % 8] = lane + a[..., j] if b is None else fma(a[..., j], b[..., j], lane)
        segments.append(fold(lanes))
    return tree(np.stack(segments))


def token_sum(a: F32, b: F32) -> F32:
    """Sum over rows of a*b for each column (5.3)."""
    blocks = []
    for start in range(0, len(a), 256):
        acc = np.zeros(a.shape[1], np.float32)
        for i in range(start, min(start + 256, len(a))):
            acc = fma(a[i], b[i], acc)
        blocks.append(acc)
    return tree(np.stack(blocks)) if blocks else np.zeros(a.shape[1], np.float32)


# ---- 7, 8. Query/key norm and rotary embedding


def rms_rstd(x: F32, epsilon: float) -> F32:
    inverse = ONE / np.float32(x.shape[-1])
    root: F32 = np.sqrt(fma(row_sum(x, x), inverse, np.float32(epsilon)))
    return ONE / root


def rms_backward(x: F32, weight: F32, rstd: F32, gradient: F32) -> tuple[F32, F32]:
    """x, gradient [rows, C], rstd [rows]: (gradient of x, sum of g*xh over rows)."""
    inverse = ONE / np.float32(x.shape[-1])
    normed = x * rstd[:, None]
    weighted = gradient * weight
    mean = row_sum(weighted, normed) * inverse
    return rstd[:, None] * fma(-normed, mean[:, None], weighted), token_sum(gradient, normed)


def _norm_rows(x: F32, norm: str) -> F32:
    """[tokens, heads, size] as the rows that are normed together."""
    return x.reshape(-1, x.shape[2]) if norm == "head" else x.reshape(len(x), x.shape[1] * x.shape[2])


def qk_forward(
    precision: str, norm: str, x: F32, weight: F32 | None, epsilon: float, cos: F32, sin: F32
) -> tuple[F32, F32 | None]:
    """x [tokens, heads, size]; cos, sin [tokens, size/2] of each token's position: (out, rstd)."""
    n, rstd = x, None
    if weight is not None:
        rows = _norm_rows(x, norm)
        rstd = rms_rstd(rows, epsilon)
        n = ((rows * rstd[:, None]) * weight).reshape(x.shape)
    half = x.shape[2] // 2
    c, s, low, high = cos[:, None], sin[:, None], n[..., :half], n[..., half:]
    out = np.concatenate([fma(low, c, -(high * s)), fma(high, c, low * s)], axis=2)
    return op(precision, out), rstd


def qk_backward(
    precision: str, norm: str, x: F32, weight: F32 | None, rstd: F32 | None, cos: F32, sin: F32, gradient: F32
) -> tuple[F32, F32 | None]:
    """gradient [tokens, heads, size] fp32: (gradient of x, sum for the weight)."""
    half = x.shape[2] // 2
    c, s, low, high = cos[:, None], sin[:, None], gradient[..., :half], gradient[..., half:]
    dn = np.concatenate([fma(low, c, high * s), fma(high, c, -(low * s))], axis=2)
    if weight is None or rstd is None:
        return op(precision, dn), None
    dx, dw = rms_backward(_norm_rows(x, norm), weight, rstd, _norm_rows(dn, norm))
    return op(precision, dx).reshape(x.shape), dw


# ---- 9. Attention


def _probabilities(f: Functions, precision: str, q: F32, k: F32, scale: np.float32, m: F32 | None) -> tuple[F32, F32]:
    """p [queries, keys] of one head and the exact maximum M [queries]."""
    allowed = np.tril(np.ones((len(q), len(k)), bool))
    dots = chain(precision, q, k)
    if m is None:
        m = np.where(allowed, dots, -np.inf).max(axis=1).astype(np.float32)
    c = scale * LOG2E
    t = fma(dots, c, -(m * c)[:, None])
    small = t < np.float32(-126)
    return np.where(allowed & ~small, f.exp2(np.where(small | ~allowed, ZERO, t)), ZERO), m


def attention_forward(f: Functions, precision: str, q: F32, k: F32, v: F32, scale: np.float32) -> tuple[F32, F32, F32]:
    """q [B, L, heads, size]; k, v [B, L, kv_heads, size]: (out like q, M and r [B, L, heads])."""
    sequences, length, heads, _ = q.shape
    shared = heads // k.shape[2]
    out, row_max, row_recip = np.empty_like(q), *np.empty((2, sequences, length, heads), np.float32)
    for s in range(sequences):
        for h in range(heads):
            p, m = _probabilities(f, precision, q[s, :, h], k[s, :, h // shared], scale, None)
            lanes = np.zeros((length, 8), np.float32)
            for j in range(length):
                lanes[:, j % 8] += p[:, j]
            r = ONE / fold(lanes)
            out[s, :, h] = op(precision, chain(precision, op(precision, p), v[s, :, h // shared].T) * r[:, None])
            row_max[s, :, h], row_recip[s, :, h] = m, r
    return out, row_max, row_recip


def attention_backward(
    f: Functions,
    precision: str,
    q: F32,
    k: F32,
    v: F32,
    out: F32,
    gradient: F32,
    row_max: F32,
    row_recip: F32,
    scale: np.float32,
) -> tuple[F32, F32, F32]:
    """gradient: of out, operand dtype: gradients of q and k in fp32, of v in operand dtype."""
    sequences, length, heads, _ = q.shape
    kv_heads = k.shape[2]
    shared = heads // kv_heads
    allowed = np.tril(np.ones((length, length), bool))
    grad_q, grad_k, grad_v = np.empty_like(q), np.empty_like(k), np.empty_like(v)
    pad = ((0, -length % BLOCK), (0, 0))
    for s in range(sequences):
        for g in range(kv_heads):
            kg, vg = k[s, :, g], v[s, :, g]
            parts: list[tuple[F32, ...]] = []  # dS, P, q and dO of each head, padded to 16-blocks
            for h in range(g * shared, (g + 1) * shared):
                qh, dout, r = q[s, :, h], gradient[s, :, h], row_recip[s, :, h]
                p = _probabilities(f, precision, qh, kg, scale, row_max[s, :, h])[0] * r[:, None]
                delta = row_sum(dout, out[s, :, h])
                ds = op(precision, p * (chain(precision, dout, vg) - delta[:, None]))
                ds = np.where(allowed, ds, ZERO)
                grad_q[s, :, h] = scale * chain(precision, ds, kg.T)
                parts.append(tuple(np.pad(x, pad) for x in (ds, op(precision, p), qh, dout)))
            ds_all, p_all, q_all, do_all = (np.concatenate(x) for x in zip(*parts, strict=True))
            grad_k[s, :, g] = scale * chain(precision, ds_all.T, q_all.T)
            grad_v[s, :, g] = op(precision, chain(precision, p_all.T, do_all.T))
    return grad_q, grad_k, grad_v


# ---- 10. Router


def router_forward(f: Functions, logits: F32, top_k: int, renormalise: bool) -> tuple[F32, F32, I32, F32]:
    """logits [tokens, experts]: (probabilities, log-sum-exp, expert index, expert weight)."""
    m = logits.max(axis=1)
    e = f.exp(logits - m[:, None])
    total = row_sum(e)
    p = e * (ONE / total)[:, None]
    index = np.argsort(-logits, axis=1, kind="stable")[:, :top_k].astype(np.int32)
    weight = np.take_along_axis(p, index, axis=1)
    if renormalise:
        weight = weight / chosen_sum(weight)[:, None]
    return p, m + f.log(total), index, weight


def chosen_sum(chosen: F32) -> F32:
    total = chosen[:, 0].copy()
    for k in range(1, chosen.shape[1]):
        total = total + chosen[:, k]
    return total


@dataclass(frozen=True)
class Plan:
    """The rows of the experts (10.3)."""

    row_token: I32
    row_slot: I32
    slot_row: I32
    expert_offsets: I32
    counts: I32


def routing_plan(index: I32, mask: NDArray[np.uint8], experts: int, group_tokens: int, capacity: int) -> Plan:
    tokens, top_k = index.shape
    groups = -(-tokens // group_tokens)
    slot_row = np.full((tokens, top_k), -1, np.int32)
    counts = np.zeros((groups, experts), np.int32)
    offsets, row_token, row_slot = [0], list[int](), list[int]()
    for e in range(experts):
        for g in range(groups):
            for t in range(g * group_tokens, min((g + 1) * group_tokens, tokens)):
                for k in range(top_k):
                    if mask[t] and index[t, k] == e:
                        slot_row[t, k] = len(row_token)
                        row_token.append(t)
                        row_slot.append(t * top_k + k)
                        counts[g, e] += 1
            padding = -len(row_token) % BLOCK
            row_token += [-1] * padding
            row_slot += [-1] * padding
        offsets.append(len(row_token))
    rest = [-1] * (capacity - len(row_token))
    return Plan(
        np.array(row_token + rest, np.int32),
        np.array(row_slot + rest, np.int32),
        slot_row,
        np.array(offsets, np.int32),
        counts,
    )


def router_backward(
    precision: str,
    renormalise: bool,
    p: F32,
    lse: F32,
    index: I32,
    weight: F32,
    grad_weight: F32,
    mask: NDArray[np.uint8],
    counts: I32,
    group_tokens: int,
    aux_scale: F32 | None,
    z_scale: np.float32,
) -> F32:
    """Gradient of the logits in operand dtype (10.5)."""
    tokens, top_k = index.shape
    dp = np.zeros_like(p)
    dw = grad_weight
    if renormalise:
        q = np.zeros(tokens, np.float32)
        for k in range(top_k):
            q = fma(grad_weight[:, k], weight[:, k], q)
        dw = (grad_weight - q[:, None]) / chosen_sum(np.take_along_axis(p, index, axis=1))[:, None]
    np.put_along_axis(dp, index, dw, axis=1)
    group = np.arange(tokens) // group_tokens
    if aux_scale is not None:
        dp = fma(aux_scale[group][:, None], counts[group].astype(np.float32), dp)
    dl = p * (dp - row_sum(dp, p)[:, None])
    if z_scale != 0:
        dl = fma((z_scale * lse)[:, None], p, dl)
    return op(precision, np.where(mask[:, None] != 0, dl, ZERO))


def router_sums(p: F32, lse: F32, mask: NDArray[np.uint8], group_tokens: int) -> tuple[I64, int]:
    """Fixed-point sums of p [groups, experts] and of lse*lse (10.6)."""
    groups = -(-len(p) // group_tokens)
    terms = np.rint(p.astype(np.float64) * 2.0**32).astype(np.int64)
    sums = np.zeros((groups, p.shape[1]), np.int64)
    for t in np.flatnonzero(mask):
        sums[t // group_tokens] += terms[t]
    squares = np.rint((lse * lse).astype(np.float64) * 2.0**32).astype(np.int64)
    return sums, int(squares[mask != 0].sum())


# ---- 11. Experts


def swiglu_forward(f: Functions, precision: str, gate_up: F32) -> F32:
    gate, up = np.split(gate_up, 2, axis=1)
    return op(precision, f.silu(gate) * up)


def swiglu_backward(
    f: Functions, precision: str, gate_up: F32, grad_act: F32, row_slot: I32 | None, slot_weight: F32 | None, slots: int
) -> tuple[F32, F32, F32]:
    """(gradient of gate|up, w*a in operand dtype, gradient of the slot weights)."""
    gate, up = np.split(gate_up, 2, axis=1)
    act = swiglu_forward(f, precision, gate_up)
    rows = np.arange(len(gate_up)) if row_slot is None else np.flatnonzero(row_slot >= 0)
    w = np.zeros((len(gate_up), 1), np.float32)
    w[rows] = ONE if row_slot is None or slot_weight is None else slot_weight[row_slot[rows], None]
    grad_slot = np.zeros(slots, np.float32)
    if row_slot is not None:
        grad_slot[row_slot[rows]] = row_sum(grad_act, act)[rows]
    weighted = w * grad_act
    both = np.concatenate([(weighted * up) * f.silu_grad(gate), weighted * f.silu(gate)], axis=1)
    real = np.isin(np.arange(len(gate_up)), rows)[:, None]
    return op(precision, np.where(real, both, ZERO)), op(precision, np.where(real, w * act, ZERO)), grad_slot


def combine(rows: F32, slot_row: I32, weight: F32 | None, addend: F32 | None) -> F32:
    """rows [*, hidden], slot_row [tokens, top_k]."""
    out = np.zeros((len(slot_row), rows.shape[1]), np.float32)
    for k in range(slot_row.shape[1]):
        used = slot_row[:, k] >= 0
        y = rows[slot_row[used, k]]
        out[used] = out[used] + y if weight is None else fma(weight[used, k, None], y, out[used])
    return out if addend is None else addend + out

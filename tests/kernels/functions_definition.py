"""Section 3, section 14 and appendix A of docs/arithmetic.md, written a second time in Python, as plainly as the page itself.

fp32 functions work on numpy arrays and every step is an fp32 array operation or an exact fused multiply-add; binary64 functions
work on Python floats, with a fused multiply-add in exact integers. The kernels are compared with this by bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import mpmath  # type: ignore[import-untyped]
import numpy as np

from tests.kernels.moe_definition import F32, ONE, fma

NAN = np.array(0x7FFFFFFF, np.uint32).view(np.float32)[()]
INFINITY = np.float32(np.inf)
ROUNDER = np.float32(1.5 * 2**23)
MASK32, MASK64 = 2**32 - 1, 2**64 - 1


def number(text: str) -> np.float32:
    """An fp32 constant of the page; hexadecimal, exact."""
    value = float.fromhex(text)
    assert float(np.float32(value)) == value
    return np.float32(value)


def canonical(x: F32) -> F32:
    return np.asarray(np.where(np.isnan(x), NAN, x), np.float32)


# ---- A.1 fp32

EXP_POLYNOMIAL = [number(c) for c in ("0x1.6ac744p-10", "0x1.123de0p-7", "0x1.555858p-5", "0x1.55548cp-3", "0x1.fffffcp-2")]
EXP2_POLYNOMIAL = [
    number(c)
    for c in ("0x1.406dbap-13", "0x1.5eda3ap-10", "0x1.3b2d98p-7", "0x1.c6afdcp-5", "0x1.ebfbe0p-3", "0x1.62e430p-1", "0x1p+0")
]
LOG_POLYNOMIAL = [
    number(c)
    for c in (
        *("0x1.1c9a36p-4", "-0x1.e49bb0p-4", "0x1.e67408p-4", "-0x1.fadd0cp-4", "0x1.2327c8p-3"),
        *("-0x1.55664cp-3", "0x1.99a626p-3", "-0x1.ffffe0p-3", "0x1.555544p-2", "-0x1p-1"),
    )
]


def horner(r: F32, coefficients: Sequence[np.float32]) -> F32:
    """The polynomial, highest degree first, by q = fma(r, q, next)."""
    q: F32 = np.full(r.shape, coefficients[0], np.float32)
    for coefficient in coefficients[1:]:
        q = fma(r, q, coefficient)
    return q


def power_of_two(n: F32) -> F32:
    return np.exp2(n.astype(np.float64)).astype(np.float32)


def scale(p: F32, n: F32) -> F32:
    half = np.floor(n / np.float32(2))
    return (p * power_of_two(half)) * power_of_two(n - half)


def clamp(x: F32, low: float, high: float) -> F32:
    upper = np.where(x < np.float32(high), x, np.float32(high))
    return np.where(upper > np.float32(low), upper, np.float32(low)).astype(np.float32)


def exp(x: F32) -> F32:
    y = clamp(x, -104, 89)
    n = fma(y, number("0x1.715476p+0"), ROUNDER) - ROUNDER
    r = fma(n, number("0x1.05c610p-29"), fma(n, number("-0x1.62e430p-1"), y))
    q = horner(r, EXP_POLYNOMIAL)
    high = ONE + r
    low = r - (high - ONE)
    return np.where(np.isnan(x), NAN, scale(high + fma(r * r, q, low), n))


def exp2(x: F32) -> F32:
    y = clamp(x, -151, 129)
    n = (y + ROUNDER) - ROUNDER
    return np.where(np.isnan(x), NAN, scale(horner(y - n, EXP2_POLYNOMIAL), n))


def log(x: F32) -> F32:
    subnormal = x < number("0x1p-126")
    y = np.where(subnormal, x * number("0x1p+23"), x).astype(np.float32)
    bits = y.view(np.uint32).astype(np.int64)
    k = (bits - 0x3F3504F3) >> 23
    m = ((bits - (k << 23)) & MASK32).astype(np.uint32).view(np.float32)
    n = np.where(subnormal, k - 23, k).astype(np.float32)
    f = m - ONE
    tail = fma(n, number("0x1.0bfbe8p-15"), (f * f) * horner(f, LOG_POLYNOMIAL))
    whole = n * number("0x1.62e000p-1")
    high = whole + f
    low = f - (high - whole)
    positive = np.where(x == INFINITY, INFINITY, high + (low + tail))
    return np.where(x > 0, positive, np.where(x == 0, -INFINITY, NAN)).astype(np.float32)


def sigmoid(x: F32) -> F32:
    e = exp(-np.abs(x))
    return canonical(np.where(x < 0, e, ONE) / (ONE + e))


def silu(x: F32) -> F32:
    return canonical(x * sigmoid(x))


def silu_grad(x: F32) -> F32:
    s = sigmoid(x)
    return canonical(s * fma(x, ONE - s, ONE))


def sqrt(x: F32) -> F32:
    return canonical(np.asarray(np.sqrt(x), np.float32))


def rsqrt(x: F32) -> F32:
    return canonical(np.asarray(ONE / np.sqrt(x), np.float32))


def recip(x: F32) -> F32:
    return canonical(ONE / x)


def _circle(x: float, quarters: int) -> float:
    """sin(|x| + quarters * pi/2), rounded to fp32 by the caller; x an fp32 value."""
    quarter, r = 0, abs(x)
    if r >= 0.75:
        fraction, exponent = math.frexp(r)
        m, e = int(fraction * 2**24), exponent - 24
        with mpmath.workprec(400):
            window = int(mpmath.floor(mpmath.ldexp(2 / mpmath.pi, e + 94))) % 2**96
        turns = ((m * window) % 2**96) >> 32
        quarter = ((turns + 2**61) >> 62) & 3
        rest = (turns - (quarter << 62)) & MASK64
        r = float(rest - 2**64 if rest >= 2**63 else rest) * float.fromhex("0x1.921fb54442d18p-62")
    return _sin_of_quarter(r, quarter + quarters)


def sin(x: F32) -> F32:
    with np.errstate(all="ignore"):
        values = [_circle(v, 2 if v < 0 else 0) if math.isfinite(v) else math.nan for v in map(float, x.reshape(-1))]
        return np.where(x == 0, x, canonical(np.array(values, np.float64).astype(np.float32)).reshape(x.shape))


def cos(x: F32) -> F32:
    values = [_circle(v, 1) if math.isfinite(v) else math.nan for v in map(float, x.reshape(-1))]
    return canonical(np.array(values, np.float64).astype(np.float32)).reshape(x.shape)


FUNCTIONS: dict[str, Callable[[F32], F32]] = {
    "exp": exp,
    "exp2": exp2,
    "log": log,
    "sigmoid": sigmoid,
    "silu": silu,
    "silu_grad": silu_grad,
    "rsqrt": rsqrt,
    "sqrt": sqrt,
    "recip": recip,
    "sin": sin,
    "cos": cos,
}


def function(name: str, x: F32) -> F32:
    with np.errstate(all="ignore"):
        return np.asarray(FUNCTIONS[name](x), np.float32)


# ---- A.2 binary64


def fma64(a: float, b: float, c: float) -> float:
    """a * b + c, rounded once: exact in integers, then one correct rounding by float(). Finite, no subnormal result."""
    parts = [math.frexp(v) for v in (a, b, c)]
    ma, mb, mc = (int(fraction * 2**53) for fraction, _ in parts)
    ep, ec = parts[0][1] + parts[1][1] - 106, parts[2][1] - 53
    low = min(ep, ec)
    total = (ma * mb << (ep - low)) + (mc << (ec - low))
    if total == 0:
        return a * b + c  # a zero with its sign
    return math.ldexp(float(total), low)


def horner64(r: float, coefficients: Sequence[float]) -> float:
    q = coefficients[0]
    for coefficient in coefficients[1:]:
        q = fma64(r, q, coefficient)
    return q


ROUNDER64 = 1.5 * 2.0**52
FACTORIALS = [1.0 / math.factorial(k) for k in range(18)]
LN2_64, LN2_64_LOW = float.fromhex("0x1.62e42fefa39efp-1"), float.fromhex("0x1.abc9e3b39803fp-56")
LN2_32_HIGH, LN2_32_LOW = float.fromhex("0x1.62e42fefa3800p-1"), float.fromhex("0x1.ef35793c76730p-45")
HALF_PI, HALF_PI_LOW = float.fromhex("0x1.921fb54442d18p+0"), float.fromhex("0x1.1a62633145c07p-54")
TWO_PI, TWO_OVER_PI = float.fromhex("0x1.921fb54442d18p+2"), float.fromhex("0x1.45f306dc9c883p-1")


def exp64(x: float) -> float:
    y = max(min(x, 710.0), -746.0)
    n = fma64(y, float.fromhex("0x1.71547652b82fep+0"), ROUNDER64) - ROUNDER64
    r = fma64(n, -LN2_64_LOW, fma64(n, -LN2_64, y))
    q = horner64(r, FACTORIALS[13:1:-1])
    p = 1.0 + fma64(r * r, q, r)
    half = int(n) // 2
    return (p * 2.0**half) * 2.0 ** (int(n) - half)


def log64(x: float) -> float:
    """x > 0, finite, normal."""
    fraction, exponent = math.frexp(x)
    m, n = 2 * fraction, exponent - 1
    if m >= math.sqrt(2.0):
        m, n = m / 2, n + 1
    f = m - 1.0
    s = f / (m + 1.0)
    z = s * s
    q = horner64(z, [2.0 / k for k in range(25, 1, -2)])
    square = 0.5 * (f * f)
    low = fma64(s, fma64(z, q, square), n * LN2_32_LOW)
    return n * LN2_32_HIGH + (f - (square - low))


def pow64(x: float, y: float) -> float:
    return exp64(y * log64(x))


def _sin_of_quarter(r: float, quarter: int) -> float:
    z = r * r
    if quarter & 1:
        value = fma64(z, horner64(z, [(-1) ** (k // 2) * FACTORIALS[k] for k in range(16, 0, -2)]), 1.0)
    else:
        value = fma64(r * z, horner64(z, [(-1) ** (k // 2) * FACTORIALS[k] for k in range(17, 1, -2)]), r)
    return -value if quarter & 2 else value


def _circle64(x: float, quarters: int) -> float:
    n = fma64(abs(x), TWO_OVER_PI, ROUNDER64) - ROUNDER64
    r = fma64(n, -HALF_PI_LOW, fma64(n, -HALF_PI, abs(x)))
    return _sin_of_quarter(r, int(n) + quarters)


def sin64(x: float) -> float:
    return x if x == 0 else _circle64(x, 2 if x < 0 else 0)


def cos64(x: float) -> float:
    return _circle64(x, 1)


# ---- 14, A.3 Random streams


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & MASK32, (a >> 32) ^ c3 ^ k1, a & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return c0, c1, c2, c3


def block(seed: int, stream: int, index: int) -> tuple[int, int, int, int]:
    return philox((seed & MASK32, seed >> 32), (index & MASK32, index >> 32, stream & MASK32, stream >> 32))


def normal(seed: int, stream: int, i: int) -> float:
    w0, w1, w2, w3 = block(seed, stream, i // 2)
    u1 = (((w0 | w1 << 32) >> 11) + 1) * 2.0**-53
    u2 = ((w2 | w3 << 32) >> 11) * 2.0**-53
    radius = math.sqrt(-2.0 * log64(u1))
    angle = TWO_PI * u2
    return radius * (sin64(angle) if i % 2 else cos64(angle))


def permute(seed: int, stream: int, n: int, i: int) -> int:
    half = 1
    while 4**half < n:
        half += 1
    while True:
        left, right = i >> half, i % 2**half
        for r in range(8):
            left, right = right, left ^ (block(seed, stream, right + (r << 32))[0] % 2**half)
        i = (left << half) + right
        if i < n:
            return i


# ---- 8. The rotary table


def rope_table(positions: Sequence[int], head_size: int, base: float) -> F32:
    """Rows for the positions: cosines of head_size/2 frequencies, then sines."""
    frequencies = [exp64((-2 * i / head_size) * log64(base)) for i in range(head_size // 2)]
    rows = [[turn(p * f) for turn in (cos64, sin64) for f in frequencies] for p in positions]
    return np.array(rows, np.float64).astype(np.float32)

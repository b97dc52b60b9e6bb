"""The arithmetic of the norm. Every function works on values in the compute type (fp32, or fp64 for fp64 x)."""

import triton
import triton.language as tl

# Numbers a thread adds one after another. A chain of n equal numbers is off by up to n/4 ulp of fp32 (over 200,000
# constants: 2.5 for n = 8, 8.5 for 32), so longer chains are cut: rows of one value are what people try first.
CHAIN = tl.constexpr(4)


@triton.jit
def row_sum(x):
    """The sum over the last axis, [ROWS]."""
    if x.shape[0] == 1:
        # A row of its own spreads over all threads, many elements each: chains are cut. The sum is a scalar, so that no
        # layout of it spreads to the tile.
        return tl.full([1], tl.sum(_chains(x), axis=0), x.dtype)
    else:
        return tl.sum(x, axis=1)


@triton.jit
def row_magnitude(x):
    """max|x| over the last axis, [ROWS]."""
    x = tl.abs(x)
    if x.shape[0] == 1:
        # A scalar, as in row_sum. Triton 3.6 for AMD cannot convert the layout of a tensor of one element between blocks.
        return tl.full([1], tl.max(tl.reshape(x, (x.shape[1],)), axis=0), x.dtype)
    else:
        return tl.max(x, axis=1)


@triton.jit
def row_sums(x, y):
    """``row_sum`` of both. Those of a single row go through shared memory together: half the barriers."""
    if x.shape[0] == 1:
        x_sum, y_sum = tl.split(tl.sum(tl.join(_chains(x), _chains(y)), axis=0))
        return tl.full([1], x_sum, x.dtype), tl.full([1], y_sum, x.dtype)
    else:
        return tl.sum(x, axis=1), tl.sum(y, axis=1)


@triton.jit
def _chains(x):
    """Sums of CHAIN neighbours in a single row."""
    return tl.sum(tl.reshape(x, (x.shape[1] // min(CHAIN, x.shape[1]), min(CHAIN, x.shape[1]))), axis=1)


@triton.jit
def fold(head, tail):
    """``head`` summed onto ``tail``, [ROWS, TAIL], so that one reduction across threads serves both blocks of a row."""
    return tl.sum(tl.reshape(head, (head.shape[0], head.shape[1] // tail.shape[1], tail.shape[1])), axis=1) + tail


@triton.jit
def compensated_add(total, lost, value):
    """total + value and what its rounding lost, to be fed back: a sum of any length is as good as its last addition."""
    value -= lost
    new = total + value
    # Once the sum has overflowed, infinity less infinity must not turn it into NaN.
    return new, tl.where(tl.abs(new) == float("inf"), 0.0, (new - total) - value)


@triton.jit
def mean_of(total, HIDDEN: tl.constexpr):
    """total / hidden."""
    return total * tl.full([1], 1.0 / HIDDEN, total.dtype)


@triton.jit
def mean_square(total, eps, HIDDEN: tl.constexpr):
    """Σx² / hidden + eps."""
    return tl.fma(total, tl.full([1], 1.0 / HIDDEN, total.dtype), eps)


@triton.jit
def rsqrt(value):
    """1 / sqrt(value) to about 1 ulp. fp32: the hardware's approximation (2 ulp) and one Newton step."""
    estimate = tl.math.rsqrt(value)
    if value.dtype == tl.float32:
        residual = tl.fma(-(value * 0.5 * estimate), estimate, 0.5)
        # At 0 and infinity the estimate is exact, and the step would make a NaN of it.
        exact = (value == 0) | (value == float("inf"))
        estimate = tl.where(exact, estimate, tl.fma(estimate, residual, estimate))
    return estimate


@triton.jit
def normalise(x, rstd, weight, Y_TYPE: tl.constexpr, ROUND_BEFORE_WEIGHT: tl.constexpr):
    """x · rstd · weight, unrounded; ROUND_BEFORE_WEIGHT rounds x · rstd to y's dtype first."""
    y = x * rstd[:, None]
    if ROUND_BEFORE_WEIGHT:
        y = y.to(Y_TYPE).to(x.dtype)
    return y * weight


@triton.jit
def needs_rescue(mean, BITS: tl.constexpr):
    """Whether mean(x²) + eps lies outside 2^±BITS (fp64: 2^±8·BITS), so that squares may have over- or underflowed.

    Not where it is NaN, which is right already. Infinity is an overflow until the row itself proves infinite.
    """
    if mean.dtype == tl.float64:
        return (mean > 2.0 ** (8 * BITS)) | (mean < 2.0 ** (-8 * BITS))
    else:
        return (mean > 2.0**BITS) | (mean < 2.0**-BITS)


@triton.jit
def power_of_two_scale(magnitude, eps):
    """A power of two s that brings max(|x|, sqrt(eps)) near 1: the squares of s·x and s²·eps are normal numbers, or too
    small to count."""
    magnitude = tl.maximum(magnitude, tl.sqrt(eps))
    if eps.dtype == tl.float64:
        exponent = tl.minimum(tl.maximum(magnitude, 2.0**-900), 2.0**1022).to(tl.int64, bitcast=True) >> 52
        return ((2046 - exponent) << 52).to(tl.float64, bitcast=True)
    else:
        exponent = tl.minimum(tl.maximum(magnitude, 2.0**-100), 2.0**126).to(tl.int32, bitcast=True) >> 23
        return ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def rescued_rstd(scaled_mean, scale):
    """(rstd', p) with rstd' · p = scale · rsqrt(scaled_mean): x · p · rstd' then loses nothing.

    Small rows are scaled up whole, which is exact. Large ones only by 1/16, which keeps rstd' a normal number, for scaling them
    down whole would push their small elements below the smallest normal number before the weight is applied.
    """
    prescale = tl.maximum(scale, 0.0625)
    return rsqrt(scaled_mean) * tl.where(scale < 0.0625, scale * 16.0, 1.0), prescale

"""Codes of a byte in place of y: scales from what a row or a group holds, a true division, one rounding, saturated.

docs/quantisation.md states the rules. A scale is [ROWS, GROUPS] in fp32 beside a tile of [ROWS, BLOCK]; where a group is a whole
row, GROUPS is 1. Codes are int8 whatever the format: the caller sees the same bytes as another dtype.
"""

import triton
import triton.language as tl

from rmsnorm_ops.kernels.tile import store  # by name: forward.py says why

INFINITY_BITS = tl.constexpr(0x7F800000)
MANTISSA_BITS = tl.constexpr(0x007FFFFF)
ROUNDS_TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 · 2²³: a sum with it has a spacing of 1


@triton.jit
def store_normalised(
    row, y, scale, rows, n_rows, mask, start, scale_ptr, max_scale, HIDDEN: tl.constexpr, GROUP: tl.constexpr,
    QMAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, COLUMN_MAJOR: tl.constexpr, FORMAT: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Store the columns of y from ``start`` on: rounded where scale_ptr is None, else as codes.

    ``scale`` is the row's, where it is known already; else it is found, and stored, here: GROUP is 0 where scale_ptr holds the
    one scale of all, HIDDEN for one a row, else the elements of a group, a power of two.
    """
    columns = start + tl.arange(0, y.shape[1])
    if scale_ptr is None:
        store(row, y, mask, columns, HIDDEN)
    else:
        if GROUP == 0:
            scale = tl.load(scale_ptr) + tl.zeros([1, 1], tl.float32)
        elif GROUP == HIDDEN:
            if scale is None:
                scale = scale_of(tl.max(magnitude_bits(y), axis=1)[:, None], max_scale, QMAX, POWER_OF_TWO)
                store_scale(scale_ptr, scale, rows, n_rows, mask, 0, HIDDEN, GROUP, COLUMN_MAJOR)
        if GROUP == 0 or GROUP == HIDDEN:
            code = codes(y, scale, QMAX, POWER_OF_TWO, FORMAT, CAST)
        else:
            grouped = tl.reshape(y, (y.shape[0], y.shape[1] // GROUP, GROUP))
            scale = scale_of(tl.max(magnitude_bits(grouped), axis=2), max_scale, QMAX, POWER_OF_TWO)
            store_scale(scale_ptr, scale, rows, n_rows, mask, start // GROUP, HIDDEN, GROUP, COLUMN_MAJOR)
            code = tl.reshape(codes(grouped, scale[:, :, None], QMAX, POWER_OF_TWO, FORMAT, CAST), (y.shape[0], y.shape[1]))
        inside = mask[:, None] & (columns < HIDDEN)[None, :]
        tl.store(row[:, None] + columns[None, :], code, mask=inside)


@triton.jit
def magnitude_bits(y):
    """|y| as integers, which order as the numbers do, NaN above infinity: no maximum loses one."""
    return tl.abs(y).to(tl.int32, bitcast=True)


@triton.jit
def scale_of(amax_bits, max_scale, QMAX: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """max(amax / QMAX, 2⁻¹²⁶), at most max_scale, rounded up to a power of two where asked; NaN where amax is not finite."""
    finite = amax_bits < INFINITY_BITS
    amax = tl.where(finite, amax_bits, 0).to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.div_rn(amax, tl.full(amax.shape, QMAX, tl.float32)), 2.0**-126)
    if max_scale is not None:
        scale = tl.minimum(scale, tl.full([1], max_scale, tl.float32))
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + MANTISSA_BITS) & INFINITY_BITS).to(tl.float32, bitcast=True)
    return tl.where(finite, scale, float("nan"))


@triton.jit
def store_scale(
    ptr, scale, rows, n_rows, mask, first_group, HIDDEN: tl.constexpr, GROUP: tl.constexpr, COLUMN_MAJOR: tl.constexpr
):
    """Store scale [ROWS, GROUPS] of the groups from ``first_group`` on; to bytes, which hold powers of two, the exponents."""
    GROUPS: tl.constexpr = (HIDDEN + GROUP - 1) // GROUP
    group = first_group + tl.arange(0, scale.shape[1])
    if COLUMN_MAJOR:
        offset = group.to(tl.int64)[None, :] * n_rows + rows[:, None]
    else:
        offset = rows[:, None] * GROUPS + group[None, :]
    if ptr.dtype.element_ty == tl.int8:
        scale = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.int8)
    tl.store(ptr + offset, scale, mask=mask[:, None] & (group < GROUPS)[None, :])


@triton.jit
def codes(y, scale, QMAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, FORMAT: tl.constexpr, CAST: tl.constexpr):
    """round(y / scale) to the nearest code, ties to even, never beyond ±QMAX; NaN where y or scale is NaN (in int8, 0)."""
    one = tl.full(scale.shape, 1.0, tl.float32)
    if POWER_OF_TWO:
        value = _clamped(y * tl.div_rn(one, scale), tl.full(scale.shape, QMAX, tl.float32))
    else:
        value = _quotient(y, scale, one, QMAX)
    if FORMAT == "int8":
        value = tl.where(value == value, (value + ROUNDS_TO_INTEGER) - ROUNDS_TO_INTEGER, 0.0)
        code = value.to(tl.int8)
    elif FORMAT == "e4m3fn":
        code = value.to(tl.float8e4nv).to(tl.int8, bitcast=True) if CAST else encode(value, 3, 7, False)
    elif FORMAT == "e5m2":
        code = value.to(tl.float8e5).to(tl.int8, bitcast=True) if CAST else encode(value, 2, 15, False)
    elif FORMAT == "e4m3fnuz":
        code = encode(value, 3, 8, True)
    else:
        tl.static_assert(FORMAT == "e5m2fnuz")
        code = encode(value, 2, 16, True)
    return code


@triton.jit
def _clamped(value, bound):
    value = tl.maximum(value, -bound, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(value, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _quotient(y, scale, one, QMAX: tl.constexpr):
    """y / scale, correctly rounded where it has a code other than 0 and ±QMAX, and not beyond QMAX by more than its rounding.

    Five operations an element, where a division takes twice as many: with the correctly rounded reciprocal of the divisor, a
    quotient within one ulp and its exact remainder give the rounded quotient (Markstein 1990). Both are first multiplied by the
    power of two that brings the divisor to 1 … 2, so that no remainder underflows.
    """
    exponent = (scale.to(tl.int32, bitcast=True) >> 23) & 255
    shift = (tl.maximum(254 - exponent, 1) << 23).to(tl.float32, bitcast=True)
    divisor = scale * shift
    # Negated, and y too: of the two ways to write a remainder, the one that keeps the sign of a zero.
    reciprocal = tl.div_rn(one * -1.0, divisor)
    # What saturates does so before the division: a quotient that overflows would leave no remainder.
    y = _clamped(y * (shift * -1.0), divisor * QMAX)
    quotient = y * reciprocal
    quotient = tl.fma(tl.fma(quotient, divisor, y), reciprocal, quotient)
    return tl.fma(tl.fma(quotient, divisor, y), reciprocal, quotient)


@triton.jit
def encode(value, MANTISSA: tl.constexpr, BIAS: tl.constexpr, FNUZ: tl.constexpr):
    """The nearest code of an 8-bit float, ties to even, for values that round to no more than its largest.

    In integers, for Triton's own conversions exist for some formats on some targets, and not all of them round once.
    """
    DROPPED: tl.constexpr = 23 - MANTISSA
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)) >> DROPPED
    normal = rounded - ((127 - BIAS) << MANTISSA)
    # Subnormal: a sum with this number has their spacing, and its last bits are the code.
    GRID: tl.constexpr = 2.0 ** (1 - BIAS + DROPPED)
    subnormal = (tl.abs(value) + GRID).to(tl.int32, bitcast=True) - ((1 - BIAS + DROPPED + 127) << 23)
    code = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)
    sign = (bits >> 24) & 0x80
    if FNUZ:  # the code of -0 is NaN's
        sign = tl.where(code == 0, 0, sign)
    return tl.where(value == value, code | sign, 0x80 if FNUZ else 0x7F).to(tl.int8)

"""Addressing: where the elements of a tile lie. All offsets are 64-bit; no kernel computes an address of its own.

A tile is [ROWS, BLOCK]: ``rows`` are row numbers, ``mask`` says which of them exist, ``columns`` are [BLOCK] positions in
the row, ``…_row`` are pointers to the rows' first elements. An absent tensor is None, and so are its row pointers.
"""

import triton
import triton.language as tl


@triton.jit
def rows_of_program(ROWS: tl.constexpr):
    """The row numbers of this program, [ROWS], in 64 bits: rows · hidden may exceed 2³¹."""
    return tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)


@triton.jit
def strided_rows(ptr, rows, inner_rows, outer_stride, inner_stride, ALIGN: tl.constexpr, FOLDED: tl.constexpr):
    """Pointers to rows that lie at one stride or, FOLDED, at two (row = outer · inner_rows + inner).

    Strides come in units of ALIGN elements, so that the compiler sees what they are divisible by.
    """
    if FOLDED:
        outer = rows // inner_rows
        return ptr + (outer * outer_stride + (rows - outer * inner_rows) * inner_stride) * ALIGN
    else:
        return ptr + rows * inner_stride * ALIGN


@triton.jit
def load(row, mask, columns, HIDDEN: tl.constexpr, COMPUTE: tl.constexpr):
    """The elements in the compute type; 0 beyond the last row or column. Widened at once: no arithmetic is ever narrower."""
    return load_narrow(row, mask, columns, HIDDEN).to(COMPUTE)


@triton.jit
def load_narrow(row, mask, columns, HIDDEN: tl.constexpr):
    """The elements as the tensor has them, to be widened before any arithmetic."""
    inside = mask[:, None] & (columns < HIDDEN)[None, :]
    return tl.load(row[:, None] + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store(row, value, mask, columns, HIDDEN: tl.constexpr):
    """Round ``value`` to the tensor's dtype, once, and store what lies within the rows."""
    inside = mask[:, None] & (columns < HIDDEN)[None, :]
    tl.store(row[:, None] + columns[None, :], value.to(row.dtype.element_ty), mask=inside)


@triton.jit
def store_gradient(dx_row, dresidual_row, dsum_row, dx, mask, columns, HIDDEN: tl.constexpr):
    """Add what arrived at the sum, if anything, and store: to dx, and where residual has another dtype to dresidual too."""
    if dsum_row is not None:
        dx += load(dsum_row, mask, columns, HIDDEN, dx.dtype)
    store(dx_row, dx, mask, columns, HIDDEN)
    if dresidual_row is not None:
        store(dresidual_row, dx, mask, columns, HIDDEN)


@triton.jit
def load_sum(x_row, residual_row, sum_row, mask, columns, HIDDEN: tl.constexpr, COMPUTE: tl.constexpr):
    """x, or with a residual x + residual as it is stored: rounded to residual's dtype. Stored where sum_row is given."""
    return load_stored(x_row, residual_row, sum_row, mask, columns, HIDDEN, COMPUTE).to(COMPUTE)


@triton.jit
def load_stored(x_row, residual_row, sum_row, mask, columns, HIDDEN: tl.constexpr, COMPUTE: tl.constexpr):
    """As ``load_sum``, in the dtype of the tensor it comes from: to keep, and to widen before any arithmetic."""
    if residual_row is None:
        x = load_narrow(x_row, mask, columns, HIDDEN)
    else:
        x = load(x_row, mask, columns, HIDDEN, COMPUTE) + load(residual_row, mask, columns, HIDDEN, COMPUTE)
        x = x.to(residual_row.dtype.element_ty)
        if sum_row is not None:
            store(sum_row, x, mask, columns, HIDDEN)
    return x


@triton.jit
def load_weight(
    ptr, columns, HIDDEN: tl.constexpr, COMPUTE: tl.constexpr, WEIGHT_OFFSET: tl.constexpr, REPEATED: tl.constexpr = 1
):
    """weight + WEIGHT_OFFSET in the compute type, [REPEATED, BLOCK]; 1 without a weight."""
    if ptr is None:
        weight = tl.full([1, 1], 1.0, COMPUTE)
    else:
        columns = columns[None, :]
        if REPEATED > 1:
            columns += tl.zeros([REPEATED, 1], tl.int32)
        weight = tl.load(ptr + columns, mask=columns < HIDDEN, other=0.0).to(COMPUTE)
        weight += tl.full([1, 1], WEIGHT_OFFSET, COMPUTE)
    return weight

"""The forward kernels: loop structure alone. Arithmetic is in rowmath.py, addressing in tile.py, quantised stores in quantise.py.

Both compute y = x · rsqrt(mean(x²) + eps) · (weight + WEIGHT_OFFSET); with a residual, x is first replaced by the stored
x + residual. Absent tensors are None pointers; what the compiler must know is a constexpr. launch.py launches them, and
launch_quant.py, with scales, for codes in y's place.
"""

import triton
import triton.language as tl

# By name, not by module: where Inductor compiles a kernel itself it copies what the kernel names into one file.
from rmsnorm_ops.kernels.quantise import magnitude_bits, scale_of, store_normalised, store_scale
from rmsnorm_ops.kernels.rowmath import (
    compensated_add,
    fold,
    mean_square,
    needs_rescue,
    normalise,
    power_of_two_scale,
    rescued_rstd,
    row_magnitude,
    row_sum,
    rsqrt,
)
from rmsnorm_ops.kernels.tile import load_sum, load_weight, rows_of_program, store, strided_rows

# A compiled kernel serves every number of rows and every stride: Triton must not compile for the first call's (1, or a
# multiple of 16).
RUNTIME = [
    "n_rows", "x_inner_rows", "x_outer_stride", "x_inner_stride",
    "residual_inner_rows", "residual_outer_stride", "residual_inner_stride",
]  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def resident_forward(
    x_ptr, residual_ptr, weight_ptr, y_ptr, residual_out_ptr,
    eps: tl.float64, n_rows: tl.int64,
    x_inner_rows: tl.int64, x_outer_stride: tl.int64, x_inner_stride: tl.int64,
    residual_inner_rows: tl.int64, residual_outer_stride: tl.int64, residual_inner_stride: tl.int64,
    scale_ptr, max_scale,
    HIDDEN: tl.constexpr, FP64: tl.constexpr, WEIGHT_OFFSET: tl.constexpr, ROUND_BEFORE_WEIGHT: tl.constexpr,
    X_ALIGN: tl.constexpr, X_FOLDED: tl.constexpr, RESIDUAL_ALIGN: tl.constexpr, RESIDUAL_FOLDED: tl.constexpr,
    ROWS: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
    GROUP: tl.constexpr, QMAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, COLUMN_MAJOR: tl.constexpr, FORMAT: tl.constexpr,
    CAST: tl.constexpr,
):  # fmt: skip
    """ROWS rows a program, each kept in registers as a block of HEAD and, where TAIL > 0, one of TAIL elements."""
    COMPUTE: tl.constexpr = tl.float64 if FP64 else tl.float32
    X_TYPE: tl.constexpr = x_ptr.dtype.element_ty
    rows = rows_of_program(ROWS)
    mask = rows < n_rows
    x_row = strided_rows(x_ptr, rows, x_inner_rows, x_outer_stride, x_inner_stride, X_ALIGN, X_FOLDED)
    y_row = y_ptr + rows * HIDDEN
    residual_row = None
    sum_row = None
    if residual_ptr is not None:
        residual_row = strided_rows(
            residual_ptr, rows, residual_inner_rows, residual_outer_stride, residual_inner_stride,
            RESIDUAL_ALIGN, RESIDUAL_FOLDED,
        )  # fmt: skip
        sum_row = residual_out_ptr + rows * HIDDEN

    columns = tl.arange(0, HEAD)
    head = load_sum(x_row, residual_row, sum_row, mask, columns, HIDDEN, COMPUTE)
    # A maximum over y is taken in the weight's layout, not x's: loaded for each row of the tile, it has x's (without that, y went
    # through shared memory and back).
    REPEATED: tl.constexpr = 1 if GROUP == 0 else ROWS
    weight = load_weight(weight_ptr, columns, HIDDEN, COMPUTE, WEIGHT_OFFSET, REPEATED)
    squares = head * head
    if TAIL > 0:
        tail_columns = HEAD + tl.arange(0, TAIL)
        tail = load_sum(x_row, residual_row, sum_row, mask, tail_columns, HIDDEN, COMPUTE)
        tail_weight = load_weight(weight_ptr, tail_columns, HIDDEN, COMPUTE, WEIGHT_OFFSET)
        squares = fold(squares, tail * tail)

    eps = tl.full([1], eps, COMPUTE)
    mean = mean_square(row_sum(squares), eps, HIDDEN)
    rstd = rsqrt(mean)
    rescue = needs_rescue(mean, 100)
    if tl.max(rescue.to(tl.int32), axis=0) > 0:
        magnitude = row_magnitude(head)
        if TAIL > 0:
            magnitude = tl.maximum(magnitude, row_magnitude(tail))
        scale = power_of_two_scale(magnitude, eps)
        scaled = head * scale[:, None]
        squares = scaled * scaled
        if TAIL > 0:
            scaled = tail * scale[:, None]
            squares = fold(squares, scaled * scaled)
        mean = mean_square(row_sum(squares), eps * scale * scale, HIDDEN)
        rescued, prescale = rescued_rstd(mean, scale)
        # The tile's ordinary rows keep the bits they have.
        rstd = tl.where(rescue, rescued, rstd)
        head = tl.where(rescue[:, None], head * prescale[:, None], head)
        if TAIL > 0:
            tail = tl.where(rescue[:, None], tail * prescale[:, None], tail)

    y = normalise(head, rstd, weight, X_TYPE, ROUND_BEFORE_WEIGHT)
    store_normalised(
        y_row, y, None, rows, n_rows, mask, 0, scale_ptr, max_scale, HIDDEN, GROUP, QMAX, POWER_OF_TWO, COLUMN_MAJOR, FORMAT, CAST
    )
    if TAIL > 0:
        tl.static_assert(scale_ptr is None, "a quantised row is one block")
        y = normalise(tail, rstd, tail_weight, X_TYPE, ROUND_BEFORE_WEIGHT)
        store(y_row, y, mask, tail_columns, HIDDEN)


@triton.jit(do_not_specialize=RUNTIME)
def streamed_forward(
    x_ptr, residual_ptr, weight_ptr, y_ptr, residual_out_ptr,
    eps: tl.float64, n_rows: tl.int64,
    x_inner_rows: tl.int64, x_outer_stride: tl.int64, x_inner_stride: tl.int64,
    residual_inner_rows: tl.int64, residual_outer_stride: tl.int64, residual_inner_stride: tl.int64,
    scale_ptr, max_scale,
    HIDDEN: tl.constexpr, FP64: tl.constexpr, WEIGHT_OFFSET: tl.constexpr, ROUND_BEFORE_WEIGHT: tl.constexpr,
    X_ALIGN: tl.constexpr, X_FOLDED: tl.constexpr, RESIDUAL_ALIGN: tl.constexpr, RESIDUAL_FOLDED: tl.constexpr,
    ROWS: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
    GROUP: tl.constexpr, QMAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, COLUMN_MAJOR: tl.constexpr, FORMAT: tl.constexpr,
    CAST: tl.constexpr,
):  # fmt: skip
    """One row a program, read twice in blocks of HEAD elements: for Σx², then for y. ROWS is 1 and TAIL 0. A scale of the row's
    own is a pass more, for the largest y."""
    COMPUTE: tl.constexpr = tl.float64 if FP64 else tl.float32
    X_TYPE: tl.constexpr = x_ptr.dtype.element_ty
    rows = rows_of_program(ROWS)
    mask = rows < n_rows
    x_row = strided_rows(x_ptr, rows, x_inner_rows, x_outer_stride, x_inner_stride, X_ALIGN, X_FOLDED)
    y_row = y_ptr + rows * HIDDEN
    residual_row = None
    sum_row = None
    if residual_ptr is not None:
        residual_row = strided_rows(
            residual_ptr, rows, residual_inner_rows, residual_outer_stride, residual_inner_stride,
            RESIDUAL_ALIGN, RESIDUAL_FOLDED,
        )  # fmt: skip
        sum_row = residual_out_ptr + rows * HIDDEN

    one = tl.full([ROWS], 1.0, COMPUTE)
    eps = tl.full([1], eps, COMPUTE)
    total = _streamed_square_sum(x_row, residual_row, sum_row, mask, one, HIDDEN, COMPUTE, HEAD)
    mean = mean_square(total, eps, HIDDEN)
    rstd = rsqrt(mean)
    prescale = one
    if tl.max(needs_rescue(mean, 100).to(tl.int32), axis=0) > 0:
        scale = power_of_two_scale(streamed_magnitude(x_row, residual_row, mask, HIDDEN, COMPUTE, HEAD), eps)
        total = _streamed_square_sum(x_row, residual_row, None, mask, scale, HIDDEN, COMPUTE, HEAD)
        rstd, prescale = rescued_rstd(mean_square(total, eps * scale * scale, HIDDEN), scale)
    row_scale = None
    if GROUP == HIDDEN:
        amax_bits = tl.zeros([ROWS, HEAD], tl.int32)
        for start in range(0, HIDDEN, HEAD):
            columns = start + tl.arange(0, HEAD)
            x = load_sum(x_row, residual_row, None, mask, columns, HIDDEN, COMPUTE) * prescale[:, None]
            weight = load_weight(weight_ptr, columns, HIDDEN, COMPUTE, WEIGHT_OFFSET)
            y = normalise(x, rstd, weight, X_TYPE, ROUND_BEFORE_WEIGHT)
            amax_bits = tl.maximum(amax_bits, magnitude_bits(y))
        row_scale = scale_of(tl.max(amax_bits, axis=1)[:, None], max_scale, QMAX, POWER_OF_TWO)
        store_scale(scale_ptr, row_scale, rows, n_rows, mask, 0, HIDDEN, GROUP, COLUMN_MAJOR)
    for start in range(0, HIDDEN, HEAD):
        columns = start + tl.arange(0, HEAD)
        # Read again, not taken from residual_out: another thread may have stored it.
        x = load_sum(x_row, residual_row, None, mask, columns, HIDDEN, COMPUTE) * prescale[:, None]
        weight = load_weight(weight_ptr, columns, HIDDEN, COMPUTE, WEIGHT_OFFSET)
        y = normalise(x, rstd, weight, X_TYPE, ROUND_BEFORE_WEIGHT)
        store_normalised(
            y_row, y, row_scale, rows, n_rows, mask, start, scale_ptr, max_scale, HIDDEN, GROUP, QMAX, POWER_OF_TWO, COLUMN_MAJOR,
            FORMAT, CAST,
        )  # fmt: skip


@triton.jit
def _streamed_square_sum(
    x_row, residual_row, sum_row, mask, scale, HIDDEN: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr
):
    """Σ(scale·x)² a row."""
    total = tl.zeros([mask.shape[0], BLOCK], COMPUTE)
    lost = tl.zeros([mask.shape[0], BLOCK], COMPUTE)
    for start in range(0, HIDDEN, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = load_sum(x_row, residual_row, sum_row, mask, columns, HIDDEN, COMPUTE) * scale[:, None]
        total, lost = compensated_add(total, lost, x * x)
    return row_sum(total)


@triton.jit
def streamed_magnitude(x_row, residual_row, mask, HIDDEN: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    """max|x| a row."""
    largest = tl.zeros([mask.shape[0], BLOCK], COMPUTE)
    for start in range(0, HIDDEN, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = load_sum(x_row, residual_row, None, mask, columns, HIDDEN, COMPUTE)
        largest = tl.maximum(largest, tl.abs(x))
    return tl.max(largest, axis=1)

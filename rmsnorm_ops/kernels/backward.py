"""The backward kernels: loop structure alone. Arithmetic is in rowmath.py, addressing in tile.py.

With h = dy · (weight + WEIGHT_OFFSET), x̂ = x · rstd and c = mean(h · x̂):

    dx = rstd · (h − x̂ · c) + dsum        dweight = Σ_rows dy · x̂

rstd is recomputed: Σx² and Σ(h · x) run over the same elements in the same pass. For the fused add x is residual_out and
dsum the gradient that arrived there. Absent tensors are None pointers. launch.py launches them.
"""

import triton
import triton.language as tl

# By name, not by module: where Inductor compiles a kernel itself it copies what the kernel names into one file.
from rmsnorm_ops.kernels.forward import streamed_magnitude
from rmsnorm_ops.kernels.rowmath import (
    compensated_add,
    fold,
    mean_of,
    mean_square,
    needs_rescue,
    power_of_two_scale,
    rescued_rstd,
    row_magnitude,
    row_sum,
    row_sums,
    rsqrt,
)
from rmsnorm_ops.kernels.tile import load, load_weight, rows_of_program, store_gradient, strided_rows

# As in forward.py: one compiled kernel for every number of rows and every stride.
_STRIDES = [
    "n_rows", "dy_inner_rows", "dy_outer_stride", "dy_inner_stride", "x_inner_rows", "x_outer_stride", "x_inner_stride",
]  # fmt: skip
RUNTIME = [*_STRIDES, "dsum_inner_rows", "dsum_outer_stride", "dsum_inner_stride"]


@triton.jit(do_not_specialize=RUNTIME)
def resident_backward(
    dy_ptr, x_ptr, dsum_ptr, weight_ptr, dx_ptr, dresidual_ptr, partial_ptr,
    eps: tl.float64, n_rows: tl.int64,
    dy_inner_rows: tl.int64, dy_outer_stride: tl.int64, dy_inner_stride: tl.int64,
    x_inner_rows: tl.int64, x_outer_stride: tl.int64, x_inner_stride: tl.int64,
    dsum_inner_rows: tl.int64, dsum_outer_stride: tl.int64, dsum_inner_stride: tl.int64,
    HIDDEN: tl.constexpr, FP64: tl.constexpr, WEIGHT_OFFSET: tl.constexpr,
    DY_ALIGN: tl.constexpr, DY_FOLDED: tl.constexpr, X_ALIGN: tl.constexpr, X_FOLDED: tl.constexpr,
    DSUM_ALIGN: tl.constexpr, DSUM_FOLDED: tl.constexpr,
    ROWS: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr, RELOAD_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Tiles of ROWS rows, each row a block of HEAD and, where TAIL > 0, one of TAIL elements; a program takes every
    num_programs-th tile, keeps its part of dweight in registers and stores it to its row of partial [programs, hidden].
    RELOAD_WEIGHT reads the weight with each tile, where the registers hold no more beside the row and dweight."""
    COMPUTE: tl.constexpr = tl.float64 if FP64 else tl.float32
    columns = tl.arange(0, HEAD)
    weight = load_weight(weight_ptr, columns, HIDDEN, COMPUTE, WEIGHT_OFFSET)
    dweight = tl.zeros([ROWS, HEAD], COMPUTE)
    if TAIL > 0:
        tail_columns = HEAD + tl.arange(0, TAIL)
        tail_weight = load_weight(weight_ptr, tail_columns, HIDDEN, COMPUTE, WEIGHT_OFFSET)
        tail_dweight = tl.zeros([ROWS, TAIL], COMPUTE)
    eps = tl.full([1], eps, COMPUTE)

    for start in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = start * ROWS + tl.arange(0, ROWS)
        mask = rows < n_rows
        dy_row = strided_rows(dy_ptr, rows, dy_inner_rows, dy_outer_stride, dy_inner_stride, DY_ALIGN, DY_FOLDED)
        x_row = strided_rows(x_ptr, rows, x_inner_rows, x_outer_stride, x_inner_stride, X_ALIGN, X_FOLDED)
        dsum_row = None
        if dsum_ptr is not None:
            dsum_row = strided_rows(
                dsum_ptr, rows, dsum_inner_rows, dsum_outer_stride, dsum_inner_stride, DSUM_ALIGN, DSUM_FOLDED
            )
        x = load(x_row, mask, columns, HIDDEN, COMPUTE)
        dy = load(dy_row, mask, columns, HIDDEN, COMPUTE)
        if RELOAD_WEIGHT:
            weight = load_weight(weight_ptr, columns, HIDDEN, COMPUTE, WEIGHT_OFFSET)
        h = dy * weight
        squares = x * x
        products = h * x
        if TAIL > 0:
            tail_x = load(x_row, mask, tail_columns, HIDDEN, COMPUTE)
            tail_dy = load(dy_row, mask, tail_columns, HIDDEN, COMPUTE)
            if RELOAD_WEIGHT:
                tail_weight = load_weight(weight_ptr, tail_columns, HIDDEN, COMPUTE, WEIGHT_OFFSET)
            tail_h = tail_dy * tail_weight
            squares = fold(squares, tail_x * tail_x)
            products = fold(products, tail_h * tail_x)
        square_sum, product_sum = row_sums(squares, products)
        mean = mean_square(square_sum, eps, HIDDEN)
        rstd = rsqrt(mean)
        c = mean_of(product_sum, HIDDEN) * rstd

        rescue = needs_rescue(mean, 60)
        if tl.max(rescue.to(tl.int32), axis=0) > 0:
            magnitude = row_magnitude(x)
            if TAIL > 0:
                magnitude = tl.maximum(magnitude, row_magnitude(tail_x))
            scale = tl.where(rescue, power_of_two_scale(magnitude, eps), 1.0)
            scaled = x * scale[:, None]
            squares = scaled * scaled
            products = h * scaled
            if TAIL > 0:
                scaled = tail_x * scale[:, None]
                squares = fold(squares, scaled * scaled)
                products = fold(products, tail_h * scaled)
            scaled_mean = mean_square(row_sum(squares), eps * scale * scale, HIDDEN)
            rescued, prescale = rescued_rstd(scaled_mean, scale)
            rescued_c = mean_of(row_sum(products), HIDDEN) * rsqrt(scaled_mean) * prescale
            # The tile's ordinary rows keep the bits they have. h and c carry the scale that rstd leaves out.
            prescale = tl.where(rescue, prescale, 1.0)
            rstd = tl.where(rescue, rescued, rstd)
            c = tl.where(rescue, rescued_c, c)
            x *= prescale[:, None]
            h *= prescale[:, None]
            if TAIL > 0:
                tail_x *= prescale[:, None]
                tail_h *= prescale[:, None]
        # Rows beyond the last have no mean square: at eps = 0 their infinite rstd would make NaN of dweight.
        rstd = tl.where(mask, rstd, 0.0)

        dx_row = dx_ptr + rows * HIDDEN
        dresidual_row = None
        if dresidual_ptr is not None:
            dresidual_row = dresidual_ptr + rows * HIDDEN
        normalised = x * rstd[:, None]
        dx = (h - normalised * c[:, None]) * rstd[:, None]
        store_gradient(dx_row, dresidual_row, dsum_row, dx, mask, columns, HIDDEN)
        if partial_ptr is not None:
            dweight += dy * normalised
        if TAIL > 0:
            normalised = tail_x * rstd[:, None]
            dx = (tail_h - normalised * c[:, None]) * rstd[:, None]
            store_gradient(dx_row, dresidual_row, dsum_row, dx, mask, tail_columns, HIDDEN)
            if partial_ptr is not None:
                tail_dweight += tail_dy * normalised

    if partial_ptr is not None:
        partial_row = partial_ptr + tl.program_id(0).to(tl.int64) * HIDDEN
        tl.store(partial_row + columns, tl.sum(dweight, axis=0), mask=columns < HIDDEN)
        if TAIL > 0:
            tl.store(partial_row + tail_columns, tl.sum(tail_dweight, axis=0), mask=tail_columns < HIDDEN)


@triton.jit(do_not_specialize=RUNTIME)
def streamed_backward(
    dy_ptr, x_ptr, dsum_ptr, weight_ptr, dx_ptr, dresidual_ptr, row_scales_ptr,
    eps: tl.float64, n_rows: tl.int64,
    dy_inner_rows: tl.int64, dy_outer_stride: tl.int64, dy_inner_stride: tl.int64,
    x_inner_rows: tl.int64, x_outer_stride: tl.int64, x_inner_stride: tl.int64,
    dsum_inner_rows: tl.int64, dsum_outer_stride: tl.int64, dsum_inner_stride: tl.int64,
    HIDDEN: tl.constexpr, FP64: tl.constexpr, WEIGHT_OFFSET: tl.constexpr,
    DY_ALIGN: tl.constexpr, DY_FOLDED: tl.constexpr, X_ALIGN: tl.constexpr, X_FOLDED: tl.constexpr,
    DSUM_ALIGN: tl.constexpr, DSUM_FOLDED: tl.constexpr,
    ROWS: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr, RELOAD_WEIGHT: tl.constexpr,
):  # fmt: skip
    """One row a program (ROWS = 1), read twice in blocks of HEAD: for the sums, then for dx. The last three are not used.

    row_scales [rows, 2] receives the two factors of rstd, for weight_gradient.
    """
    COMPUTE: tl.constexpr = tl.float64 if FP64 else tl.float32
    rows = rows_of_program(ROWS)
    mask = rows < n_rows
    dy_row = strided_rows(dy_ptr, rows, dy_inner_rows, dy_outer_stride, dy_inner_stride, DY_ALIGN, DY_FOLDED)
    x_row = strided_rows(x_ptr, rows, x_inner_rows, x_outer_stride, x_inner_stride, X_ALIGN, X_FOLDED)
    dsum_row = None
    if dsum_ptr is not None:
        dsum_row = strided_rows(dsum_ptr, rows, dsum_inner_rows, dsum_outer_stride, dsum_inner_stride, DSUM_ALIGN, DSUM_FOLDED)
    dx_row = dx_ptr + rows * HIDDEN
    dresidual_row = None
    if dresidual_ptr is not None:
        dresidual_row = dresidual_ptr + rows * HIDDEN

    prescale = tl.full([ROWS], 1.0, COMPUTE)
    eps = tl.full([1], eps, COMPUTE)
    squares, products = _streamed_sums(x_row, dy_row, weight_ptr, mask, prescale, HIDDEN, COMPUTE, WEIGHT_OFFSET, HEAD)
    mean = mean_square(squares, eps, HIDDEN)
    rstd = rsqrt(mean)
    c = mean_of(products, HIDDEN) * rstd
    if tl.max(needs_rescue(mean, 60).to(tl.int32), axis=0) > 0:
        magnitude = streamed_magnitude(x_row, None, mask, HIDDEN, COMPUTE, HEAD)
        scale = power_of_two_scale(magnitude, eps)
        squares, products = _streamed_sums(x_row, dy_row, weight_ptr, mask, scale, HIDDEN, COMPUTE, WEIGHT_OFFSET, HEAD)
        mean = mean_square(squares, eps * scale * scale, HIDDEN)
        rstd, prescale = rescued_rstd(mean, scale)
        c = mean_of(products, HIDDEN) * rsqrt(mean) * prescale
    if row_scales_ptr is not None:
        tl.store(row_scales_ptr + rows * 2, rstd, mask=mask)
        tl.store(row_scales_ptr + rows * 2 + 1, prescale, mask=mask)
    for start in range(0, HIDDEN, HEAD):
        columns = start + tl.arange(0, HEAD)
        weight = load_weight(weight_ptr, columns, HIDDEN, COMPUTE, WEIGHT_OFFSET)
        h = load(dy_row, mask, columns, HIDDEN, COMPUTE) * weight * prescale[:, None]
        normalised = load(x_row, mask, columns, HIDDEN, COMPUTE) * prescale[:, None] * rstd[:, None]
        dx = (h - normalised * c[:, None]) * rstd[:, None]
        store_gradient(dx_row, dresidual_row, dsum_row, dx, mask, columns, HIDDEN)


@triton.jit
def _streamed_sums(
    x_row, dy_row, weight_ptr, mask, scale,
    HIDDEN: tl.constexpr, COMPUTE: tl.constexpr, WEIGHT_OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Σ(scale·x)² and Σ(h·scale·x) a row."""
    squares = tl.zeros([mask.shape[0], BLOCK], COMPUTE)
    lost = tl.zeros([mask.shape[0], BLOCK], COMPUTE)
    products = tl.zeros([mask.shape[0], BLOCK], COMPUTE)
    for start in range(0, HIDDEN, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = load(x_row, mask, columns, HIDDEN, COMPUTE) * scale[:, None]
        h = load(dy_row, mask, columns, HIDDEN, COMPUTE)
        h *= load_weight(weight_ptr, columns, HIDDEN, COMPUTE, WEIGHT_OFFSET)
        squares, lost = compensated_add(squares, lost, x * x)
        products += h * x
    return row_sum(squares), row_sum(products)


@triton.jit(do_not_specialize=_STRIDES)
def weight_gradient(
    dy_ptr, x_ptr, row_scales_ptr, partial_ptr, n_rows: tl.int64,
    dy_inner_rows: tl.int64, dy_outer_stride: tl.int64, dy_inner_stride: tl.int64,
    x_inner_rows: tl.int64, x_outer_stride: tl.int64, x_inner_stride: tl.int64,
    HIDDEN: tl.constexpr, FP64: tl.constexpr,
    DY_ALIGN: tl.constexpr, DY_FOLDED: tl.constexpr, X_ALIGN: tl.constexpr, X_FOLDED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dweight of rows too wide to keep a sum beside the row: a program owns BLOCK columns (axis 0) and every
    num_programs-th tile of ROWS rows (axis 1), whose sum it stores to its row of partial [programs of axis 1, hidden]."""
    COMPUTE: tl.constexpr = tl.float64 if FP64 else tl.float32
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dweight = tl.zeros([ROWS, BLOCK], COMPUTE)
    for start in range(tl.program_id(1).to(tl.int64), tl.cdiv(n_rows, ROWS), tl.num_programs(1)):
        rows = start * ROWS + tl.arange(0, ROWS)
        mask = rows < n_rows
        dy_row = strided_rows(dy_ptr, rows, dy_inner_rows, dy_outer_stride, dy_inner_stride, DY_ALIGN, DY_FOLDED)
        x_row = strided_rows(x_ptr, rows, x_inner_rows, x_outer_stride, x_inner_stride, X_ALIGN, X_FOLDED)
        rstd = tl.load(row_scales_ptr + rows * 2, mask=mask, other=0.0)
        prescale = tl.load(row_scales_ptr + rows * 2 + 1, mask=mask, other=0.0)
        x = load(x_row, mask, columns, HIDDEN, COMPUTE)
        dy = load(dy_row, mask, columns, HIDDEN, COMPUTE)
        dweight += dy * (x * prescale[:, None] * rstd[:, None])
    partial_row = partial_ptr + tl.program_id(1).to(tl.int64) * HIDDEN
    tl.store(partial_row + columns, tl.sum(dweight, axis=0), mask=columns < HIDDEN)


@triton.jit(do_not_specialize=["n_partials"])
def sum_partials(partial_ptr, dweight_ptr, n_partials, HIDDEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """dweight [hidden] = the sum of partial [n_partials, hidden], in a fixed order. A program owns BLOCK columns."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], partial_ptr.dtype.element_ty)
    for start in range(0, n_partials, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < n_partials)[:, None] & (columns < HIDDEN)[None, :]
        total += tl.load(partial_ptr + rows[:, None].to(tl.int64) * HIDDEN + columns[None, :], mask=inside, other=0.0)
    dweight = tl.sum(total, axis=0).to(dweight_ptr.dtype.element_ty)
    tl.store(dweight_ptr + columns, dweight, mask=columns < HIDDEN)

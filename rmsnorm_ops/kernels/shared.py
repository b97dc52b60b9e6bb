"""Kernels for rows so wide that several programs share one: loop structure alone. launch.py and launch_backward.py launch them.

A program owns a slice of HEAD columns of every row that its group of SLICES programs takes. It adds up its part of the next
row and publishes it (exchange.py) before it waits for the others' parts of this one, so that nobody waits long. Of a row it
keeps what the tensor has: half types are widened where they are used. The compute type is fp32.
"""

import triton
import triton.language as tl

from rmsnorm_ops.kernels import exchange, rowmath, tile
from rmsnorm_ops.kernels.backward import RUNTIME as BACKWARD_RUNTIME
from rmsnorm_ops.kernels.forward import RUNTIME as FORWARD_RUNTIME

# Lines of slots a row: its sums, and for a rescue its largest magnitude and the sums once more.
FORWARD_LINES = tl.constexpr(3)
BACKWARD_LINES = tl.constexpr(5)


@triton.jit(do_not_specialize=FORWARD_RUNTIME)
def shared_forward(
    x_ptr, residual_ptr, weight_ptr, y_ptr, residual_out_ptr, slots_ptr,
    eps: tl.float64, n_rows: tl.int64,
    x_inner_rows: tl.int64, x_outer_stride: tl.int64, x_inner_stride: tl.int64,
    residual_inner_rows: tl.int64, residual_outer_stride: tl.int64, residual_inner_stride: tl.int64,
    HIDDEN: tl.constexpr, WEIGHT_OFFSET: tl.constexpr, ROUND_BEFORE_WEIGHT: tl.constexpr,
    X_ALIGN: tl.constexpr, X_FOLDED: tl.constexpr, RESIDUAL_ALIGN: tl.constexpr, RESIDUAL_FOLDED: tl.constexpr,
    HEAD: tl.constexpr, SLICES: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y and, with a residual, residual_out, as the kernels of forward.py. slots is
    [rows, FORWARD_LINES, PADDED]."""
    Y_TYPE: tl.constexpr = y_ptr.dtype.element_ty
    X_TYPE: tl.constexpr = x_ptr.dtype.element_ty if residual_ptr is None else residual_ptr.dtype.element_ty
    one_row = tl.arange(0, 1)
    part = tl.program_id(0) % SLICES
    group = (tl.program_id(0) // SLICES).to(tl.int64)
    groups = tl.num_programs(0) // SLICES
    columns = part * HEAD + tl.arange(0, HEAD)
    weight = tile.load_weight(weight_ptr, columns, HIDDEN, tl.float32, WEIGHT_OFFSET)
    eps = tl.full([1], eps, tl.float32)
    x = tl.zeros([1, HEAD], X_TYPE)
    # The first turn has a next row alone.
    for row in tl.range(group - groups, n_rows, groups, num_stages=STAGES):
        started = row >= group
        slots = slots_ptr + row * (FORWARD_LINES * PADDED)
        bits = exchange.poll(slots, started, SLICES, 1, PADDED)
        next_row = row + groups + one_row
        next_mask = next_row < n_rows
        x_row = tile.strided_rows(x_ptr, next_row, x_inner_rows, x_outer_stride, x_inner_stride, X_ALIGN, X_FOLDED)
        residual_row = None
        sum_row = None
        if residual_ptr is not None:
            residual_row = tile.strided_rows(
                residual_ptr, next_row, residual_inner_rows, residual_outer_stride, residual_inner_stride,
                RESIDUAL_ALIGN, RESIDUAL_FOLDED,
            )  # fmt: skip
            sum_row = residual_out_ptr + next_row * HIDDEN
        next_x = tile.load_stored(x_row, residual_row, sum_row, next_mask, columns, HIDDEN, tl.float32)
        wide = next_x.to(tl.float32)
        own = tl.sum(rowmath.row_sum(wide * wide), axis=0)
        next_slots = slots_ptr + (row + groups) * (FORWARD_LINES * PADDED)
        exchange.publish(next_slots + part, own, row + groups < n_rows)

        total, _ = exchange.totals(bits, 1, PADDED)
        if not exchange.complete(bits):
            total, _ = exchange.wait_for_totals(slots, SLICES, 1, PADDED)
        mean = rowmath.mean_square(tl.full([1], total, tl.float32), eps, HIDDEN)
        rstd = rowmath.rsqrt(mean)
        prescale = tl.full([1], 1.0, tl.float32)
        if started & (tl.max(rowmath.needs_rescue(mean, 100).to(tl.int32), axis=0) > 0):
            exchange.publish(slots + PADDED + part, tl.max(tl.max(tl.abs(x.to(tl.float32)), axis=1), axis=0), started)
            largest = exchange.wait_for_largest(slots + PADDED, SLICES, PADDED)
            scale = rowmath.power_of_two_scale(tl.full([1], largest, tl.float32), eps)
            scaled = x.to(tl.float32) * scale[:, None]
            exchange.publish(slots + 2 * PADDED + part, tl.sum(rowmath.row_sum(scaled * scaled), axis=0), started)
            scaled_total, _ = exchange.wait_for_totals(slots + 2 * PADDED, SLICES, 1, PADDED)
            scaled_mean = rowmath.mean_square(tl.full([1], scaled_total, tl.float32), eps * scale * scale, HIDDEN)
            rstd, prescale = rowmath.rescued_rstd(scaled_mean, scale)
        y = rowmath.normalise(x.to(tl.float32) * prescale[:, None], rstd, weight, Y_TYPE, ROUND_BEFORE_WEIGHT)
        rows = row + one_row
        tile.store(y_ptr + rows * HIDDEN, y, rows >= 0, columns, HIDDEN)
        x = next_x


@triton.jit(do_not_specialize=BACKWARD_RUNTIME)
def shared_backward(
    dy_ptr, x_ptr, dsum_ptr, weight_ptr, dx_ptr, dresidual_ptr, partial_ptr, slots_ptr,
    eps: tl.float64, n_rows: tl.int64,
    dy_inner_rows: tl.int64, dy_outer_stride: tl.int64, dy_inner_stride: tl.int64,
    x_inner_rows: tl.int64, x_outer_stride: tl.int64, x_inner_stride: tl.int64,
    dsum_inner_rows: tl.int64, dsum_outer_stride: tl.int64, dsum_inner_stride: tl.int64,
    HIDDEN: tl.constexpr, WEIGHT_OFFSET: tl.constexpr,
    DY_ALIGN: tl.constexpr, DY_FOLDED: tl.constexpr, X_ALIGN: tl.constexpr, X_FOLDED: tl.constexpr,
    DSUM_ALIGN: tl.constexpr, DSUM_FOLDED: tl.constexpr,
    HEAD: tl.constexpr, SLICES: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx and the group's part of dweight, stored to its row of partial [groups, hidden]. slots is
    [rows, BACKWARD_LINES, PADDED]."""
    one_row = tl.arange(0, 1)
    part = tl.program_id(0) % SLICES
    group = (tl.program_id(0) // SLICES).to(tl.int64)
    groups = tl.num_programs(0) // SLICES
    columns = part * HEAD + tl.arange(0, HEAD)
    weight = tile.load_weight(weight_ptr, columns, HIDDEN, tl.float32, WEIGHT_OFFSET)
    dweight = tl.zeros([1, HEAD], tl.float32)
    eps = tl.full([1], eps, tl.float32)
    x = tl.zeros([1, HEAD], x_ptr.dtype.element_ty)
    dy = tl.zeros([1, HEAD], dy_ptr.dtype.element_ty)
    # The first turn has a next row alone.
    for row in tl.range(group - groups, n_rows, groups, num_stages=STAGES):
        started = row >= group
        slots = slots_ptr + row * (BACKWARD_LINES * PADDED)
        bits = exchange.poll(slots, started, SLICES, 2, PADDED)
        next_row = row + groups + one_row
        next_mask = next_row < n_rows
        dy_row = tile.strided_rows(dy_ptr, next_row, dy_inner_rows, dy_outer_stride, dy_inner_stride, DY_ALIGN, DY_FOLDED)
        x_row = tile.strided_rows(x_ptr, next_row, x_inner_rows, x_outer_stride, x_inner_stride, X_ALIGN, X_FOLDED)
        next_x = tile.load_narrow(x_row, next_mask, columns, HIDDEN)
        next_dy = tile.load_narrow(dy_row, next_mask, columns, HIDDEN)
        wide = next_x.to(tl.float32)
        squares, products = rowmath.row_sums(wide * wide, next_dy.to(tl.float32) * weight * wide)
        next_slots = slots_ptr + (row + groups) * (BACKWARD_LINES * PADDED) + part
        exchange.publish(next_slots, tl.sum(squares, axis=0), row + groups < n_rows)
        exchange.publish(next_slots + PADDED, tl.sum(products, axis=0), row + groups < n_rows)

        square_total, product_total = exchange.totals(bits, 2, PADDED)
        if not exchange.complete(bits):
            square_total, product_total = exchange.wait_for_totals(slots, SLICES, 2, PADDED)
        mean = rowmath.mean_square(tl.full([1], square_total, tl.float32), eps, HIDDEN)
        rstd = rowmath.rsqrt(mean)
        c = rowmath.mean_of(tl.full([1], product_total, tl.float32), HIDDEN) * rstd
        prescale = tl.full([1], 1.0, tl.float32)
        if started & (tl.max(rowmath.needs_rescue(mean, 60).to(tl.int32), axis=0) > 0):
            exchange.publish(slots + 2 * PADDED + part, tl.max(tl.max(tl.abs(x.to(tl.float32)), axis=1), axis=0), started)
            largest = exchange.wait_for_largest(slots + 2 * PADDED, SLICES, PADDED)
            scale = rowmath.power_of_two_scale(tl.full([1], largest, tl.float32), eps)
            scaled = x.to(tl.float32) * scale[:, None]
            squares, products = rowmath.row_sums(scaled * scaled, dy.to(tl.float32) * weight * scaled)
            exchange.publish(slots + 3 * PADDED + part, tl.sum(squares, axis=0), started)
            exchange.publish(slots + 4 * PADDED + part, tl.sum(products, axis=0), started)
            square_total, product_total = exchange.wait_for_totals(slots + 3 * PADDED, SLICES, 2, PADDED)
            mean = rowmath.mean_square(tl.full([1], square_total, tl.float32), eps * scale * scale, HIDDEN)
            rstd, prescale = rowmath.rescued_rstd(mean, scale)
            c = rowmath.mean_of(tl.full([1], product_total, tl.float32), HIDDEN) * rowmath.rsqrt(mean) * prescale
        rows = row + one_row
        mask = rows >= 0
        # Before the first row there is no mean square: at eps = 0 an infinite rstd would make NaN of dweight.
        rstd = tl.where(mask, rstd, 0.0)

        dsum_row = None
        if dsum_ptr is not None:
            dsum_row = tile.strided_rows(
                dsum_ptr, rows, dsum_inner_rows, dsum_outer_stride, dsum_inner_stride, DSUM_ALIGN, DSUM_FOLDED
            )
        dresidual_row = None
        if dresidual_ptr is not None:
            dresidual_row = dresidual_ptr + rows * HIDDEN
        wide_dy = dy.to(tl.float32)
        normalised = x.to(tl.float32) * prescale[:, None] * rstd[:, None]
        dx = (wide_dy * weight * prescale[:, None] - normalised * c[:, None]) * rstd[:, None]
        tile.store_gradient(dx_ptr + rows * HIDDEN, dresidual_row, dsum_row, dx, mask, columns, HIDDEN)
        if partial_ptr is not None:
            dweight += wide_dy * normalised
        x = next_x
        dy = next_dy

    if partial_ptr is not None:
        tl.store(partial_ptr + group * HIDDEN + columns, tl.sum(dweight, axis=0), mask=columns < HIDDEN)

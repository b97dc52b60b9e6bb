"""The CPU implementation: plain torch calls over blocks of rows that stay in the cache.

Runs below autograd (it writes through ``out=``, which autograd refuses). Batch invariant: a row's bits depend on that row,
hidden, eps, weight and the options alone, not on the rows around it, on strides or on the number of threads.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from rmsnorm_ops.contracts import check_forward, compute_dtype

# Elements a block. A torch call costs 1 to 4 µs whatever it does, so blocks that fit the second-level cache lose more to calls
# than they gain: 4096×4096 bf16 took one Zen 4 core 28 ms at 2¹⁷, 24 at 2¹⁹ and 2²⁰, 28 at 2²¹; two cores, 21, 16, 16, 16.
BLOCK_ELEMENTS = 1 << 19
# fp32 rows wider than this are folded to it, or less, in fp32 before fp64 takes over, which spares memory traffic.
FOLDED_TO = 1 << 14
# By compute type: the mean squares (eps included) that need no rescue, and the power of two that brings others nearer.
ORDINARY = {torch.float32: (2.0**-100, 2.0**120, 2.0**90), torch.float64: (2.0**-900, 2.0**1000, 2.0**590)}


def forward(
    x: Tensor, weight: Tensor | None, eps: float, *, weight_offset: float = 0.0, round_before_weight: bool = False
) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · (weight + weight_offset)`` over the last dimension, rounded once to x's dtype.

    Args:
        x: ``[…, hidden]``, float16, bfloat16, float32 or float64, any strides. Where the leading dimensions do not collapse
            into one stride, x is copied once; where its rows are not dense, a block at a time.
        weight: ``[hidden]``, any of the four dtypes, any stride; None stands for ones.
        eps: finite, not negative; like every operand rounded to the compute type, float64 for float64 x, else float32.
        weight_offset: added to weight in the compute type; 0 without a weight.
        round_before_weight: round ``x · rstd`` to x's dtype before it meets the weight.

    Returns:
        y: x's shape and dtype, a new dense row-major tensor.

    Raises:
        TypeError: a dtype is none of the four.
        ValueError: a shape, a layout, a device, eps or weight_offset breaks the above.
    """
    check_forward(x, weight, eps, weight_offset)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        return y
    hidden, compute = x.shape[-1], compute_dtype(x.dtype)
    if weight is not None:
        weight = _cast(weight, compute)
        weight = weight + weight_offset if weight_offset else weight
    x_rows, y_rows = (x, y) if x.dim() == 2 else (x.reshape(-1, hidden), y.view(-1, hidden))
    most = max(1, BLOCK_ELEMENTS // hidden)
    if x_rows.shape[0] <= most:
        _block(x_rows, weight, eps, y_rows, None, round_before_weight)
        return y
    # Allocated once a call: glibc maps and unmaps blocks this large anew each time, which doubled the time in fresh processes.
    copies, dtype = (2, torch.float32) if x.dtype.itemsize == 2 else (1, torch.float64)
    scratch = torch.empty((copies, most, hidden), dtype=dtype, device=x.device)
    for x_block, y_block in zip(x_rows.split(most), y_rows.split(most), strict=True):
        _block(x_block, weight, eps, y_block, scratch[:, : x_block.shape[0]], round_before_weight)
    return y


def _block(x: Tensor, weight: Tensor | None, eps: float, y: Tensor, scratch: Tensor | None, round_before_weight: bool) -> None:
    """Write the rows of y. Half types are widened into scratch[0], which then takes the products."""
    if y.dtype.itemsize == 2:
        x = x.float() if scratch is None else scratch[0].copy_(x)
    # What is computed from x inherits its strides, and a sum over any but dense rows adds in another order.
    x, rstd = _with_rstd(x.contiguous(), eps, y, scratch)
    product = torch.mul(x, rstd, out=y) if y.dtype is x.dtype else x.mul_(rstd)
    if weight is not None:
        if round_before_weight and product is not y:
            product.copy_(y.copy_(product))
        product.mul_(weight)
    if product is not y:
        y.copy_(product)


def _with_rstd(x: Tensor, eps: float, y: Tensor, scratch: Tensor | None) -> tuple[Tensor, Tensor | float]:
    """x in the compute type and rstd, ``[rows, 1]``, or of a single row its value. In rows out of the ordinary range both are
    scaled by powers of two that cancel in ``x · rstd``."""
    total = _sum_of_squares(x, y, scratch)
    eps = _rounded(eps, x.dtype)
    smallest, largest, up = ORDINARY[x.dtype]
    if total.shape[0] == 1:
        # The same two operations as below, a torch call each cheaper: half the time of a single row of 4096 was calls.
        value = eps + total.item() / x.shape[1]
        if smallest <= value <= largest:
            return x, 1 / math.sqrt(value)
    mean = (total.double() / x.shape[1]).add_(eps)
    low, high = torch.aminmax(mean)
    if low.item() >= smallest and high.item() <= largest:
        return x, _cast(mean.rsqrt_(), x.dtype)
    # Ordinary rows of this block, and NaN rows, go through it with a scale of 1 and keep their bits.
    scale = torch.ones_like(mean).masked_fill_(mean < smallest, up).masked_fill_(mean > largest, 1 / up)
    total = _sum_of_squares(x * _cast(scale, x.dtype), y, None)
    # scale² may overflow where eps · scale² does not.
    rstd = (total.double() / x.shape[1]).add_(eps * scale * scale).rsqrt_()
    # Scaled down as far as their squares need, huge rows would lose bits of small elements; 1/16 keeps rstd normal.
    x_scale = scale.clamp(min=1 / 16)
    return x * _cast(x_scale, x.dtype), _cast(rstd.mul_(scale / x_scale), x.dtype)


def _sum_of_squares(x: Tensor, y: Tensor, scratch: Tensor | None) -> Tensor:
    """Σx² of each row, ``[rows, 1]``, in fp32 for half types and in fp64 for the others."""
    if y.dtype is torch.float64:
        return _fold(torch.mul(x, x, out=y), 1)
    if y.dtype is not torch.float32:
        return row_sum(torch.mul(x, x, out=None if scratch is None else scratch[1]))
    # fp32 sums of constant rows or rows with one spike were off by up to 14·2⁻²⁴, which costs y up to 7 ulp.
    terms = x if x.shape[1] <= FOLDED_TO else _fold(torch.mul(x, x, out=y), FOLDED_TO)
    wide = terms.double() if scratch is None else scratch[0, :, : terms.shape[1]].copy_(terms)
    return row_sum(wide.mul_(wide) if terms is x else wide)


def row_sum(terms: Tensor) -> Tensor:
    """The sum of each dense row, ``[rows, 1]``: the same bits wherever the row stands."""
    # torch splits a single sum of 2¹⁵ elements or more among threads, and its bits with it; it does not split two sums.
    lone = terms.shape[0] == 1 and terms.shape[1] >= 1 << 15
    return terms.expand(2, -1).sum(-1, keepdim=True)[:1] if lone else terms.sum(-1, keepdim=True)


def _fold(terms: Tensor, most: int) -> Tensor:
    """``terms`` folded by halves, in place, until ``most`` columns or fewer are left: an element takes part in one addition
    a fold, and a row of one value sums almost exactly."""
    while (columns := terms.shape[1]) > most:
        terms[:, : columns // 2].add_(terms[:, columns - columns // 2 :])
        terms = terms[:, : columns - columns // 2]
    return terms


def _rounded(eps: float, compute: torch.dtype) -> float:
    """eps as the compute type has it."""
    return eps if compute is torch.float64 else ctypes.c_float(eps).value


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As to(dtype), which takes 1 µs longer to parse."""
    return tensor.double() if dtype is torch.float64 else tensor.float()

"""The CPU backward: plain torch calls over blocks of rows that stay in the cache.

With h = dy · (weight + weight_offset), x̂ = x · rstd and c = mean(h · x̂): dx = rstd · (h − x̂ · c) + dsum, and
dweight = Σ_rows dy · x̂, added up block after block in the compute type. Batch invariant in dx, as the forward is in y.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rmsnorm_ops.contracts import check_backward, compute_dtype
from rmsnorm_ops.cpu import row_sum
from rmsnorm_ops.plain import power_of_two_scale

BLOCK_ELEMENTS = 1 << 18  # a block and the five temporaries of its size share the caches of a core


def backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """(dx, dweight); arguments, shapes and errors are those of ``torch.ops.rmsnorm.backward``."""
    dx, _, dweight = _backward(dy, None, x, weight, eps, weight_offset, None, True)
    return dx, dweight


def backward_input(dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    """dx alone."""
    dx: Tensor = _backward(dy, None, x, weight, eps, weight_offset, None, False)[0]
    return dx


def add_backward(
    dy: Tensor,
    dsum: Tensor | None,
    residual_out: Tensor,
    weight: Tensor,
    eps: float,
    *,
    weight_offset: float = 0.0,
    dx_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dresidual, dweight) of the fused add; dresidual is empty where dx has its dtype and serves both."""
    result: tuple[Tensor, Tensor, Tensor] = _backward(dy, dsum, residual_out, weight, eps, weight_offset, dx_dtype, True)
    return result


def add_backward_input(
    dy: Tensor,
    dsum: Tensor | None,
    residual_out: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    dx_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(dx, dresidual) of the fused add."""
    dx, dresidual, _ = _backward(dy, dsum, residual_out, weight, eps, weight_offset, dx_dtype, False)
    return dx, dresidual


def _backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    dx_dtype: torch.dtype | None,
    weight_grad: bool,
) -> Any:
    check_backward(dy, x, weight, eps, weight_offset, dsum, dx_dtype)
    dx = torch.empty(x.shape, dtype=dx_dtype or x.dtype)
    dresidual = torch.empty(0 if dx.dtype is x.dtype else x.shape, dtype=x.dtype)
    compute = compute_dtype(x.dtype, dx.dtype)
    hidden = x.shape[-1]
    dweight = torch.zeros(hidden, dtype=compute) if weight_grad else None
    wide_weight = None if weight is None else weight.to(compute) + weight_offset
    if x.numel():
        most = max(1, BLOCK_ELEMENTS // hidden)
        dy_blocks, x_blocks, dx_blocks = (t.reshape(-1, hidden).split(most) for t in (dy, x, dx))
        dsum_blocks, dresidual_blocks = (
            t.reshape(-1, hidden).split(most) if t is not None and t.numel() else [None] * len(x_blocks)
            for t in (dsum, dresidual)
        )
        for block in zip(dy_blocks, x_blocks, dx_blocks, dsum_blocks, dresidual_blocks, strict=True):
            _block(*block, wide_weight, dweight, eps, compute)
    return dx, dresidual, None if dweight is None or weight is None else dweight.to(weight.dtype)


def _block(
    dy: Tensor,
    x: Tensor,
    dx: Tensor,
    dsum: Tensor | None,
    dresidual: Tensor | None,
    weight: Tensor | None,
    dweight: Tensor | None,
    eps: float,
    compute: torch.dtype,
) -> None:
    """One block of rows: dx (and dresidual) written, dweight added to."""
    # Dense: a sum over any other rows adds in another order.
    wide, h = x.to(compute).contiguous(), dy.to(compute).contiguous()
    scale = power_of_two_scale(wide, eps)
    normalised = wide * scale
    # scale² may overflow where eps · scale² does not.
    rstd = (_row_mean(normalised.square()) + eps * scale * scale).rsqrt_()
    normalised.mul_(rstd)
    if dweight is not None:
        dweight += (h * normalised).sum(0)
    if weight is not None:
        h = h * weight
    gradient = torch.addcmul(h, normalised, _row_mean(h * normalised), value=-1).mul_(rstd).mul_(scale)
    if dsum is not None:
        gradient += dsum
    dx.copy_(gradient)
    if dresidual is not None:
        dresidual.copy_(gradient)


def _row_mean(values: Tensor) -> Tensor:
    """The mean of each row, ``[rows, 1]``, summed in fp64: the same bits wherever the row stands."""
    return (row_sum(values.double()) / values.shape[1]).to(values.dtype)

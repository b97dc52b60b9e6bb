"""The quantising operators on the CPU: the norm of cpu.py in fp32, unrounded, then codes, over blocks of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rmsnorm_ops import cpu, quantise
from rmsnorm_ops.contracts_quant import (
    Scaling,
    check_quant,
    check_static_scale,
    empty_codes,
    scaling,
    smallest_scales,
)  # fmt: skip


def forward_quant(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    dtype: torch.dtype,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """(q, scale); arguments, shapes and errors are those of ``torch.ops.rmsnorm.forward_quant``."""
    check_quant(x, None, weight, eps, weight_offset, dtype)
    how = scaling(x, **options)
    scale = how.empty(x)
    return _quantised(x, x.dtype, weight, eps, dtype, scale, how, weight_offset, round_before_weight), scale


def forward_quant_static(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    eps: float,
    *,
    dtype: torch.dtype,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> Tensor:
    """q, with the one scale that is given."""
    check_quant(x, None, weight, eps, weight_offset, dtype)
    check_static_scale(scale, x)
    return _quantised(x, x.dtype, weight, eps, dtype, scale, None, weight_offset, round_before_weight)


def add_forward_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    dtype: torch.dtype,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, scale, residual_out): ``forward_quant`` of the sum as it is stored, in residual's dtype."""
    check_quant(x, residual, weight, eps, weight_offset, dtype)
    how = scaling(x, **options)
    scale, total = how.empty(x), _sum(x, residual)
    return _quantised(total, x.dtype, weight, eps, dtype, scale, how, weight_offset, round_before_weight), scale, total


def add_forward_quant_static(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    eps: float,
    *,
    dtype: torch.dtype,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> tuple[Tensor, Tensor]:
    """(q, residual_out), with the one scale that is given."""
    check_quant(x, residual, weight, eps, weight_offset, dtype)
    check_static_scale(scale, x)
    total = _sum(x, residual)
    return _quantised(total, x.dtype, weight, eps, dtype, scale, None, weight_offset, round_before_weight), total


def _sum(x: Tensor, residual: Tensor) -> Tensor:
    """residual_out: one rounding, for torch adds halves in fp32."""
    total = torch.empty(x.shape, dtype=residual.dtype)
    return torch.add(x, residual, out=total) if x.dtype is residual.dtype else total.copy_(x.float().add(residual))


def _quantised(
    x: Tensor,
    round_to: torch.dtype,
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    scale: Tensor,
    how: Scaling | None,
    weight_offset: float,
    round_before_weight: bool,
) -> Tensor:
    """q of the norm of x; the scales are found and written to ``scale``, or without ``how`` taken from it."""
    q = empty_codes(x, dtype)
    if x.numel() == 0:
        if how is not None:
            smallest_scales(scale)
        return q
    hidden = x.shape[-1]
    most = max(1, cpu.BLOCK_ELEMENTS // hidden)
    # Rows of scale, whose leading dimensions are dense among themselves in either order.
    scale_rows = scale if how is None else scale.view(-1, scale.shape[-1])
    x_rows, q_rows = x.reshape(-1, hidden), q.view(-1, hidden)
    for start in range(0, x_rows.shape[0], most):
        rows = slice(start, start + most)
        y = quantise.norm(cpu.forward, x_rows[rows].float(), round_to, weight, eps, weight_offset, round_before_weight)
        if how is None:
            q_rows[rows] = quantise.static(y, scale, dtype)
        else:
            q_rows[rows], scale_rows[rows] = quantise.dynamic(y, dtype, how._replace(column_major=False))
    return q

"""The quantising operators in plain torch, for devices without Triton and for vmap. Not bitwise the fused kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rmsnorm_ops import plain, quantise
from rmsnorm_ops.contracts_quant import check_quant, check_static_scale, scaling


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
    """(q, scale) of the norm of x. See docs/quantisation.md."""
    check_quant(x, None, weight, eps, weight_offset, dtype)
    how = scaling(x, **options)
    return quantise.dynamic(_norm(x.float(), x.dtype, weight, eps, weight_offset, round_before_weight), dtype, how)


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
    """q of the norm of x, with the one scale that is given."""
    check_quant(x, None, weight, eps, weight_offset, dtype)
    check_static_scale(scale, x)
    return quantise.static(_norm(x.float(), x.dtype, weight, eps, weight_offset, round_before_weight), scale, dtype)


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
    """(q, scale, residual_out): ``forward_quant`` of residual_out = x + residual as it is stored."""
    check_quant(x, residual, weight, eps, weight_offset, dtype)
    how = scaling(x, **options)
    residual_out = _sum(x, residual)
    y = _norm(residual_out.float(), x.dtype, weight, eps, weight_offset, round_before_weight)
    return *quantise.dynamic(y, dtype, how), residual_out


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
    residual_out = _sum(x, residual)
    y = _norm(residual_out.float(), x.dtype, weight, eps, weight_offset, round_before_weight)
    return quantise.static(y, scale, dtype), residual_out


_norm = partial(quantise.norm, plain.forward)


def _sum(x: Tensor, residual: Tensor) -> Tensor:
    return quantise.dense((x.float() + residual.float()).to(residual.dtype))

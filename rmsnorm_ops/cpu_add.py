"""The fused residual add on the CPU: the sum as it is stored, then the norm of that."""

from __future__ import annotations

import torch
from torch import Tensor

from rmsnorm_ops import cpu
from rmsnorm_ops.contracts import check_add_forward, compute_dtype


def add_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> tuple[Tensor, Tensor]:
    """(y, residual_out); arguments, shapes and errors are those of ``torch.ops.rmsnorm.add_forward``.

    Where x and residual have one dtype, y is bitwise ``forward(residual_out)``.
    """
    check_add_forward(x, residual, weight, eps, weight_offset)
    compute = compute_dtype(x.dtype, residual.dtype)
    residual_out = torch.empty(x.shape, dtype=residual.dtype)
    if x.dtype is residual.dtype:
        # One rounding: torch adds halves in fp32.
        torch.add(x, residual, out=residual_out)
        options = {"weight_offset": weight_offset, "round_before_weight": round_before_weight}
        return cpu.forward(residual_out, weight, eps, **options), residual_out  # type: ignore[arg-type]
    residual_out.copy_(x.to(compute).add(residual))
    wide = residual_out.to(compute)
    if weight is None or not round_before_weight:
        return cpu.forward(wide, weight, eps, weight_offset=weight_offset).to(x.dtype), residual_out
    normalised = cpu.forward(wide, None, eps).to(x.dtype)
    return (normalised.to(compute) * (weight.to(compute) + weight_offset)).to(x.dtype), residual_out

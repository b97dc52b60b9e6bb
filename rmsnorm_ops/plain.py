"""The operators in plain torch: differentiable to any order, on any device, under any transform.

What devices without Triton run, and what torch.func, forward-mode AD and double backward differentiate.
It honours the numerics contract (docs/numerics.md) but is not bitwise the fused kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rmsnorm_ops.contracts import check_forward, compute_dtype


def forward(
    x: Tensor, weight: Tensor | None, eps: float, *, weight_offset: float = 0.0, round_before_weight: bool = False
) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · (weight + weight_offset)``, dense, in x's dtype. See docs/numerics.md."""
    check_forward(x, weight, eps, weight_offset)
    compute = compute_dtype(x.dtype)
    y = _normalised(x.to(compute), eps)
    if weight is not None:
        if round_before_weight:
            y = y.to(x.dtype).to(compute)
        y = y * (weight.to(compute) + weight_offset)
    return y.to(x.dtype).contiguous()


def _normalised(x: Tensor, eps: float) -> Tensor:
    if x.shape[-1] == 0:
        return x.clone()
    scale = _power_of_two_scale(x.detach(), eps)
    scaled = x * scale
    # Both factors of scale² are applied apart: scale² itself may overflow where eps·scale² does not.
    return scaled * torch.rsqrt(scaled.square().mean(-1, keepdim=True) + eps * scale * scale)


def _power_of_two_scale(x: Tensor, eps: float) -> Tensor:
    """A power of two a row that brings max(|x|, sqrt(eps)) near 1, so that no square over- or underflows. No gradient flows
    through it: the norm does not depend on it."""
    smallest, largest = (2.0**-900, 2.0**1022) if x.dtype is torch.float64 else (2.0**-100, 2.0**126)
    magnitude = x.abs().amax(-1, keepdim=True).clamp(max(smallest, min(eps**0.5, largest)), largest)
    mantissa, _ = torch.frexp(torch.nan_to_num(magnitude, nan=1.0))
    return mantissa / torch.nan_to_num(magnitude, nan=1.0)

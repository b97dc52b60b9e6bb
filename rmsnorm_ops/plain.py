"""The operators in plain torch: differentiable to any order, on any device, under any transform.

What devices without Triton run, and what torch.func, forward-mode AD and double backward differentiate.
It honours the numerics contract (docs/numerics.md) but is not bitwise the fused kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rmsnorm_ops.contracts import check_add_forward, check_backward, check_forward, compute_dtype


def forward(
    x: Tensor, weight: Tensor | None, eps: float, *, weight_offset: float = 0.0, round_before_weight: bool = False
) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · (weight + weight_offset)``, dense, in x's dtype. See docs/numerics.md."""
    check_forward(x, weight, eps, weight_offset)
    wide = x.to(compute_dtype(x.dtype))
    return _rounded(_weighted(wide, weight, eps, weight_offset, x.dtype if round_before_weight else None), x.dtype)


def add_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> tuple[Tensor, Tensor]:
    """residual_out = x + residual in residual's dtype, and the norm of it in x's."""
    check_add_forward(x, residual, weight, eps, weight_offset)
    compute = compute_dtype(x.dtype, residual.dtype)
    residual_out = _rounded((x.to(compute) + residual.to(compute)), residual.dtype)
    y = _weighted(residual_out.to(compute), weight, eps, weight_offset, x.dtype if round_before_weight else None)
    return _rounded(y, x.dtype), residual_out


def backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """(dx, dweight) of ``forward``."""
    check_backward(dy, x, weight, eps, weight_offset)
    dx, normalised = _input_gradient(dy, x, weight, eps, weight_offset, compute_dtype(x.dtype))
    return _rounded(dx, x.dtype), _weight_gradient(dy, normalised, weight)


def backward_input(dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    """dx of ``forward``."""
    check_backward(dy, x, weight, eps, weight_offset)
    return _rounded(_input_gradient(dy, x, weight, eps, weight_offset, compute_dtype(x.dtype))[0], x.dtype)


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
    """(dx, dresidual, dweight) of ``add_forward``; dresidual is empty where dx has its dtype and serves both."""
    check_backward(dy, residual_out, weight, eps, weight_offset, dsum, dx_dtype)
    dx, dresidual, normalised = _sum_gradient(dy, dsum, residual_out, weight, eps, weight_offset, dx_dtype)
    return dx, dresidual, _weight_gradient(dy, normalised, weight)


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
    """(dx, dresidual) of ``add_forward``; dresidual is empty where dx has its dtype and serves both."""
    check_backward(dy, residual_out, weight, eps, weight_offset, dsum, dx_dtype)
    return _sum_gradient(dy, dsum, residual_out, weight, eps, weight_offset, dx_dtype)[:2]


def _weighted(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, rounded_to: torch.dtype | None) -> Tensor:
    """The norm in x's dtype, the compute type; x · rstd is rounded to ``rounded_to`` where that is given."""
    y = _normalised(x, eps)[0]
    if weight is None:
        return y
    if rounded_to is not None:
        y = y.to(rounded_to).to(x.dtype)
    return y * (weight.to(x.dtype) + weight_offset)


def _normalised(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x · rstd, rstd / p, p), with a power of two for p a row."""
    scale = power_of_two_scale(x.detach(), eps)
    # Both factors of scale² are applied apart: scale² itself may overflow where eps · scale² does not.
    rstd = torch.rsqrt(_row_mean((x * scale).square()) + eps * scale * scale)
    # Scaled down as far as its squares need, a huge row would lose bits of its small elements; 1/16 keeps rstd normal.
    prescale = scale.clamp(min=0.0625)
    rstd = rstd * (scale / prescale)
    return x * prescale * rstd, rstd, prescale


def _row_mean(terms: Tensor) -> Tensor:
    """The mean of each row, ``[..., 1]``, summed by halves: an element takes part in log2(hidden) additions.

    torch's mean adds long chains, which cost y up to 9 ulp on rows of equal numbers and one spike.
    """
    hidden = terms.shape[-1]
    if hidden == 0:
        return terms.sum(-1, keepdim=True)
    while (columns := terms.shape[-1]) > 1:
        half = columns // 2
        middle = terms[..., half : columns - half]
        terms = terms[..., :half] + terms[..., columns - half :]
        if columns % 2:
            terms = torch.cat((terms, middle), -1)
    return terms / hidden


def power_of_two_scale(x: Tensor, eps: float) -> Tensor:
    """A power of two a row that brings max(|x|, sqrt(eps)) near 1, so that no square over- or underflows.

    No gradient flows through it: the norm does not depend on it.
    """
    if x.shape[-1] == 0:
        return torch.ones_like(x.sum(-1, keepdim=True))
    smallest, largest = (2.0**-900, 2.0**1022) if x.dtype is torch.float64 else (2.0**-100, 2.0**126)
    magnitude = x.abs().amax(-1, keepdim=True).clamp(max(smallest, min(eps**0.5, largest)), largest).nan_to_num(nan=1.0)
    mantissa, _ = torch.frexp(magnitude)
    return mantissa / magnitude


def _input_gradient(
    dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, compute: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(dx, x · rstd) in the compute type: dx = rstd · (h − x̂ · mean(h · x̂)) with h = dy · (weight + weight_offset)."""
    normalised, rstd, scale = _normalised(x.to(compute), eps)
    h = dy.to(compute)
    if weight is not None:
        h = h * (weight.to(compute) + weight_offset)
    return (h - normalised * (h * normalised).mean(-1, keepdim=True)) * rstd * scale, normalised


def _sum_gradient(
    dy: Tensor,
    dsum: Tensor | None,
    residual_out: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    dx_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dresidual, x · rstd): what ``add_forward``'s two gradients become."""
    dx_dtype = dx_dtype or residual_out.dtype
    compute = compute_dtype(dx_dtype, residual_out.dtype)
    gradient, normalised = _input_gradient(dy, residual_out, weight, eps, weight_offset, compute)
    if dsum is not None:
        gradient = gradient + dsum.to(compute)
    dx = _rounded(gradient, dx_dtype)
    dresidual = residual_out.new_empty(0) if dx_dtype is residual_out.dtype else _rounded(gradient, residual_out.dtype)
    return dx, dresidual, normalised


def _weight_gradient(dy: Tensor, normalised: Tensor, weight: Tensor) -> Tensor:
    """Σ_rows dy · x · rstd, accumulated in the compute type."""
    product = dy.to(normalised.dtype) * normalised
    leading = list(range(product.dim() - 1))
    return _rounded((product.sum(leading) if leading else product), weight.dtype)


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """``value`` in ``dtype``, dense; the views give dimensions of size 1 the strides that every implementation gives them."""
    value = value.to(dtype).contiguous()
    if hasattr(value, "placements"):  # a DTensor whose rows are unevenly sharded cannot be flattened
        return value
    return value.view(-1).view(value.shape)

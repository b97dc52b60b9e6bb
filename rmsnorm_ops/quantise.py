"""Codes and scales of an fp32 y in plain torch: the rules of docs/quantisation.md, an operation a line."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from rmsnorm_ops.contracts_quant import FORMATS, SMALLEST_SCALE, Scaling, empty_codes, smallest_scales


def norm(
    forward: Callable[..., Tensor], wide: Tensor, x_dtype: torch.dtype, weight: Tensor | None, eps: float, weight_offset: float,
    round_before_weight: bool,
) -> Tensor:  # fmt: skip
    """The y of fp32 ``wide``, unrounded, by the forward of an implementation; x · rstd may be rounded to x's dtype first."""
    if weight is None or not round_before_weight:
        return forward(wide, weight, eps, weight_offset=weight_offset)
    return forward(wide, None, eps).to(x_dtype).float() * (weight.float() + weight_offset)


def dynamic(y: Tensor, dtype: torch.dtype, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """(q, scale) of fp32 y ``[..., hidden]``, with scales from the largest magnitude of each row or group."""
    hidden = y.shape[-1]
    if y.numel() == 0:
        return empty_codes(y, dtype), smallest_scales(scaling.empty(y))
    if scaling.group < hidden:
        padding = -hidden % scaling.group
        grouped = torch.nn.functional.pad(y, (0, padding)).unflatten(-1, (-1, scaling.group))
    else:
        grouped = y.unsqueeze(-2)
    found = scales(grouped.abs().amax(-1), FORMATS[dtype].qmax, scaling)
    q = codes(grouped / found.unsqueeze(-1), dtype).flatten(-2)[..., :hidden]
    return dense(q), _stored(found, scaling)


def static(y: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """q of fp32 y with the one scale of all."""
    return dense(codes(y / scale.reshape(()), dtype))


def scales(amax: Tensor, qmax: float, scaling: Scaling) -> Tensor:
    """max(amax / qmax, 2⁻¹²⁶) in fp32, at most max_scale, up to a power of two where asked; NaN where amax is not finite."""
    scale = (amax / qmax).clamp(min=SMALLEST_SCALE)
    if scaling.max_scale is not None:
        scale = scale.clamp(max=ctypes.c_float(scaling.max_scale).value)
    if scaling.power_of_two:
        mantissa, exponent = torch.frexp(scale)  # mantissa in [0.5, 1)
        scale = torch.ldexp(torch.ones_like(scale), torch.where(mantissa == 0.5, exponent - 1, exponent))
    return torch.where(amax.isfinite(), scale, torch.nan)


def codes(quotient: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest codes, ties to even, saturated; NaN stays NaN, and is 0 in int8."""
    qmax = FORMATS[dtype].qmax
    if dtype is torch.int8:
        return quotient.round().clamp(-qmax, qmax).nan_to_num(nan=0.0).to(dtype)
    # torch's own conversion turns what is too large to NaN or infinity in three of the four.
    return quotient.clamp(-qmax, qmax).to(dtype)


def _stored(found: Tensor, scaling: Scaling) -> Tensor:
    """``found`` as ``scaling.empty`` lays scales out; as an exponent, NaN is 255."""
    found = dense(found.movedim(-1, 0)).movedim(0, -1) if scaling.column_major else dense(found)
    return found.to(scaling.dtype)


def dense(tensor: Tensor) -> Tensor:
    """``tensor`` dense; the views give dimensions of size 1 the strides that every implementation gives them."""
    tensor = tensor.contiguous()
    return tensor.view(-1).view(tensor.shape)

"""The quantising operators as functions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rmsnorm_ops import functional, ops_quant
from rmsnorm_ops.autograd import eager


class RMSNormQuantResult(NamedTuple):
    """What ``rms_norm_quant`` returns."""

    q: Tensor
    scale: Tensor


class AddRMSNormQuantResult(NamedTuple):
    """What ``add_rms_norm_quant`` returns."""

    q: Tensor
    scale: Tensor
    residual_out: Tensor


def rms_norm_quant(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    dtype: torch.dtype,
    group_size: int | None = None,
    scale: Tensor | None = None,
    max_scale: float | None = None,
    power_of_two_scale: bool = False,
    column_major_scale: bool = False,
    scale_dtype: torch.dtype | None = None,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> RMSNormQuantResult:
    """Root-mean-square norm over the last dimension, quantised to a byte an element in the same pass.

    ``q = saturate(round(y / scale))`` of the unrounded fp32 y of ``rms_norm``, to the nearest code, ties to even; y ≈ q · scale.

    Args:
        x: ``[..., hidden]``, float16, bfloat16 or float32, any strides, as in ``rms_norm``.
        weight, eps, weight_offset, round_before_weight: as in ``rms_norm``.
        dtype: of q: float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz or int8.
        group_size: None for a scale a row, or 32, 64 or 128 for a scale a group of as many neighbours in a row; the last group
            of a row is shorter where hidden is no multiple of it.
        scale: float32 tensor of one element, positive and finite (it is not looked at): the scale of all, in place of scales that
            are found. The next five cannot be given with it, nor group_size.
        max_scale: no scale is larger; what lies beyond saturates.
        power_of_two_scale: round scales up to powers of two (ue8m0).
        column_major_scale: scales lie ``[groups, ...]`` in memory, as block-scaled GEMMs read them.
        scale_dtype: float32 (None), or float8_e8m0fnu for powers of two stored as their exponents (MXFP8, with groups of 32).

    Returns:
        RMSNormQuantResult(q, scale): q ``[..., hidden]``, dense; scale ``[..., 1]`` or ``[..., groups]``, or the one given.

    Raises:
        TypeError, ValueError: as ``rms_norm``; float64 x; another dtype, group_size, max_scale, scale_dtype or scale.
        NotImplementedError: something requires grad, and grad mode is on: codes have no gradient.
    """
    weight = functional._weight(weight)
    eps = functional._eps(eps, torch.float32)
    options = functional._options(weight_offset, round_before_weight)
    chosen = _given(group_size, max_scale, power_of_two_scale, column_major_scale, scale_dtype)
    if scale is not None:
        _refuse_with_scale(chosen)
        static = ops_quant.forward_quant_static if eager(x) else torch.ops.rmsnorm.forward_quant_static.default
        return RMSNormQuantResult(static(x, weight, scale, eps, dtype=dtype, **options), scale)
    operator = ops_quant.forward_quant if eager(x) else torch.ops.rmsnorm.forward_quant.default
    return RMSNormQuantResult(*operator(x, weight, eps, dtype=dtype, **chosen, **options))


def add_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    dtype: torch.dtype,
    group_size: int | None = None,
    scale: Tensor | None = None,
    max_scale: float | None = None,
    power_of_two_scale: bool = False,
    column_major_scale: bool = False,
    scale_dtype: torch.dtype | None = None,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> AddRMSNormQuantResult:
    """Residual add, norm and quantisation in one pass: ``residual_out = x + residual`` and ``rms_norm_quant(residual_out, …)``.

    Args:
        x: ``[..., hidden]``, as in ``rms_norm_quant``.
        residual: x's shape (no broadcasting), float16, bfloat16 or float32, any strides.
        weight, eps, weight_offset, round_before_weight: as in ``add_rms_norm``.
        dtype, group_size, scale, max_scale, power_of_two_scale, column_major_scale, scale_dtype: as in ``rms_norm_quant``.

    Returns:
        AddRMSNormQuantResult(q, scale, residual_out): residual_out in residual's dtype, dense.

    Raises:
        TypeError, ValueError, NotImplementedError: as ``rms_norm_quant``; and where residual has another shape or device than x.
    """
    weight = functional._weight(weight)
    eps = functional._eps(eps, torch.float32)
    options = functional._options(weight_offset, round_before_weight)
    chosen = _given(group_size, max_scale, power_of_two_scale, column_major_scale, scale_dtype)
    if scale is not None:
        _refuse_with_scale(chosen)
        static = ops_quant.add_forward_quant_static if eager(x) else torch.ops.rmsnorm.add_forward_quant_static.default
        q, residual_out = static(x, residual, weight, scale, eps, dtype=dtype, **options)
        return AddRMSNormQuantResult(q, scale, residual_out)
    operator = ops_quant.add_forward_quant if eager(x) else torch.ops.rmsnorm.add_forward_quant.default
    return AddRMSNormQuantResult(*operator(x, residual, weight, eps, dtype=dtype, **chosen, **options))


def _given(
    group_size: int | None, max_scale: float | None, power_of_two: bool, column_major: bool, scale_dtype: torch.dtype | None
) -> dict[str, Any]:
    """Those that are not their defaults, which the dispatcher need not parse."""
    options = {
        "group_size": group_size,
        "max_scale": max_scale,
        "power_of_two_scale": power_of_two or None,
        "column_major_scale": column_major or None,
        "scale_dtype": scale_dtype,
    }
    return {name: value for name, value in options.items() if value is not None}


def _refuse_with_scale(options: dict[str, Any]) -> None:
    if options:
        raise ValueError(f"{next(iter(options))} must not be given with scale, which is then the one scale of all")

"""The operators as functions: names, defaults, and torch's rule for eps=None."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rmsnorm_ops import ops
from rmsnorm_ops.autograd import eager
from rmsnorm_ops.contracts import default_eps


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> Tensor:
    """Root-mean-square norm over the last dimension.

    ``y = x / sqrt(mean(x²) + eps) · (weight + weight_offset)``, computed in fp32 (fp64 for fp64 x) and rounded once.

    Args:
        x: ``[..., hidden]``, float16, bfloat16, float32 or float64, any strides. No copy is made where the last stride is
            1 and the leading dims collapse to two strides.
        weight: ``[hidden]``, any of those dtypes, or None for no weight.
        eps: added to the mean square; finite and not negative. None means the machine epsilon of the compute type, as in
            torch.nn.functional.rms_norm.
        weight_offset: added to weight in the compute type (1.0 for Gemma's convention).
        round_before_weight: round x / sqrt(…) to x's dtype before the weight multiplies it (Llama's convention in
            Hugging Face's transformers).

    Returns:
        ``[..., hidden]`` in x's dtype, dense row-major, never an alias of x.

    Raises:
        TypeError: a dtype outside those above, or weight is not a tensor.
        ValueError: a shape, device or value that breaks the contract.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019 (arXiv:1910.07467).
    """
    weight = _weight(weight)
    operator = ops.forward if eager(x) else torch.ops.rmsnorm.forward.default
    y: Tensor = operator(x, weight, _eps(eps, x.dtype), **_options(weight_offset, round_before_weight))
    return y


class AddRMSNormResult(NamedTuple):
    """What ``add_rms_norm`` returns."""

    y: Tensor
    residual_out: Tensor


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> AddRMSNormResult:
    """Residual add and norm in one pass: ``residual_out = x + residual`` and ``y = rms_norm(residual_out, …)``.

    The sum is stored in residual's dtype and the norm is of what is stored; where x and residual have one dtype, y is bitwise
    ``rms_norm(residual_out, …)``. Backward folds the gradient that arrives at residual_out into the same kernel.

    Args:
        x: ``[..., hidden]``, as in ``rms_norm``.
        residual: x's shape (no broadcasting), any of the four dtypes (an fp32 residual stream with bf16 x is usual), any
            strides.
        weight, eps, weight_offset, round_before_weight: as in ``rms_norm``; eps=None goes by the compute type, fp64 where x
            or residual is fp64.

    Returns:
        AddRMSNormResult(y, residual_out): y in x's dtype, residual_out in residual's, both dense.

    Raises:
        TypeError, ValueError: as ``rms_norm``; and where residual has another shape or device than x.
    """
    weight = _weight(weight)
    eps = _eps(eps, torch.promote_types(x.dtype, residual.dtype))
    operator = ops.add_forward if eager(x) else torch.ops.rmsnorm.add_forward.default
    return AddRMSNormResult(*operator(x, residual, weight, eps, **_options(weight_offset, round_before_weight)))


def _weight(weight: Tensor | None) -> Tensor | None:
    if isinstance(weight, (int, float, list, tuple)):  # the dispatcher refuses anything else, and takes an fx.Proxy
        raise TypeError(
            f"weight must be a Tensor or None, got {type(weight).__name__}: the norm is over the last dimension, and "
            "takes no normalized_shape"
        )
    return weight


def _eps(eps: float | None, dtype: torch.dtype) -> float:
    return default_eps(dtype) if eps is None else eps


def _options(weight_offset: float, round_before_weight: bool) -> dict[str, Any]:
    """Those that are not their defaults: the dispatcher takes 2.6 µs to parse what is passed by keyword."""
    options: dict[str, Any] = {}
    if weight_offset:
        options["weight_offset"] = weight_offset
    if round_before_weight:
        options["round_before_weight"] = True
    return options

"""The executable specification: the textbook formula in numpy's extended precision, with no rounding before the caller's.

numpy's longdouble has 64 significand bits and a range of 10^±4932 on x86-64, so no square overflows and the oracle is
about 2000 times finer than fp64. Where longdouble is plain fp64 (``EXTENDED`` is False), fp64 results cannot be judged.
numpy is a test and bench dependency: nothing on the operators' path imports this module.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rmsnorm_ops.contracts import compute_dtype

EXTENDED = np.finfo(np.longdouble).nmant > np.finfo(np.float64).nmant
Array = np.ndarray


def wide(tensor: Tensor) -> Array:
    """The exact values of ``tensor`` in extended precision."""
    return tensor.detach().cpu().double().numpy().astype(np.longdouble)


def operand(value: Tensor | float, x: Tensor, compute: torch.dtype | None = None) -> Array:
    """``value`` as the operators see it: rounded once to the compute type (x's, unless given), then exact."""
    compute = compute or compute_dtype(x.dtype)
    return wide((value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)).to(compute))


def effective_weight(x: Tensor, weight: Tensor | None, weight_offset: float, compute: torch.dtype | None = None) -> Array:
    """weight + weight_offset, or ones without a weight."""
    if weight is None:
        return np.ones(x.shape[-1], dtype=np.longdouble)
    return operand(weight, x, compute) + operand(weight_offset, x, compute)


def rstd(x: Tensor, eps: float, compute: torch.dtype | None = None) -> Array:
    """1 / sqrt(mean(x²) + eps), one a row, with a last dimension of 1."""
    with np.errstate(all="ignore"):
        return 1 / np.sqrt(np.mean(wide(x) ** 2, axis=-1, keepdims=True) + operand(eps, x, compute))


def forward(x: Tensor, weight: Tensor | None, eps: float, *, weight_offset: float = 0.0) -> Array:
    """y before its rounding: x · rstd · (weight + weight_offset)."""
    with np.errstate(all="ignore"):
        return wide(x) * rstd(x, eps) * effective_weight(x, weight, weight_offset)


class Gradients(NamedTuple):
    """The exact gradients, and the magnitudes of what they are differences and sums of."""

    dx: Array
    dweight: Array
    scaled_h: Array  # rstd · |h|
    scaled_correction: Array  # rstd · |x̂| · mean|h · x̂|
    dweight_magnitude: Array  # Σ_rows |dy · x̂|


def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    dsum: Tensor | None = None,
    compute: torch.dtype | None = None,
) -> Gradients:
    """dx = rstd · (h − x̂ · mean(h · x̂)) + dsum with h = dy · (weight + weight_offset) and x̂ = x · rstd; dweight = Σ dy · x̂."""
    with np.errstate(all="ignore"):
        scale = rstd(x, eps, compute)
        normalised = wide(x) * scale
        h = operand(dy, x, compute) * effective_weight(x, weight, weight_offset, compute)
        dx = scale * (h - normalised * np.mean(h * normalised, axis=-1, keepdims=True))
        correction = scale * np.abs(normalised) * np.mean(np.abs(h * normalised), axis=-1, keepdims=True)
        product = (operand(dy, x, compute) * normalised).reshape(-1, x.shape[-1])
        added = 0 if dsum is None else operand(dsum, x, compute)
        return Gradients(dx + added, product.sum(0), scale * np.abs(h), correction, np.abs(product).sum(0))

"""The executable specification: the textbook formula in numpy's extended precision, with no rounding before the caller's.

numpy's longdouble has 64 significand bits and a range of 10^±4932 on x86-64, so no square overflows and the oracle is
about 2000 times finer than fp64. Where longdouble is plain fp64 (``EXTENDED`` is False), fp64 results cannot be judged.
numpy is a test and bench dependency: nothing on the operators' path imports this module.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rmsnorm_ops.contracts import compute_dtype

EXTENDED = np.finfo(np.longdouble).nmant > np.finfo(np.float64).nmant
Array = np.ndarray


def wide(tensor: Tensor) -> Array:
    """The exact values of ``tensor`` in extended precision."""
    return tensor.detach().cpu().double().numpy().astype(np.longdouble)


def operand(value: Tensor | float, x: Tensor) -> Array:
    """``value`` as the operators see it: rounded once to x's compute type, then exact."""
    compute = compute_dtype(x.dtype)
    return wide((value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)).to(compute))


def effective_weight(x: Tensor, weight: Tensor | None, weight_offset: float) -> Array:
    """weight + weight_offset, or ones without a weight."""
    if weight is None:
        return np.ones(x.shape[-1], dtype=np.longdouble)
    return operand(weight, x) + operand(weight_offset, x)


def rstd(x: Tensor, eps: float) -> Array:
    """1 / sqrt(mean(x²) + eps), one a row, with a last dimension of 1."""
    with np.errstate(all="ignore"):
        return 1 / np.sqrt(np.mean(wide(x) ** 2, axis=-1, keepdims=True) + operand(eps, x))


def forward(x: Tensor, weight: Tensor | None, eps: float, *, weight_offset: float = 0.0) -> Array:
    """y before its rounding: x · rstd · (weight + weight_offset)."""
    with np.errstate(all="ignore"):
        return wide(x) * rstd(x, eps) * effective_weight(x, weight, weight_offset)

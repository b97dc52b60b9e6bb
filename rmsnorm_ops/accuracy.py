"""How far a result is from the oracle, and how far it may be. The only tolerances of the project; docs/numerics.md derives them.

The unit is the ulp: the spacing of the result's dtype in the binade of the oracle's value, never finer than the smallest
subnormal. A correctly rounded result is within 0.5 ulp.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rmsnorm_ops import reference
from rmsnorm_ops.contracts import compute_dtype

# fp16, bf16: half an ulp of the store, and 2⁻⁷ ulp for fp32 arithmetic that is at least 2¹² times finer than the store.
# fp32, fp64: the sum, the mean, eps, rsqrt, two products and the store, each within half an ulp, add up to less than 4.
FORWARD_ULP = {torch.float16: 0.5 + 2**-7, torch.bfloat16: 0.5 + 2**-7, torch.float32: 4.0, torch.float64: 4.0}
# Rounding x·rstd first is a relative error of half an ulp there, which the weight can carry to a whole ulp of y.
ROUNDED_BEFORE_WEIGHT_ULP = 1.0
# Triton's interpreter truncates when it stores bf16, so each rounding there is off by up to one ulp in place of half.
TRUNCATED_STORE_ULP = 0.5
# It also rounds between the multiplication and the addition of an fma, of which the row's statistic has three.
UNFUSED_ULP = 1.0


def forward_bound(dtype: torch.dtype, *, round_before_weight: bool = False, interpreted: bool = False) -> float:
    """The largest error in ulp that the contract allows y."""
    bound = FORWARD_ULP[dtype] + ROUNDED_BEFORE_WEIGHT_ULP * round_before_weight
    if interpreted:
        if dtype is torch.bfloat16:
            bound += TRUNCATED_STORE_ULP * (3 if round_before_weight else 1)
        elif dtype is not torch.float16:
            bound += UNFUSED_ULP
    return bound


def forward_error(
    y: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> float:
    """The largest error of y in ulp. x·rstd may be subnormal and lose bits that a large weight then shows: half the
    smallest subnormal of the type it was rounded to, times the weight, is not counted (docs/numerics.md)."""
    exact = reference.forward(x, weight, eps, weight_offset=weight_offset)
    rounded_to = x.dtype if round_before_weight else compute_dtype(x.dtype)
    lost = np.abs(reference.effective_weight(x, weight, weight_offset)) * smallest_subnormal(rounded_to)
    return ulp_error(y, exact, lost)


def smallest_subnormal(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps


def ulp_error(actual: Tensor, exact: np.ndarray, allowance: np.ndarray | float = 0.0) -> float:
    """max |actual − exact| in ulp of actual's dtype, less ``allowance``; inf where one is NaN or infinite and the other not."""
    if actual.numel() == 0:
        return 0.0
    got, info = reference.wide(actual), torch.finfo(actual.dtype)
    with np.errstate(all="ignore"):
        # Rounding to nearest goes to infinity from half an ulp above the largest number: infinity stands one ulp above it.
        beyond = np.longdouble(2) ** (np.frexp(info.max)[1])
        ulp = np.ldexp(np.longdouble(info.eps), np.frexp(np.clip(np.abs(exact), info.smallest_normal, info.max))[1] - 1)
        error = np.abs(np.clip(got, -beyond, beyond) - np.clip(exact, -beyond, beyond))
        error = np.maximum(error - np.where(np.isfinite(allowance), allowance, 0), 0) / ulp
    wrong = (np.isnan(got) != np.isnan(exact)) | (np.isinf(exact) & (got != exact))
    return float(np.where(wrong, np.inf, np.where(np.isnan(exact), 0, error)).max())

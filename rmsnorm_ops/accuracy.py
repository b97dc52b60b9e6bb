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
# It and plain torch round between the multiplication and the addition of an fma, of which a row's statistic has three.
UNFUSED_ULP = 1.0


def forward_bound(
    dtype: torch.dtype, *, round_before_weight: bool = False, interpreted: bool = False, unfused: bool = False
) -> float:
    """The largest error in ulp that the contract allows y, of Triton's interpreter and of plain torch (``unfused``) too."""
    bound = FORWARD_ULP[dtype] + ROUNDED_BEFORE_WEIGHT_ULP * round_before_weight
    if interpreted and dtype is torch.bfloat16:
        bound += TRUNCATED_STORE_ULP * (3 if round_before_weight else 1)
    if (interpreted or unfused) and dtype.itemsize > 2:
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
    """The largest error of y in ulp, less what docs/numerics.md does not count: the rounding of weight + weight_offset, and
    what x·rstd loses where it is subnormal and a large weight then shows it."""
    compute = compute_dtype(x.dtype)
    exact = reference.forward(x, weight, eps, weight_offset=weight_offset)
    lost = np.abs(reference.effective_weight(x, weight, weight_offset))
    lost = lost * smallest_subnormal(x.dtype if round_before_weight else compute)
    if weight_offset:
        lost = lost + np.abs(exact) * unit(compute)
    return ulp_error(y, exact, lost)


def input_gradient_error(
    dx: Tensor,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    dsum: Tensor | None = None,
    fp64: bool = False,
    interpreted: bool = False,
) -> float:
    """The largest error of dx (or dresidual) as a fraction of its bound, docs/numerics.md; over 1 it falls short.

    ``fp64``: the compute type is fp64 because of another tensor than x.
    """
    compute = torch.float64 if fp64 else compute_dtype(x.dtype)
    exact = reference.backward(dy, x, weight, eps, weight_offset=weight_offset, dsum=dsum, compute=compute)
    # A sum of n terms in a row may be off by n/4 units; the longest are those of the streamed kernel.
    chain = 16 + x.shape[-1] / 2**14
    bound = unit(compute) * (8 * exact.scaled_h + chain * exact.scaled_correction + 2 * np.abs(exact.dx))
    return _fraction(dx, exact.dx, bound, interpreted)


def weight_gradient_error(
    dweight: Tensor,
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    fp64: bool = False,
    interpreted: bool = False,
) -> float:
    """The largest error of dweight as a fraction of its bound, 8·√rows·u·Σ|dy·x·rstd| and the store; over 1 it falls short."""
    compute = torch.float64 if fp64 else compute_dtype(x.dtype)
    exact = reference.backward(dy, x, weight, eps, compute=compute)
    n_rows = max(1, x.numel() // max(1, x.shape[-1]))
    return _fraction(dweight, exact.dweight, 8 * n_rows**0.5 * unit(compute) * exact.dweight_magnitude, interpreted)


def _fraction(actual: Tensor, exact: np.ndarray, bound: np.ndarray, interpreted: bool) -> float:
    """The error as a fraction of ``bound`` and the rounding of the store, both in ulp of the result."""
    if actual.numel() == 0:
        return 0.0
    store = 0.5 + TRUNCATED_STORE_ULP * (interpreted and actual.dtype is torch.bfloat16)
    if actual.dtype.itemsize == 2:
        # From fp64 to a half type, torch and Triton round on the way to fp32 too.
        bound = bound + unit(torch.float32) * np.abs(exact)
    return ulp_error(actual, exact, bound + 4 * smallest_subnormal(actual.dtype)) / store


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding: 2⁻²⁴ in fp32, 2⁻⁵³ in fp64."""
    return torch.finfo(dtype).eps / 2


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

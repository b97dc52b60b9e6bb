"""The operators as functions: names, defaults, and torch's rule for eps=None."""

from __future__ import annotations

import torch
from torch import Tensor

from rmsnorm_ops import ops  # noqa: F401  (registers them)
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
    if weight is not None and not isinstance(weight, Tensor):
        raise TypeError(
            f"weight must be a Tensor or None, got {type(weight).__name__}: the norm is over the last dimension, and "
            "takes no normalized_shape"
        )
    if eps is None:
        eps = default_eps(x.dtype)
    return torch.ops.rmsnorm.forward.default(x, weight, eps, weight_offset=weight_offset, round_before_weight=round_before_weight)

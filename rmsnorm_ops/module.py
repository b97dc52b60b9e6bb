"""RMSNorm as a module: torch.nn.RMSNorm with this library's operator inside."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rmsnorm_ops.functional import rms_norm


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm over the last dimensions, ``normalized_shape``.

    ``y = x / sqrt(mean(x²) + eps) · (weight + weight_offset)``: constructor, state_dict and the rule for eps=None are those
    of torch.nn.RMSNorm, so either loads the other's checkpoints. The two options are not part of a state_dict.

    Args:
        normalized_shape: the last dimension of x, or a list of the last dimensions.
        eps: added to the mean square; None means the machine epsilon of the compute type.
        elementwise_affine: whether there is a weight, ``normalized_shape``, initialised to 1 − weight_offset.
        device, dtype: of the weight. y has x's dtype whatever weight's is.
        weight_offset: added to weight in the compute type (1.0 for Gemma's convention).
        round_before_weight: round x / sqrt(…) to x's dtype before the weight multiplies it (Llama's convention in
            Hugging Face's transformers).

    Raises:
        ValueError: normalized_shape is empty, or weight_offset comes without a weight.
    """

    weight_offset: float
    round_before_weight: bool

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        round_before_weight: bool = False,
    ) -> None:
        if weight_offset != 0 and not elementwise_affine:
            raise ValueError(f"weight_offset must be 0 when there is no weight, got {weight_offset}")
        # Set first: the parent's constructor initialises the weight.
        self.weight_offset = weight_offset
        self.round_before_weight = round_before_weight
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        if not self.normalized_shape:
            raise ValueError("normalized_shape must name at least one dimension, got ()")

    def reset_parameters(self) -> None:
        """Set the weight so that the norm scales by 1."""
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        """The norm of ``x`` ``[..., *normalized_shape]``, dense and in x's shape and dtype.

        x may have any strides. With several normalised dimensions it is copied where those are not dense among themselves.

        Raises:
            ValueError: x's last dimensions are not ``normalized_shape``; and as ``rms_norm``.
        """
        return _norm_over(
            x,
            self.normalized_shape,
            self.weight,
            self.eps,
            weight_offset=self.weight_offset,
            round_before_weight=self.round_before_weight,
        )

    def extra_repr(self) -> str:
        """torch.nn.RMSNorm's, and the options that are not their defaults."""
        text = super().extra_repr()
        if self.weight_offset:
            text += f", weight_offset={self.weight_offset}"
        if self.round_before_weight:
            text += ", round_before_weight=True"
        return text


# One node of a torch.fx graph: a Proxy has neither a shape to check nor, for eps=None, a dtype.
@torch.fx.wrap
def _norm_over(
    x: Tensor,
    normalized_shape: tuple[int, ...],
    weight: Tensor | None,
    eps: float | None,
    *,
    weight_offset: float,
    round_before_weight: bool,
) -> Tensor:
    """``rms_norm`` over as many last dimensions as ``normalized_shape`` has, after checking that x has them."""
    dims = len(normalized_shape)
    if tuple(x.shape[-dims:]) != normalized_shape:
        raise ValueError(f"x must have last dimensions {normalized_shape}, got shape {tuple(x.shape)}")
    if dims == 1:
        return rms_norm(x, weight, eps, weight_offset=weight_offset, round_before_weight=round_before_weight)
    rows = x.reshape(*x.shape[:-dims], math.prod(normalized_shape))
    flat = None if weight is None else weight.reshape(-1)
    y = rms_norm(rows, flat, eps, weight_offset=weight_offset, round_before_weight=round_before_weight)
    return y.view(x.shape)

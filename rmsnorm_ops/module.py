"""RMSNorm as a module: torch.nn.RMSNorm with this library's operator inside."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rmsnorm_ops.functional import rms_norm


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm over the last dimensions, ``normalized_shape``.

    ``y = x / sqrt(mean(x²) + eps) · (weight + weight_offset)``: constructor, state_dict and the rule for eps=None are those
    of torch.nn.RMSNorm, so either loads the other's checkpoints.

    Args:
        normalized_shape: the last dimension of x, or a list of the last dimensions.
        eps: added to the mean square; None means the machine epsilon of the compute type.
        elementwise_affine: whether there is a weight, ``normalized_shape``, initialised to 1 − weight_offset.
        device, dtype: of the weight.
        weight_offset: added to weight in the compute type (1.0 for Gemma's convention).
        round_before_weight: round x / sqrt(…) to x's dtype before the weight multiplies it (Llama's convention in
            Hugging Face's transformers).

    Raises:
        ValueError: weight_offset without a weight.
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

    def reset_parameters(self) -> None:
        """Set the weight so that the norm scales by 1."""
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: Tensor) -> Tensor:
        """The norm of ``x`` [..., *normalized_shape], in x's shape and dtype.

        Raises:
            ValueError: x's last dimensions are not ``normalized_shape``; and as ``rms_norm``.
        """
        shape, weight = self.normalized_shape, self.weight
        if tuple(x.shape[-len(shape) :]) != shape:
            raise ValueError(f"x must have last dimensions {shape}, got shape {tuple(x.shape)}")
        if len(shape) > 1:
            rows = x.reshape(*x.shape[: -len(shape)], math.prod(shape))
            return self._norm(rows, None if weight is None else weight.reshape(-1)).view(x.shape)
        return self._norm(x, weight)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return rms_norm(x, weight, self.eps, weight_offset=self.weight_offset, round_before_weight=self.round_before_weight)

    def extra_repr(self) -> str:
        """torch.nn.RMSNorm's, and the options that are not their defaults."""
        text = super().extra_repr()
        if self.weight_offset:
            text += f", weight_offset={self.weight_offset}"
        if self.round_before_weight:
            text += ", round_before_weight=True"
        return text

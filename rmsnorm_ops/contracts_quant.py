"""What the quantising operators accept, the formats they write, and the tensors they return: one place for every path."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rmsnorm_ops.contracts import check_add_forward, check_forward

GROUP_SIZES = (32, 64, 128)
# No scale is smaller, so that neither a scale nor its reciprocal is subnormal or infinite.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = torch.finfo(torch.float32).max


class Format(NamedTuple):
    """A dtype of codes: what the kernels call it, and its largest magnitude (int8's is symmetric)."""

    name: str
    qmax: float


FORMATS = {
    torch.float8_e4m3fn: Format("e4m3fn", 448.0),
    torch.float8_e5m2: Format("e5m2", 57344.0),
    torch.float8_e4m3fnuz: Format("e4m3fnuz", 240.0),
    torch.float8_e5m2fnuz: Format("e5m2fnuz", 57344.0),
    torch.int8: Format("int8", 127.0),
}


class Scaling(NamedTuple):
    """How scales are found and stored. ``group`` is the elements that share one: of a row, all of them."""

    group: int
    max_scale: float | None = None
    power_of_two: bool = False
    column_major: bool = False
    dtype: torch.dtype = torch.float32

    def groups(self, hidden: int) -> int:
        """Groups of a row of ``hidden``, the last of which may be shorter."""
        return -(-hidden // self.group) if self.group < hidden else 1

    def empty(self, x: Tensor) -> Tensor:
        """The scales of x's rows, ``[..., groups]``: dense, or ``[groups, ...]`` in memory."""
        leading, groups = x.shape[:-1], self.groups(x.shape[-1])
        if self.column_major:
            return torch.empty((groups, *leading), dtype=self.dtype, device=x.device).movedim(0, -1)
        return torch.empty((*leading, groups), dtype=self.dtype, device=x.device)


def scaling(
    x: Tensor,
    *,
    group_size: int | None = None,
    max_scale: float | None = None,
    power_of_two_scale: bool = False,
    column_major_scale: bool = False,
    scale_dtype: torch.dtype | None = None,
) -> Scaling:
    """The operators' options for rows like x's, checked; TypeError or ValueError in one sentence where they are wrong."""
    if group_size is not None and group_size not in GROUP_SIZES:
        raise ValueError(f"group_size must be 32, 64, 128 or None for a scale a row, got {group_size}")
    if scale_dtype not in (None, torch.float32, torch.float8_e8m0fnu):
        raise TypeError(f"scale_dtype must be float32 or float8_e8m0fnu, got {_name(scale_dtype)}")
    exponents = scale_dtype is torch.float8_e8m0fnu
    power_of_two = power_of_two_scale or exponents
    if max_scale is not None:
        if not SMALLEST_SCALE <= max_scale <= LARGEST_SCALE:
            raise ValueError(f"max_scale must be a positive normal number of float32, got {max_scale}")
        if power_of_two and math.frexp(max_scale)[0] != 0.5:
            raise ValueError(f"max_scale must be a power of two where scales are, got {max_scale}")
    hidden = x.shape[-1]
    group = hidden if group_size is None else min(group_size, hidden)
    return Scaling(group, max_scale, power_of_two, column_major_scale, scale_dtype or torch.float32)


def check_quant(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, weight_offset: float, dtype: torch.dtype
) -> None:
    """``check_forward`` or ``check_add_forward``; x and residual must not be float64, and dtype one of FORMATS."""
    if residual is None:
        check_forward(x, weight, eps, weight_offset)
    else:
        check_add_forward(x, residual, weight, eps, weight_offset)
        _refuse_float64("residual", residual)
    _refuse_float64("x", x)
    if dtype not in FORMATS:
        names = "float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz or int8"
        raise TypeError(f"dtype must be {names}, got {_name(dtype)}")


def check_static_scale(scale: Tensor, x: Tensor) -> None:
    """scale must be one float32 number on x's device. Its value is not looked at: that would wait for the GPU."""
    if scale.dtype is not torch.float32:
        raise TypeError(f"scale must be float32, got {_name(scale.dtype)}")
    if scale.numel() != 1 or scale.layout is not torch.strided:
        raise ValueError(f"scale must be a tensor of one element, got shape {tuple(scale.shape)}")
    if scale.device != x.device:
        raise ValueError(f"scale must be on x's device {x.device}, got {scale.device}")


def empty_codes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """q: x's shape, dense."""
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def smallest_scales(scale: Tensor) -> Tensor:
    """``scale`` filled as for rows without elements, whose largest magnitude is 0."""
    if scale.dtype is torch.float32:
        return scale.fill_(SMALLEST_SCALE)
    scale.view(torch.uint8).fill_(1)
    return scale


def _refuse_float64(name: str, tensor: Tensor) -> None:
    if tensor.dtype is torch.float64:
        raise TypeError(f"{name} must be float16, bfloat16 or float32 to be quantised, got float64")


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")

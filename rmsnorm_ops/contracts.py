"""What the operators accept. One check serves the CPU, the GPU and the fake path, so that all three say the same sentence."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The type all arithmetic on tensors of ``dtypes`` runs in: float64 where one of them is, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def default_eps(dtype: torch.dtype) -> float:
    """The eps that ``eps=None`` stands for: the machine epsilon of the compute type, as in torch.nn.functional.rms_norm."""
    return torch.finfo(compute_dtype(dtype)).eps


def check_forward(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> None:
    """Raise TypeError (dtypes) or ValueError (everything else) in one sentence where the operands break the contract."""
    if x.dtype not in FLOATS or x.layout is not torch.strided:
        _check_tensor("x", x)
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension, got a 0-dimensional tensor")
    if weight is not None:
        _check_weight(weight, x)
    elif weight_offset != 0:
        raise ValueError(f"weight_offset must be 0 when there is no weight, got {weight_offset}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps must be finite and not negative, got {eps}")
    if not -math.inf < weight_offset < math.inf:
        raise ValueError(f"weight_offset must be finite, got {weight_offset}")


def check_add_forward(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> None:
    """``check_forward``, and residual must have x's shape and device (no broadcasting); its dtype may differ."""
    check_forward(x, weight, eps, weight_offset)
    _check_like("residual", residual, x)


def check_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    dsum: Tensor | None = None,
    dx_dtype: torch.dtype | None = None,
) -> None:
    """``check_forward``, and the gradients must have x's shape and device; dx_dtype is one of the four or None."""
    check_forward(x, weight, eps, weight_offset)
    _check_like("dy", dy, x)
    if dsum is not None:
        _check_like("dsum", dsum, x)
    if dx_dtype is not None and dx_dtype not in FLOATS:
        raise TypeError(f"dx_dtype must be float16, bfloat16, float32 or float64, got {str(dx_dtype).removeprefix('torch.')}")


def _check_like(name: str, tensor: Tensor, x: Tensor) -> None:
    _check_tensor(name, tensor)
    if tensor.shape != x.shape:
        raise ValueError(f"{name} must have x's shape {tuple(x.shape)}, got {tuple(tensor.shape)}")
    if tensor.device != x.device:
        raise ValueError(f"{name} must be on x's device {x.device}, got {tensor.device}")


def _check_tensor(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in FLOATS:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {_dtype_name(tensor)}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} must be a dense (strided) tensor, got layout {tensor.layout}")


def _check_weight(weight: Tensor, x: Tensor) -> None:
    if weight.dtype not in FLOATS or weight.layout is not torch.strided:
        _check_tensor("weight", weight)
    if weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        raise ValueError(f"weight must have shape ({x.shape[-1]},), got {tuple(weight.shape)}")
    if weight.device != x.device:
        raise ValueError(f"weight must be on x's device {x.device}, got {weight.device}")


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

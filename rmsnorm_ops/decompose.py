"""The forward operators as a few of torch's, for consumers that know only those: ONNX, other compilers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rmsnorm_ops.contracts import compute_dtype


def decompositions() -> dict[Any, Callable[..., Any]]:
    """A decomposition table for ``ExportedProgram.run_decompositions``.

    The operators otherwise stay one node through it. What they become is the formula as other systems write and recognise it,
    computed in fp32 (fp64 for fp64 x) with the same roundings, but not over the full range: rows whose mean square leaves the
    compute type are not rescued.

    Returns:
        torch.ops.rmsnorm.forward and add_forward to their bodies.

    Example:
        >>> program = torch.export.export(model, inputs)
        >>> program = program.run_decompositions({**torch.export.default_decompositions(), **rmsnorm_ops.decompositions()})
        >>> torch.onnx.export(program, dynamo=True).save("model.onnx")
    """
    return {torch.ops.rmsnorm.forward.default: _forward, torch.ops.rmsnorm.add_forward.default: _add_forward}


def _forward(
    x: Tensor, weight: Tensor | None, eps: float, *, weight_offset: float = 0.0, round_before_weight: bool = False
) -> Tensor:
    wide = x.to(compute_dtype(x.dtype))
    return _norm(wide, weight, eps, weight_offset, round_before_weight, x.dtype)


def _add_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> tuple[Tensor, Tensor]:
    compute = compute_dtype(x.dtype, residual.dtype)
    residual_out = (x.to(compute) + residual.to(compute)).to(residual.dtype).contiguous()
    return _norm(residual_out.to(compute), weight, eps, weight_offset, round_before_weight, x.dtype), residual_out


def _norm(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, round_before_weight: bool, dtype: torch.dtype
) -> Tensor:
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        if round_before_weight:
            y = y.to(dtype).to(x.dtype)
        scale = weight.to(x.dtype)
        y = y * (scale + weight_offset if weight_offset else scale)
    return y.to(dtype).contiguous()

"""Kernels compiled ahead of their first call, for serving and for CUDA-graph capture."""

from __future__ import annotations

import torch

from rmsnorm_ops.functional import add_rms_norm, rms_norm


def warmup(
    hidden: int,
    dtype: torch.dtype,
    *,
    weight_dtype: torch.dtype | None = None,
    weight: bool = True,
    residual_dtype: torch.dtype | None = None,
    gradients: bool = False,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    device: torch.device | str | None = None,
) -> None:
    """Compile and load what norms over rows of ``hidden`` elements will launch, whatever the number of rows.

    A kernel is for a row, not for a shape: after this no call of these dtypes and options with dense, 16-byte aligned tensors
    compiles anything. Strided or unaligned tensors have kernels of their own, compiled at their first call.

    Args:
        hidden: elements a row.
        dtype: of x.
        weight_dtype: of the weight; None stands for x's.
        weight: whether there is one.
        residual_dtype: None for ``rms_norm``, else ``add_rms_norm`` with such a residual.
        gradients: also what their backward launches.
        weight_offset, round_before_weight: as in ``rms_norm``.
        device: a GPU; the current one by default. On the CPU there is nothing to compile.

    Raises:
        TypeError, ValueError: as ``rms_norm`` would with such tensors.
    """
    x = torch.zeros(1, hidden, dtype=dtype, device=device or ("cuda" if torch.cuda.is_available() else "cpu"))
    weights = torch.ones(hidden, dtype=weight_dtype or dtype, device=x.device) if weight else None
    needed = [tensor.requires_grad_(gradients) for tensor in (x, weights) if tensor is not None]
    with torch.set_grad_enabled(gradients):
        options = {"weight_offset": weight_offset, "round_before_weight": round_before_weight}
        if residual_dtype is None:
            y = rms_norm(x, weights, 1e-6, **options)  # type: ignore[arg-type]
        else:
            residual = torch.zeros_like(x, dtype=residual_dtype)
            y, residual_out = add_rms_norm(x, residual, weights, 1e-6, **options)  # type: ignore[arg-type]
            if gradients:  # as in a model, where the residual stream goes on
                torch.autograd.grad((y, residual_out), needed, (torch.zeros_like(y), torch.zeros_like(residual_out)))
                return
        if gradients:
            torch.autograd.grad(y, needed, torch.zeros_like(y))

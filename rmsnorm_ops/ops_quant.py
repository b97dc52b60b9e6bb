"""The quantising operators: schemas, kernels by device, fake implementations. They have no gradient, and say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rmsnorm_ops import cpu_quant, launch_quant, ops, plain_quant
from rmsnorm_ops.contracts_quant import check_quant, check_static_scale, empty_codes, scaling

_NORM = "float weight_offset=0., bool round_before_weight=False"
_SCALING = (
    "ScalarType dtype, int? group_size=None, float? max_scale=None, bool power_of_two_scale=False,"
    " bool column_major_scale=False, ScalarType? scale_dtype=None, " + _NORM
)
_below_autograd = torch._C._AutoDispatchBelowAutograd
_any_requires_grad = torch._C._any_requires_grad


def _fake_forward_quant(
    x: Tensor, weight: Tensor | None, eps: float, *, dtype: torch.dtype, weight_offset: float = 0.0,
    round_before_weight: bool = False, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_quant(x, None, weight, eps, weight_offset, dtype)
    return empty_codes(x, dtype), scaling(x, **options).empty(x)


def _fake_forward_quant_static(
    x: Tensor, weight: Tensor | None, scale: Tensor, eps: float, *, dtype: torch.dtype, weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> Tensor:  # fmt: skip
    check_quant(x, None, weight, eps, weight_offset, dtype)
    check_static_scale(scale, x)
    return empty_codes(x, dtype)


def _fake_add_forward_quant(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, *, dtype: torch.dtype, weight_offset: float = 0.0,
    round_before_weight: bool = False, **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    check_quant(x, residual, weight, eps, weight_offset, dtype)
    return empty_codes(x, dtype), scaling(x, **options).empty(x), empty_codes(x, residual.dtype)


def _fake_add_forward_quant_static(
    x: Tensor, residual: Tensor, weight: Tensor | None, scale: Tensor, eps: float, *, dtype: torch.dtype,
    weight_offset: float = 0.0, round_before_weight: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_quant(x, residual, weight, eps, weight_offset, dtype)
    check_static_scale(scale, x)
    return empty_codes(x, dtype), empty_codes(x, residual.dtype)


def _register(schema: str, tensors: int, fake: Callable[..., Any]) -> Callable[..., Any]:
    """One operator, whose first ``tensors`` arguments are the tensors; the implementations are found by its name.
    Returns its Autograd kernel, the first that runs."""
    name = schema.partition("(")[0]
    library = ops._library
    library.define(schema, tags=ops._TAGS)
    body = getattr(plain_quant, name)
    library.impl(name, getattr(cpu_quant, name), "CPU")
    library.impl(name, getattr(launch_quant, name), "CUDA")  # ROCm devices too
    library.impl(name, body, "CompositeExplicitAutograd")  # devices without Triton
    library.impl(name, body, "FuncTorchBatchedDecomposition")
    torch.library.register_fake(f"rmsnorm::{name}", fake, lib=library)
    operator = getattr(torch.ops.rmsnorm, name).default

    def kernel(*args: Any, **options: Any) -> Any:
        if (torch.is_grad_enabled() and _any_requires_grad(*args[:tensors])) or _any_tangent(args[:tensors]):
            raise NotImplementedError(
                f"{name} is not differentiable: call it under torch.no_grad(), or with tensors that do not require grad"
            )
        with _below_autograd():
            return operator(*args, **options)

    library.impl(name, kernel, "Autograd")
    return kernel


def _any_tangent(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether forward mode would lose a tangent."""
    if forward_ad._current_level < 0:
        return False
    return any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


forward_quant = _register(
    f"forward_quant(Tensor x, Tensor? weight, float eps, *, {_SCALING}) -> (Tensor q, Tensor scale)", 2, _fake_forward_quant
)
forward_quant_static = _register(
    f"forward_quant_static(Tensor x, Tensor? weight, Tensor scale, float eps, *, ScalarType dtype, {_NORM}) -> Tensor q",
    3,
    _fake_forward_quant_static,
)
add_forward_quant = _register(
    f"add_forward_quant(Tensor x, Tensor residual, Tensor? weight, float eps, *, {_SCALING})"
    " -> (Tensor q, Tensor scale, Tensor residual_out)",
    3,
    _fake_add_forward_quant,
)
add_forward_quant_static = _register(
    f"add_forward_quant_static(Tensor x, Tensor residual, Tensor? weight, Tensor scale, float eps, *, ScalarType dtype, {_NORM})"
    " -> (Tensor q, Tensor residual_out)",
    4,
    _fake_add_forward_quant_static,
)

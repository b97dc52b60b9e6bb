"""The registered operators: schemas, kernels by device, fake implementations.

Registered as a library FRAGMENT with hand-written schemas, the cheapest way through the dispatcher. ``_library`` must
outlive every call. autograd.py has the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rmsnorm_ops import autograd, cpu, cpu_add, cpu_backward, launch, launch_backward, plain, visible
from rmsnorm_ops.contracts import check_add_forward, check_backward, check_forward

_library = torch.library.Library("rmsnorm", "FRAGMENT")
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)


def _register(
    schema: str,
    *,
    tensors: int,
    cpu: Callable[..., Any],
    triton: Callable[..., Any],
    body: Callable[..., Any],
    fake: Callable[..., Any],
    function: type[torch.autograd.Function] | None = None,
) -> Callable[..., Any]:
    """One operator: its kernels by device, its fake, its gradients. Returns its Autograd kernel, the first that runs."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=_TAGS)
    _library.impl(name, cpu, "CPU")
    _library.impl(name, triton, "CUDA")  # ROCm devices too
    _library.impl(name, body, "CompositeExplicitAutograd")  # devices without Triton
    torch.library.register_fake(f"rmsnorm::{name}", fake, lib=_library)
    visible.attach(_library, name, tensors=tensors)
    return autograd.attach(_library, name, tensors=tensors, body=body, function=function)


def _dense(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """What every implementation allocates: dense row-major, whatever the strides of ``like``."""
    return torch.empty(like.shape, dtype=dtype or like.dtype, device=like.device)


def _fake_forward(
    x: Tensor, weight: Tensor | None, eps: float, *, weight_offset: float = 0.0, round_before_weight: bool = False
) -> Tensor:
    check_forward(x, weight, eps, weight_offset)
    return _dense(x)


def _fake_add_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> tuple[Tensor, Tensor]:
    check_add_forward(x, residual, weight, eps, weight_offset)
    return _dense(x), _dense(residual)


def _fake_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> tuple[Tensor, Tensor]:
    check_backward(dy, x, weight, eps, weight_offset)
    return _dense(x), _dense(weight)


def _fake_backward_input(dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, *, weight_offset: float = 0.0) -> Tensor:
    check_backward(dy, x, weight, eps, weight_offset)
    return _dense(x)


def _fake_add_backward_input(
    dy: Tensor,
    dsum: Tensor | None,
    residual_out: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    dx_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    check_backward(dy, residual_out, weight, eps, weight_offset, dsum, dx_dtype)
    dx = _dense(residual_out, dx_dtype)
    return dx, residual_out.new_empty(0) if dx.dtype is residual_out.dtype else _dense(residual_out)


def _fake_add_backward(
    dy: Tensor, dsum: Tensor | None, residual_out: Tensor, weight: Tensor, eps: float, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return *_fake_add_backward_input(dy, dsum, residual_out, weight, eps, **options), _dense(weight)


forward = _register(
    "forward(Tensor x, Tensor? weight, float eps, *, float weight_offset=0., bool round_before_weight=False) -> Tensor",
    tensors=2,
    cpu=cpu.forward,
    triton=launch.forward,
    body=plain.forward,
    fake=_fake_forward,
    function=autograd.RMSNorm,
)
add_forward = _register(
    "add_forward(Tensor x, Tensor residual, Tensor? weight, float eps, *, float weight_offset=0.,"
    " bool round_before_weight=False) -> (Tensor y, Tensor residual_out)",
    tensors=3,
    cpu=cpu_add.add_forward,
    triton=launch.add_forward,
    body=plain.add_forward,
    fake=_fake_add_forward,
    function=autograd.AddRMSNorm,
)
_register(
    "backward(Tensor dy, Tensor x, Tensor weight, float eps, *, float weight_offset=0.) -> (Tensor dx, Tensor dweight)",
    tensors=3,
    cpu=cpu_backward.backward,
    triton=launch_backward.backward,
    body=plain.backward,
    fake=_fake_backward,
)
_register(
    "backward_input(Tensor dy, Tensor x, Tensor? weight, float eps, *, float weight_offset=0.) -> Tensor dx",
    tensors=3,
    cpu=cpu_backward.backward_input,
    triton=launch_backward.backward_input,
    body=plain.backward_input,
    fake=_fake_backward_input,
)
_register(
    "add_backward(Tensor dy, Tensor? dsum, Tensor residual_out, Tensor weight, float eps, *, float weight_offset=0.,"
    " ScalarType? dx_dtype=None) -> (Tensor dx, Tensor dresidual, Tensor dweight)",
    tensors=4,
    cpu=cpu_backward.add_backward,
    triton=launch_backward.add_backward,
    body=plain.add_backward,
    fake=_fake_add_backward,
)
_register(
    "add_backward_input(Tensor dy, Tensor? dsum, Tensor residual_out, Tensor? weight, float eps, *,"
    " float weight_offset=0., ScalarType? dx_dtype=None) -> (Tensor dx, Tensor dresidual)",
    tensors=4,
    cpu=cpu_backward.add_backward_input,
    triton=launch_backward.add_backward_input,
    body=plain.add_backward_input,
    fake=_fake_add_backward_input,
)

"""What torch.compile's graph holds on an NVIDIA GPU where it is asked for: an operator's Triton kernels, not an opaque node.

The call then costs no dispatch at run time, and Inductor plans memory round it. The operator stays one node where the graph is
for people or other tools (torch.export), where a policy of selective checkpointing names it, and on every other device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._library.triton import triton_ops_to_kernels
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from rmsnorm_ops import launch, launch_backward
from rmsnorm_ops.contracts import check_add_forward, check_forward
from rmsnorm_ops.prepared import HIP

# To be asked for: what the graph holds has been tested without a GPU, and not yet been run on one.
DEVICES = frozenset(("cuda",)) if os.environ.get("RMSNORM_OPS_VISIBLE") == "1" and not HIP else frozenset()


@cache
def _traced() -> ModuleType:
    return import_module("rmsnorm_ops.traced")


class _Kernels:
    """The kernels in Inductor's cache key. They, and triton, are imported when it is made."""

    def __iter__(self) -> Iterator[Any]:
        return iter(_traced().cache_key())


def attach(library: torch.library.Library, name: str, *, tensors: int) -> None:
    """Open operator ``name``, whose first ``tensors`` arguments are tensors, where torch.compile traces it."""
    body = _BODIES[name]

    def rule(mode: Any, operator: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from torch.export._trace import custom_triton_ops_decomposition_disabled

        if custom_triton_ops_decomposition_disabled() or not _wanted(args[:tensors], kwargs):
            return mode.__torch_dispatch__(operator, types, args, kwargs)
        if any(kind is not Tensor and not issubclass(kind, (FakeTensor, FunctionalTensor)) for kind in types):
            return NotImplemented  # a DTensor must first become the tensors it is made of
        traced = _traced()
        try:
            with mode:
                return body(traced, *traced.constant_hidden(args[:tensors]), *args[tensors:], **kwargs)
        except traced.Opaque:
            return mode.__torch_dispatch__(operator, types, args, kwargs)

    torch.library.register_torch_dispatch(f"rmsnorm::{name}", FunctionalTensorMode, rule, lib=library)
    triton_ops_to_kernels[f"rmsnorm::{name}"] = _Kernels()  # type: ignore[assignment]


def _wanted(tensors: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Not in fp64, for which eps would have to stay one all the way through the compiler."""
    given = [tensor for tensor in tensors if tensor is not None]
    if torch.float64 in (options.get("dx_dtype"), *(tensor.dtype for tensor in given)):
        return False
    return all(tensor.device.type in DEVICES and _current(tensor.device) for tensor in given)


def _current(device: torch.device) -> bool:
    """Inductor launches on the tensors' device; a backend that runs a graph as it is launches on the current one. And fake CUDA
    tensors are traced on machines without a GPU too, whose limits nobody knows."""
    return device.type != "cuda" or (torch.cuda.is_available() and device.index == torch.cuda.current_device())


def _forward(
    trace: Any,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> Any:
    check_forward(x, weight, eps, weight_offset)
    return launch._forward(x, None, weight, eps, weight_offset, round_before_weight, None, trace)[0]


def _add_forward(
    trace: Any,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> Any:
    check_add_forward(x, residual, weight, eps, weight_offset)
    return launch._forward(x, residual, weight, eps, weight_offset, round_before_weight, None, trace)[:2]


def _backward(trace: Any, dy: Tensor, x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0) -> Any:
    return launch_backward._backward(dy, None, x, weight, eps, weight_offset, None, True, None, trace)[::2]


def _backward_input(trace: Any, dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, *, weight_offset: float = 0.0) -> Any:
    return launch_backward._backward(dy, None, x, weight, eps, weight_offset, None, False, None, trace)[0]


def _add_backward(
    trace: Any,
    dy: Tensor,
    dsum: Tensor | None,
    residual_out: Tensor,
    weight: Tensor,
    eps: float,
    *,
    weight_offset: float = 0.0,
    dx_dtype: torch.dtype | None = None,
) -> Any:
    return _sum_gradient(trace, dy, dsum, residual_out, weight, eps, weight_offset, dx_dtype, True)


def _add_backward_input(
    trace: Any,
    dy: Tensor,
    dsum: Tensor | None,
    residual_out: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    dx_dtype: torch.dtype | None = None,
) -> Any:
    return _sum_gradient(trace, dy, dsum, residual_out, weight, eps, weight_offset, dx_dtype, False)[:2]


def _sum_gradient(
    trace: Any,
    dy: Tensor,
    dsum: Tensor | None,
    residual_out: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    dx_dtype: torch.dtype | None,
    weight_grad: bool,
) -> Any:
    results = launch_backward._backward(dy, dsum, residual_out, weight, eps, weight_offset, dx_dtype, weight_grad, None, trace)
    dx, dresidual, dweight = results
    return dx, dx.new_empty(0) if dresidual is None else dresidual, dweight


_BODIES: dict[str, Callable[..., Any]] = {
    "forward": _forward,
    "add_forward": _add_forward,
    "backward": _backward,
    "backward_input": _backward_input,
    "add_backward": _add_backward,
    "add_backward_input": _add_backward_input,
}

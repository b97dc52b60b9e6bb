"""Gradients: one kernel an operator on the Autograd key, with three ways out.

1. A torch.func transform or a forward-mode level is active: the plain torch body, which composes to any depth.
2. Something requires grad: an autograd.Function round the fused operator. Its backward calls the backward operators, which
   come through here too: with create_graph=True something requires grad there, and they take their plain body.
3. Otherwise: the operator again, below autograd.

torch.library.register_autograd and a plain Function were tried first: both lose tangents in jvp without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rmsnorm_ops import distributed

_below_autograd = torch._C._AutoDispatchBelowAutograd
_transform_active = torch._C._are_functorch_transforms_active
_any_requires_grad = torch._C._any_requires_grad
_PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


class _Function(torch.autograd.Function):
    # The C++ apply itself: torch's Python wrapper only adds a test for transforms, which attach() has made already.
    apply = torch._C._FunctionBase.__dict__["apply"]


class RMSNorm(_Function):
    """forward with its gradients. The name is what grad_fn and the profiler show."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, options: dict[str, Any]) -> Tensor:
        with _below_autograd():
            y: Tensor = torch.ops.rmsnorm.forward.default(x, weight, eps, **options)
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.options = eps, _backward_options(options)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        x_needs, weight_needs, *_ = ctx.needs_input_grad
        if weight_needs:
            dx, dweight = _gradient(torch.ops.rmsnorm.backward.default, dy, x, weight, ctx.eps, **ctx.options)
            return dx if x_needs else None, dweight, None, None
        operator = torch.ops.rmsnorm.backward_input.default
        return _gradient(operator, dy, x, weight, ctx.eps, **ctx.options) if x_needs else None, None, None, None


class AddRMSNorm(_Function):
    """add_forward with its gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        with _below_autograd():
            y, residual_out = torch.ops.rmsnorm.add_forward.default(x, residual, weight, eps, **options)
        ctx.save_for_backward(residual_out, weight)
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.options, ctx.x_dtype = eps, _backward_options(options), x.dtype
        return y, residual_out

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dsum: Tensor | None) -> Any:
        x_needs, residual_needs, weight_needs, *_ = ctx.needs_input_grad
        residual_out, weight = ctx.saved_tensors
        if dy is None:  # y was not used: the gradient of a sum is what arrives
            dx = dsum.to(ctx.x_dtype) if x_needs and dsum is not None else None
            return dx, dsum if residual_needs else None, None, None, None
        options = ctx.options
        if ctx.x_dtype is not residual_out.dtype:
            options = {**options, "dx_dtype": ctx.x_dtype}
        dweight = None
        if weight_needs:
            operator = torch.ops.rmsnorm.add_backward.default
            dx, dresidual, dweight = _gradient(operator, dy, dsum, residual_out, weight, ctx.eps, **options)
        else:
            operator = torch.ops.rmsnorm.add_backward_input.default
            dx, dresidual = _gradient(operator, dy, dsum, residual_out, weight, ctx.eps, **options)
        if ctx.x_dtype is residual_out.dtype:
            dresidual = dx
        return dx if x_needs else None, dresidual if residual_needs else None, dweight, None, None


def _gradient(operator: Any, dy: Tensor, *args: Any, **options: Any) -> Any:
    """A backward operator: past its Autograd kernel where that has nothing to do, for without create_graph the gradients of
    this gradient are not asked for."""
    if torch.is_grad_enabled() or not eager(dy):
        return operator(dy, *args, **options)
    with _below_autograd():
        return operator(dy, *args, **options)


def _backward_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options that change the gradient. Rounding before the weight does not: its derivative is taken as 1."""
    return {name: value for name, value in options.items() if name != "round_before_weight"}


def attach(
    library: torch.library.Library,
    name: str,
    *,
    tensors: int,
    body: Callable[..., Any],
    function: type[torch.autograd.Function] | None = None,
) -> Callable[..., Any]:
    """Give operator ``name`` its Autograd and vmap kernels, and return the former. Its first ``tensors`` arguments are the
    tensors, ``body`` is the plain torch it stands for, ``function`` its gradients (without one, ``body``'s)."""
    operator = getattr(torch.ops.rmsnorm, name).default

    def kernel(*args: Any, **options: Any) -> Any:
        if type(args[0]) not in _PLAIN_TENSORS:
            distributed.register_if_loaded()
        # Both are asked: Dynamo traces torch.func.jvp without setting the level, and a plain dual level is no transform.
        if _transform_active() or forward_ad._current_level >= 0:
            return body(*args, **options)
        if torch.is_grad_enabled() and _any_requires_grad(*args[:tensors]):
            return function.apply(*args, options) if function is not None else body(*args, **options)
        with _below_autograd():
            return operator(*args, **options)

    library.impl(name, kernel, "Autograd")
    library.impl(name, body, "FuncTorchBatchedDecomposition")
    return kernel


def eager(x: Tensor) -> bool:
    """Whether the Autograd kernel may be called as a Python function, which spares a pass through the dispatcher (2 µs):
    nobody traces, and x is a tensor that no other key would have to see first."""
    if torch.compiler.is_compiling():
        return False
    if type(x) not in _PLAIN_TENSORS:
        distributed.register_if_loaded()  # under inference_mode no Autograd kernel would
        return False
    return not _transform_active() and not torch._C._is_tracing()

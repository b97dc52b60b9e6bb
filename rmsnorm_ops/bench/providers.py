"""Who is compared: this library, aten, and torch.compile of aten. peers.py has the others.

A provider is made of differentiable functions of tensors; ``bind`` makes one call of an operation from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rmsnorm_ops.bench import traffic
from rmsnorm_ops.bench.cases import DTYPES, SHORT, Case
from rmsnorm_ops.bench.problem import Inputs, Problem

Call = Callable[[], Any]


@dataclass(frozen=True)
class Provider:
    """An implementation, and what of the problems it takes."""

    name: str
    norm: Callable[[Tensor, Tensor | None, Case], Tensor]  # y, differentiable
    add_norm: Callable[[Tensor, Tensor, Tensor | None, Case], tuple[Tensor, Tensor]]  # y, residual_out
    # Takes operands, makes what a forward would have saved, and returns the call that gives (dx, dweight).
    backward: Callable[[Inputs, Case], Call] | None = None
    package: str = ""  # the distribution whose version counts, where it is not torch's or ours
    devices: tuple[str, ...] = ("cpu", "cuda")
    dtypes: tuple[torch.dtype, ...] = DTYPES
    operations: tuple[str, ...] = ("forward", "add_forward", "backward", "forward+backward")
    options: tuple[str, ...] = ()  # of weight_offset, round_before_weight
    most_bytes: int | None = None  # of a row
    most_hidden: int | None = None
    needs_weight: bool = False
    overwrites_dy: bool = False
    reset: Callable[[], object] = field(default=lambda: None)  # before each problem
    quantised: Callable[[str, Inputs, Case], Call] | None = None  # an operation of traffic.QUANTISED, by name

    def refuses(self, problem: Problem) -> str:
        """Why it does not take ``problem``, in one sentence; empty where it does."""
        case, dtype = problem.case, problem.dtype
        if problem.device.type not in self.devices:
            return f"{self.name} does not run on {problem.device.type}"
        if problem.operation in traffic.QUANTISED:
            if self.quantised is None:
                return f"{self.name} has no {problem.operation}"
            if dtype is torch.float64:
                return f"{self.name} does not quantise {SHORT[dtype]}"
        elif problem.operation not in self.operations:
            return f"{self.name} has no {problem.operation}"
        if problem.operation == "backward" and self.backward is None:
            return f"{self.name} has no backward to call directly"
        if dtype not in self.dtypes:
            return f"{self.name} does not take {SHORT[dtype]}"
        if case.hidden * dtype.itemsize > (self.most_bytes or torch.inf) or case.hidden > (self.most_hidden or torch.inf):
            return f"{self.name} does not take rows of {case.hidden} {SHORT[dtype]} elements"
        missing = [name for name, value in case.options.items() if value and name not in self.options]
        if missing:
            return f"{self.name} has no {missing[0]}"
        return f"{self.name} needs a weight" if self.needs_weight and case.weight == "none" else ""

    def bind(self, problem: Problem, inputs: Inputs) -> Call:
        """One call of the problem's operation on ``inputs``, which returns what verify.OUTPUTS lists, without Nones."""
        x, weight, residual, dy = inputs
        case = problem.case
        if problem.operation in traffic.QUANTISED:
            assert self.quantised is not None
            return self.quantised(problem.operation, inputs, case)
        if problem.operation == "forward":
            return lambda: self.norm(x, weight, case)
        if problem.operation == "add_forward":
            assert residual is not None
            return lambda: self.add_norm(x, residual, weight, case)
        assert dy is not None
        if self.overwrites_dy:
            inputs = inputs._replace(dy=dy.clone())
        if problem.operation == "backward":
            assert self.backward is not None
            return self.backward(inputs, case)
        return forward_backward(self, inputs, case)


def forward_backward(provider: Provider, inputs: Inputs, case: Case) -> Call:
    """A forward and, through autograd, its backward."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:2] if tensor is not None]
    weight = leaves[1] if len(leaves) == 2 else None

    def call() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            y = provider.norm(leaves[0], weight, case)
            return (y.detach(), *torch.autograd.grad(y, leaves, inputs.dy))

    return call


# This library


def _our_norm(x: Tensor, weight: Tensor | None, case: Case) -> Tensor:
    if case.weight_offset or case.round_before_weight:
        return torch.ops.rmsnorm.forward(x, weight, case.eps, **case.options)
    return torch.ops.rmsnorm.forward(x, weight, case.eps)  # keywords take time of their own


def _our_add_norm(x: Tensor, residual: Tensor, weight: Tensor | None, case: Case) -> tuple[Tensor, Tensor]:
    return torch.ops.rmsnorm.add_forward(x, residual, weight, case.eps, **case.options)


def _our_backward(inputs: Inputs, case: Case) -> Call:
    x, weight, _, dy = inputs
    if weight is None:
        return lambda: torch.ops.rmsnorm.backward_input(dy, x, None, case.eps)
    return lambda: torch.ops.rmsnorm.backward(dy, x, weight, case.eps, weight_offset=case.weight_offset)


def _our_quantised(operation: str, inputs: Inputs, case: Case) -> Call:
    x, weight, residual, _ = inputs
    base, group_size = traffic.QUANTISED[operation]
    options = {"dtype": torch.float8_e4m3fn, "group_size": group_size, **case.options}
    if base == "add_forward":
        return lambda: torch.ops.rmsnorm.add_forward_quant(x, residual, weight, case.eps, **options)
    return lambda: torch.ops.rmsnorm.forward_quant(x, weight, case.eps, **options)


OURS = Provider(
    "rmsnorm_ops", _our_norm, _our_add_norm, _our_backward, options=("weight_offset", "round_before_weight"),
    quantised=_our_quantised,
)  # fmt: skip

# aten


def _aten_norm(x: Tensor, weight: Tensor | None, case: Case) -> Tensor:
    return functional.rms_norm(x, (case.hidden,), weight, case.eps)


def _aten_add_norm(x: Tensor, residual: Tensor, weight: Tensor | None, case: Case) -> tuple[Tensor, Tensor]:
    total = x + residual
    return functional.rms_norm(total, (case.hidden,), weight, case.eps), total


def _aten_backward(inputs: Inputs, case: Case) -> Call:
    rstd = torch.ops.aten._fused_rms_norm(inputs.x, [case.hidden], inputs.weight, case.eps)[1]
    return lambda: _fused_backward(inputs.dy, inputs.x, rstd, inputs.weight)


def _fused_backward(dy: Tensor | None, x: Tensor, rstd: Tensor, weight: Tensor | None) -> tuple[Tensor, ...]:
    gradients = torch.ops.aten._fused_rms_norm_backward(dy, x, [x.shape[-1]], rstd, weight, [True, weight is not None])
    return gradients if weight is not None else gradients[:1]


class _Aten(Provider):
    def refuses(self, problem: Problem) -> str:
        if problem.operation == "backward" and problem.device.type == "cpu":
            return f"{self.name} has no backward to call directly on the CPU"
        return super().refuses(problem)


ATEN = _Aten("aten", _aten_norm, _aten_add_norm, _aten_backward)


def inductor() -> Provider:
    """torch.compile of aten; its backward is aten's operator as Inductor decomposes it, which is what a compiled model runs."""

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        # fullgraph makes the limit of recompilations an error, where it would fall back to eager without a word.
        return torch.compile(function, fullgraph=True, dynamic=False)

    norm = compiled(lambda x, weight, eps: functional.rms_norm(x, x.shape[-1:], weight, eps))
    backward = compiled(_fused_backward)

    def add(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return functional.rms_norm(total, x.shape[-1:], weight, eps), total

    add_norm = compiled(add)

    def bound_backward(inputs: Inputs, case: Case) -> Call:
        rstd = torch.ops.aten._fused_rms_norm(inputs.x, [case.hidden], inputs.weight, case.eps)[1]
        return lambda: backward(inputs.dy, inputs.x, rstd, inputs.weight)

    return Provider(
        "inductor", lambda x, weight, case: norm(x, weight, case.eps),
        lambda x, residual, weight, case: add_norm(x, residual, weight, case.eps), bound_backward, reset=torch.compiler.reset,
    )  # fmt: skip

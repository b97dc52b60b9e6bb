"""The forward from tensors to a running kernel: rows from any strides, outputs, plan, launch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rmsnorm_ops import device
from rmsnorm_ops.contracts import check_add_forward, check_forward
from rmsnorm_ops.plan import LaunchPlan, forward_plan
from rmsnorm_ops.prepared import FORWARD_LINES, HIP, Prepared, find, keep, kernel, large, launch, slots
from rmsnorm_ops.rows import ABSENT, VECTOR_BYTES, Facts, aligned, dtype_of, problem_of, rows_of

# Of a kernel that can quantise (launch_quant.py), where it rounds: its last arguments, and its last constants.
NO_SCALES = (None, None)
ROUNDED = (0, 0.0, False, False, "", False)


def forward(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    plan: LaunchPlan | None = None,
) -> Tensor:
    """Launch the forward kernel on ``x`` [..., hidden] and return y, dense, of x's shape and dtype.

    The operator without the dispatcher: for GPU tensors, and for CPU tensors where Triton interprets (TRITON_INTERPRET=1
    set before triton is imported). Arguments and errors are those of ``torch.ops.rmsnorm.forward``; ``plan`` overrides
    the launch plan, for tuning. A weight that is strided or not 16-byte aligned is copied, and so is an x whose last
    stride is not 1 or whose leading dims need more than two strides.
    """
    usual: tuple[Any, ...] = ()
    if weight is not None:
        usual = (
            x.dtype, x.shape[-1:], x.get_device(), weight.dtype, weight.shape, weight.get_device(),
            weight_offset, round_before_weight, plan,
        )  # fmt: skip
        known = _usual.get(usual)
        if known is not None and 0 <= eps < math.inf and _dense(x, weight):
            return _launched_again(*known, x, weight, eps)
    check_forward(x, weight, eps, weight_offset)
    y, _, found, rest = _forward(x, None, weight, eps, weight_offset, round_before_weight, plan)
    # On AMD GPUs a kernel is for tensors of a size, and a shared one wants slots.
    again = found is not None and found.run is not None and found.plan.strategy != "shared" and not HIP
    if weight is not None and again and _dense(x, weight):
        _usual[usual] = found, rest
    return y


# The kernels of calls with dense tensors at aligned addresses, and their last arguments, by all else that a call depends on.
_usual: dict[tuple[Any, ...], tuple[Prepared, tuple[Any, ...]]] = {}


def _dense(*tensors: Tensor) -> bool:
    for tensor in tensors:
        if tensor.layout is not torch.strided or not tensor.is_contiguous() or tensor.data_ptr() % VECTOR_BYTES:
            return False
    return True


def _launched_again(found: Prepared, rest: tuple[Any, ...], x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A call like an earlier one needs no other look at its tensors, which takes the host half as long as the rest."""
    y = torch.empty_like(x)
    n_rows = y.numel() // weight.shape[0]
    if n_rows:
        launch(found, found.plan.programs(n_rows), 1, (x, None, weight, y, None, eps, n_rows, *rest))
    return y


def add_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    plan: LaunchPlan | None = None,
) -> tuple[Tensor, Tensor]:
    """``forward`` for residual_out = x + residual, stored in residual's dtype, and y = the norm of what is stored."""
    check_add_forward(x, residual, weight, eps, weight_offset)
    return _forward(x, residual, weight, eps, weight_offset, round_before_weight, plan)[:2]


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
    plan: LaunchPlan | None,
    trace: Any = None,
) -> Any:
    """y, residual_out, and what was launched. ``trace`` is traced.py where a compiler is to record the launch."""
    find_rows, align, run = (rows_of, aligned, launch) if trace is None else (trace.rows_of, trace.aligned, trace.launch)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    residual_out = None if residual is None else torch.empty_like(residual, memory_format=torch.contiguous_format)
    if y.numel() == 0:
        return y, residual_out, None, ()
    x_rows = find_rows(x)
    residual_rows = ABSENT if residual is None else find_rows(residual)
    weight = align(weight)
    key = (
        "forward", x.shape[-1], x.dtype, dtype_of(residual), dtype_of(weight), x_rows.facts, residual_rows.facts,
        weight_offset, round_before_weight, x.get_device(), plan,
        HIP and large(x_rows.tensor, residual_rows.tensor, y, residual_out),
    )  # fmt: skip
    found = find(key) or keep(
        key, _prepare(x, residual, x_rows.facts, residual_rows.facts, weight_offset, round_before_weight, plan)
    )
    exchange = slots(found.plan, x_rows, FORWARD_LINES) if found.plan.strategy == "shared" else ()
    rest = (*x_rows.strides, *residual_rows.strides, *(() if exchange else NO_SCALES))
    arguments = (
        x_rows.tensor, residual_rows.tensor, weight, y, residual_out, *exchange, eps, x_rows.n_rows, *rest,
    )  # fmt: skip
    run(found, found.plan.programs(x_rows.n_rows), 1, arguments)
    return y, residual_out, found, rest


def _prepare(
    x: Tensor,
    residual: Tensor | None,
    x_facts: Facts,
    residual_facts: Facts,
    weight_offset: float,
    round_before_weight: bool,
    plan: LaunchPlan | None,
) -> Prepared:
    """The kernel for rows like these, planned."""
    problem = problem_of(x, residual, x.element_size() + (0 if residual is None else residual.element_size()))
    chosen = plan or forward_plan(problem, device.limits(x.device))
    facts = (*x_facts[:2], *residual_facts[:2])
    constants: tuple[Any, ...]
    if chosen.strategy == "shared":
        constants = (
            problem.hidden, weight_offset, round_before_weight, *facts, chosen.head, chosen.slices, chosen.slots, chosen.stages,
        )  # fmt: skip
        return Prepared(kernel("shared", "shared_forward"), chosen, constants, x.device.index)
    constants = (
        problem.hidden, problem.fp64, weight_offset, round_before_weight, *facts, chosen.rows, chosen.head, chosen.tail,
        *ROUNDED,
    )  # fmt: skip
    return Prepared(kernel("forward", f"{chosen.strategy}_forward"), chosen, constants, x.device.index)

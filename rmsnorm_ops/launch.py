"""From tensors to a running kernel: rows from any strides, outputs, plan, launch. Imports triton at the first launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rmsnorm_ops import device
from rmsnorm_ops.contracts import check_forward
from rmsnorm_ops.plan import LaunchPlan, RowProblem, forward_plan
from rmsnorm_ops.rows import VECTOR_BYTES, Rows, rows_of

_ABSENT = (1, 0, 0)  # the row arguments of a tensor that is not there


@dataclass
class Prepared:
    """A kernel with everything but its tensors decided: built once for (operator, hidden, dtypes, options, alignment, device)."""

    kernel: Any
    plan: LaunchPlan
    constants: tuple[Any, ...]
    device: torch.device
    compiled: Any = field(default=None)  # held after the first launch


_prepared: dict[tuple[Any, ...], Prepared] = {}


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
    check_forward(x, weight, eps, weight_offset)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    rows = rows_of(x)
    if weight is not None:
        weight = _aligned(weight)
    key = (
        x.shape[-1], x.dtype, None if weight is None else weight.dtype, rows[5:], weight_offset, round_before_weight,
        x.device, plan,
    )  # fmt: skip
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = _prepared[key] = _prepare_forward(x, rows, weight_offset, round_before_weight, plan)
    _launch(prepared, rows.n_rows, (rows.tensor, None, weight, y, None, eps, rows.n_rows, *rows[2:5], *_ABSENT))
    return y


def _prepare_forward(x: Tensor, rows: Rows, weight_offset: float, round_before_weight: bool, plan: LaunchPlan | None) -> Prepared:
    from rmsnorm_ops.kernels import forward as kernels

    hidden = x.shape[-1]
    fp64 = x.dtype is torch.float64
    if plan is None:
        plan = forward_plan(RowProblem(hidden, x.element_size(), fp64), device.limits(x.device))
    kernel = kernels.resident_forward if plan.strategy == "resident" else kernels.streamed_forward
    constants = (
        hidden, fp64, weight_offset, round_before_weight, rows.align, rows.folded, 1, False,
        plan.rows, plan.head, plan.tail,
    )  # fmt: skip
    return Prepared(kernel, plan, constants, x.device)


def _aligned(weight: Tensor) -> Tensor:
    """The weight with the alignment its loads are compiled for. Those of weight and y fix the order of the row's sum."""
    if not weight.is_contiguous() or weight.data_ptr() % VECTOR_BYTES:
        return weight.clone(memory_format=torch.contiguous_format)
    return weight


def _launch(prepared: Prepared, n_rows: int, arguments: tuple[Any, ...]) -> None:
    """Run on the tensors' own device, whichever is current."""
    from rmsnorm_ops import executors

    index = prepared.device.index
    grid = prepared.plan.programs(n_rows)
    if prepared.device.type == "cpu":
        executors.interpreted(prepared, grid, arguments)
    elif index == torch.cuda.current_device():
        executors.held(prepared, grid, arguments)
    else:
        with torch.cuda.device(index):
            executors.held(prepared, grid, arguments)

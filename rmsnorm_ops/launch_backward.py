"""The backward from tensors to running kernels: rows from any strides, outputs, plan, launches.

Four thin signatures, those of the operators, over one launcher.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rmsnorm_ops import device
from rmsnorm_ops.contracts import check_backward, compute_dtype
from rmsnorm_ops.plan import LaunchPlan, backward_plan, partial_sum_plan, weight_gradient_plan
from rmsnorm_ops.prepared import BACKWARD_LINES, HIP, Prepared, find, keep, kernel, large, launch, slots
from rmsnorm_ops.rows import ABSENT, Facts, Rows, aligned, dtype_of, problem_of, rows_of


def backward(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0, plan: LaunchPlan | None = None
) -> tuple[Tensor, Tensor]:
    """``torch.ops.rmsnorm.backward`` without the dispatcher: (dx, dweight). ``plan`` overrides the launch plan, for tuning.

    Where the kernels run and what is copied: as in ``launch.forward``, dy treated like x.
    """
    dx, _, dweight = _backward(dy, None, x, weight, eps, weight_offset, None, True, plan)
    return dx, dweight


def backward_input(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    plan: LaunchPlan | None = None,
) -> Tensor:
    """dx alone, for a weight that is frozen or absent."""
    dx: Tensor = _backward(dy, None, x, weight, eps, weight_offset, None, False, plan)[0]
    return dx


def add_backward(
    dy: Tensor,
    dsum: Tensor | None,
    residual_out: Tensor,
    weight: Tensor,
    eps: float,
    *,
    weight_offset: float = 0.0,
    dx_dtype: torch.dtype | None = None,
    plan: LaunchPlan | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dresidual, dweight) of the fused add; dresidual is empty where dx has its dtype and serves both."""
    dx, dresidual, dweight = _backward(dy, dsum, residual_out, weight, eps, weight_offset, dx_dtype, True, plan)
    return dx, dx.new_empty(0) if dresidual is None else dresidual, dweight


def add_backward_input(
    dy: Tensor,
    dsum: Tensor | None,
    residual_out: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    dx_dtype: torch.dtype | None = None,
    plan: LaunchPlan | None = None,
) -> tuple[Tensor, Tensor]:
    """(dx, dresidual) of the fused add, for a weight that is frozen or absent."""
    dx, dresidual, _ = _backward(dy, dsum, residual_out, weight, eps, weight_offset, dx_dtype, False, plan)
    return dx, dx.new_empty(0) if dresidual is None else dresidual


def _backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    dx_dtype: torch.dtype | None,
    weight_grad: bool,
    plan: LaunchPlan | None,
    trace: Any = None,
) -> Any:
    """dx, dresidual, dweight. ``trace`` is traced.py where a compiler is to record the launches."""
    find_rows, align, run = (rows_of, aligned, launch) if trace is None else (trace.rows_of, trace.aligned, trace.launch)
    check_backward(dy, x, weight, eps, weight_offset, dsum, dx_dtype)
    dx = torch.empty_like(x, dtype=dx_dtype, memory_format=torch.contiguous_format)
    # dx serves residual too where their dtypes agree, and wherever there was no sum.
    dresidual = None if dx.dtype is x.dtype else torch.empty_like(x, memory_format=torch.contiguous_format)
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if weight_grad and weight is not None else None
    if x.numel() == 0:
        return dx, dresidual, None if dweight is None else dweight.zero_()
    dy_rows, x_rows = find_rows(dy), find_rows(x)
    dsum_rows = ABSENT if dsum is None else find_rows(dsum)
    weight = align(weight)
    facts = (dy_rows.facts, x_rows.facts, dsum_rows.facts)
    key = (
        "backward", x.shape[-1], dy.dtype, x.dtype, dtype_of(dsum), dtype_of(weight), dx.dtype, facts, weight_offset,
        dweight is None, x.get_device(), plan, HIP and large(dy_rows.tensor, x_rows.tensor, dsum_rows.tensor, dx, dresidual),
    )  # fmt: skip
    found = find(key) or keep(key, _prepare(dy, dsum, x, dx, weight, facts, weight_offset, plan))
    programs = found.plan.programs(x_rows.n_rows, min if trace is None else trace.minimum)
    scratch = None
    if dweight is not None:
        # streamed: the two factors of each row's rstd. Otherwise: a partial dweight a program or group of programs.
        streamed = found.plan.strategy == "streamed"
        shape = (x_rows.n_rows, 2) if streamed else (programs // found.plan.slices, x.shape[-1])
        scratch = x.new_empty(shape, dtype=compute_dtype(x.dtype, dx.dtype))
    exchange = slots(found.plan, x_rows, BACKWARD_LINES) if found.plan.strategy == "shared" else ()
    arguments = (
        dy_rows.tensor, x_rows.tensor, dsum_rows.tensor, weight, dx, dresidual, scratch, *exchange, eps, x_rows.n_rows,
        *dy_rows.strides, *x_rows.strides, *dsum_rows.strides,
    )  # fmt: skip
    run(found, programs, 1, arguments)
    if dweight is not None and scratch is not None:
        if found.plan.strategy == "streamed":
            scratch = _weight_partials(dy_rows, x_rows, x.shape[-1], scratch, trace)
        _sum_partials(scratch, dweight, trace)
    return dx, dresidual, dweight


def _prepare(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    dx: Tensor,
    weight: Tensor | None,
    facts: tuple[Facts, Facts, Facts],
    weight_offset: float,
    plan: LaunchPlan | None,
) -> Prepared:
    """The kernel for rows like these, planned."""
    loaded = dy.element_size() + x.element_size() + (0 if dsum is None else dsum.element_size())
    problem = problem_of(x, dx, loaded, 0 if weight is None else weight.element_size())
    chosen = plan or backward_plan(problem, device.limits(x.device))
    alignment = [fact for each in facts for fact in each[:2]]
    constants: tuple[Any, ...]
    if chosen.strategy == "shared":
        constants = (
            problem.hidden, weight_offset, *alignment, chosen.head, chosen.slices, chosen.slots, chosen.stages,
        )  # fmt: skip
        return Prepared(kernel("shared", "shared_backward"), chosen, constants, x.device.index)
    constants = (
        problem.hidden, problem.fp64, weight_offset, *alignment,
        chosen.rows, chosen.head, chosen.tail, chosen.stages, chosen.reload_weight,
    )  # fmt: skip
    return Prepared(kernel("backward", f"{chosen.strategy}_backward"), chosen, constants, x.device.index)


def _weight_partials(dy: Rows, x: Rows, hidden: int, row_scales: Tensor, trace: Any) -> Tensor:
    """Partial sums of dweight [programs, hidden] from rows too wide to keep them beside the row."""
    fp64, where = row_scales.dtype is torch.float64, row_scales.device
    key = (
        "weight_gradient", hidden, dtype_of(dy.tensor), dtype_of(x.tensor), fp64, dy.facts, x.facts, where,
        HIP and large(dy.tensor, x.tensor),
    )  # fmt: skip
    found = find(key)
    if found is None:
        chosen = weight_gradient_plan(hidden, device.limits(where))
        constants = (hidden, fp64, *dy.facts[:2], *x.facts[:2], chosen.rows, chosen.head)
        found = keep(key, Prepared(kernel("backward", "weight_gradient"), chosen, constants, where.index))
    programs = found.plan.programs(x.n_rows, min if trace is None else trace.minimum)
    partials = row_scales.new_empty((programs, hidden))
    (launch if trace is None else trace.launch)(
        found, -(-hidden // found.plan.head), programs,
        (dy.tensor, x.tensor, row_scales, partials, x.n_rows, *dy.strides, *x.strides),
    )  # fmt: skip
    return partials


def _sum_partials(partials: Tensor, dweight: Tensor, trace: Any) -> None:
    """dweight = partials summed over the programs in a fixed order, rounded once."""
    hidden = dweight.shape[0]
    key = ("sum_partials", hidden, partials.dtype, dweight.dtype, dweight.device)
    found = find(key)
    if found is None:
        chosen = partial_sum_plan(hidden)
        constants = (hidden, chosen.rows, chosen.head)
        found = keep(key, Prepared(kernel("backward", "sum_partials"), chosen, constants, dweight.device.index))
    (launch if trace is None else trace.launch)(found, -(-hidden // found.plan.head), 1, (partials, dweight, partials.shape[0]))

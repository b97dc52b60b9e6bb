"""The quantising forward from tensors to a running kernel: those of launch.py, which store codes and scales in place of y."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rmsnorm_ops import device
from rmsnorm_ops.contracts_quant import (
    FORMATS,
    Scaling,
    check_quant,
    check_static_scale,
    empty_codes,
    scaling,
    smallest_scales,
)  # fmt: skip
from rmsnorm_ops.plan import LaunchPlan
from rmsnorm_ops.plan_quant import forward_quant_plan
from rmsnorm_ops.prepared import HIP, Prepared, find, keep, kernel, large, launch
from rmsnorm_ops.rows import ABSENT, Facts, aligned, dtype_of, problem_of, rows_of

STATIC = Scaling(0)  # one scale, which is given


def forward_quant(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    dtype: torch.dtype,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    plan: LaunchPlan | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """``torch.ops.rmsnorm.forward_quant`` without the dispatcher: (q, scale). ``plan`` overrides the launch plan, for tuning: one
    block a row, of a power of two.

    Where the kernels run and what is copied: as in ``launch.forward``.
    """
    check_quant(x, None, weight, eps, weight_offset, dtype)
    how = scaling(x, **options)
    q, scale, _ = _forward(x, None, weight, how.empty(x), eps, dtype, how, weight_offset, round_before_weight, plan)
    return q, scale


def forward_quant_static(
    x: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    eps: float,
    *,
    dtype: torch.dtype,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    plan: LaunchPlan | None = None,
) -> Tensor:
    """q alone, with the one scale that is given."""
    check_quant(x, None, weight, eps, weight_offset, dtype)
    check_static_scale(scale, x)
    q: Tensor = _forward(x, None, weight, scale, eps, dtype, STATIC, weight_offset, round_before_weight, plan)[0]
    return q


def add_forward_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    dtype: torch.dtype,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    plan: LaunchPlan | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, scale, residual_out): ``forward_quant`` of residual_out = x + residual as it is stored, in residual's dtype."""
    check_quant(x, residual, weight, eps, weight_offset, dtype)
    how = scaling(x, **options)
    return _forward(x, residual, weight, how.empty(x), eps, dtype, how, weight_offset, round_before_weight, plan)


def add_forward_quant_static(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    eps: float,
    *,
    dtype: torch.dtype,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    plan: LaunchPlan | None = None,
) -> tuple[Tensor, Tensor]:
    """(q, residual_out), with the one scale that is given."""
    check_quant(x, residual, weight, eps, weight_offset, dtype)
    check_static_scale(scale, x)
    q, _, residual_out = _forward(x, residual, weight, scale, eps, dtype, STATIC, weight_offset, round_before_weight, plan)
    return q, residual_out


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    scale: Tensor,
    eps: float,
    dtype: torch.dtype,
    how: Scaling,
    weight_offset: float,
    round_before_weight: bool,
    plan: LaunchPlan | None,
) -> Any:
    q = empty_codes(x, dtype)
    residual_out = None if residual is None else torch.empty_like(residual, memory_format=torch.contiguous_format)
    if q.numel() == 0:
        return q, scale if how is STATIC else smallest_scales(scale), residual_out
    x_rows = rows_of(x)
    residual_rows = ABSENT if residual is None else rows_of(residual)
    weight = aligned(weight)
    # A bound on the scales is the kernel's argument: that there is one is what it is compiled for.
    compiled_for = how._replace(max_scale=None if how.max_scale is None else 1.0)
    options = (compiled_for, dtype, weight_offset, round_before_weight)
    key = (
        "forward_quant", x.shape[-1], x.dtype, dtype_of(residual), dtype_of(weight), x_rows.facts, residual_rows.facts,
        options, x.get_device(), plan, HIP and large(x_rows.tensor, residual_rows.tensor, q, scale, residual_out),
    )  # fmt: skip
    found = find(key) or keep(key, _prepare(x, residual, x_rows.facts, residual_rows.facts, options, plan))
    # Codes and exponents are bytes to the kernels, whatever the format.
    scale_bytes = aligned(scale) if how is STATIC else scale if how.dtype is torch.float32 else scale.view(torch.int8)
    arguments = (
        x_rows.tensor, residual_rows.tensor, weight, q.view(torch.int8), residual_out, eps, x_rows.n_rows,
        *x_rows.strides, *residual_rows.strides, scale_bytes, how.max_scale,
    )  # fmt: skip
    launch(found, found.plan.programs(x_rows.n_rows), 1, arguments)
    return q, scale, residual_out


def _prepare(
    x: Tensor,
    residual: Tensor | None,
    x_facts: Facts,
    residual_facts: Facts,
    options: tuple[Scaling, torch.dtype, float, bool],
    plan: LaunchPlan | None,
) -> Prepared:
    """The kernel for rows like these, planned."""
    how, dtype, weight_offset, round_before_weight = options
    problem = problem_of(x, residual)
    limits = device.limits(x.device)
    chosen = plan or forward_quant_plan(problem, limits)
    form = FORMATS[dtype]
    constants = (
        problem.hidden, False, weight_offset, round_before_weight, *x_facts[:2], *residual_facts[:2],
        chosen.rows, chosen.head, chosen.tail,
        how.group, form.qmax, how.power_of_two, how.column_major, form.name, limits.converts_to_fp8,
    )  # fmt: skip
    return Prepared(kernel("forward", f"{chosen.strategy}_forward"), chosen, constants, x.device.index)

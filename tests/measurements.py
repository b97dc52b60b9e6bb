"""Measurements made up for tests of what becomes of them, and providers that are right, wrong and worse."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from rmsnorm_ops.bench.cases import Case
from rmsnorm_ops.bench.measure import Measurement, Status
from rmsnorm_ops.bench.problem import Problem
from rmsnorm_ops.bench.providers import ATEN, Provider
from rmsnorm_ops.bench.timing import Timing

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def timing(us: float) -> Timing:
    return Timing(us, us * 0.98, us * 1.02)


def measurement(
    provider: str,
    us: float | None,
    *,
    case: Case,
    operation: str = "forward",
    copy_us: float = 1.0,
    status: Status = "timed",
    reason: str = "",
) -> Measurement:
    problem = Problem(operation, case, BF16, CPU, case.rows)
    return Measurement(problem, provider, status, None if us is None else timing(us), timing(copy_us), reason)


def provider(name: str, **changes: Any) -> Provider:
    """aten under another name, changed."""
    return dataclasses.replace(ATEN, name=name, **changes)


def off_by_a_percent_of_a_row(x: Tensor, weight: Tensor | None, case: Case) -> Tensor:
    """In one element, the last."""
    y = ATEN.norm(x, weight, case)
    y[-1, -1] += 0.05 * y[-1].abs().max()
    return y


def raising(x: Tensor, weight: Tensor | None, case: Case) -> Tensor:
    raise RuntimeError("out of luck\nand more")

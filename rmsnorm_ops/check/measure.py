"""The implementations of this machine, and the error of one of them on one case against the oracle."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rmsnorm_ops import accuracy, launch, reference
from rmsnorm_ops.bench import cases
from rmsnorm_ops.bench.cases import Case
from rmsnorm_ops.bench.command import refuse_interpreter
from rmsnorm_ops.bench.environment import has_triton


@dataclass(frozen=True)
class Implementation:
    """``forward`` takes the operator's arguments; ``elements`` bounds a case's size, by what the implementation costs."""

    name: str
    device: torch.device
    forward: Callable[..., Tensor]
    elements: int
    interpreted: bool = False


@dataclass(frozen=True)
class Result:
    """One implementation on one case in one dtype. ``error`` and ``bound`` are in ulp of that dtype; where there is no
    finite error, ``failure`` says why."""

    implementation: str
    case: Case
    dtype: torch.dtype
    rows: int
    error: float
    bound: float
    failure: str = ""

    @property
    def ok(self) -> bool:
        return not self.failure and self.error <= self.bound


def implementations(device: torch.device) -> list[Implementation]:
    """The CPU operator, and the Triton kernels: on ``device`` where that is a GPU, else through Triton's interpreter."""
    found = [Implementation("CPU operator", torch.device("cpu"), torch.ops.rmsnorm.forward, 2**18)]
    if device.type == "cpu":
        # Triton reads it once, when it is imported: nothing has done so yet in a process that only runs the check.
        os.environ["TRITON_INTERPRET"] = "1"
    if not has_triton():
        return found
    if device.type == "cpu":
        kernels = Implementation("Triton kernels, interpreted on the CPU", device, launch.forward, 2**13, True)
    else:
        refuse_interpreter(device)
        name = f"Triton kernels on {torch.cuda.get_device_name(device)}"
        kernels = Implementation(name, device, torch.ops.rmsnorm.forward, 2**20)
    return [*found, kernels]


def judged() -> tuple[torch.dtype, ...]:
    """The dtypes whose results the oracle can judge: fp64 only where it is finer than fp64."""
    return tuple(dtype for dtype in cases.DTYPES if dtype is not torch.float64 or reference.EXTENDED)


def measure(implementation: Implementation, case: Case, dtype: torch.dtype) -> Result:
    """Run ``case`` once and compare with the oracle. What the implementation raises is a result, not an end of the check."""
    rows = max(min(case.rows, 2), min(case.rows, implementation.elements // case.hidden))
    x, weight = cases.make(case, dtype=dtype, device=implementation.device, rows=rows)
    bound = accuracy.forward_bound(dtype, round_before_weight=case.round_before_weight, interpreted=implementation.interpreted)
    error, failure = math.inf, ""
    try:
        # Squares may overflow on the way, which is an event to the interpreter's numpy and nothing to hardware.
        with np.errstate(all="ignore"):
            y = implementation.forward(x, weight, case.eps, **case.options)
        failure = _wrong_form(y, x)
        if not failure:
            error = accuracy.forward_error(y, x, weight, case.eps, **case.options)
            failure = "NaN or infinity where the exact result is another" if math.isinf(error) else ""
    except Exception as raised:  # whatever it is, the other results still count
        failure = f"{type(raised).__name__}: {raised}".splitlines()[0]
    return Result(implementation.name, case, dtype, x.numel() // case.hidden, error, bound, failure)


def _wrong_form(y: Tensor, x: Tensor) -> str:
    if y.shape != x.shape or y.dtype != x.dtype or not y.is_contiguous():
        return f"y must be dense, {tuple(x.shape)} and {x.dtype}, got {tuple(y.shape)} with strides {y.stride()} and {y.dtype}"
    return ""

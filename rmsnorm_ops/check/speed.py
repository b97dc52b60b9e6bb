"""How fast the operators are on a GPU, against a copy in the same run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rmsnorm_ops.bench import cases, timing, traffic
from rmsnorm_ops.bench.cases import Case, Operands
from rmsnorm_ops.bench.timing import Timing

DTYPE = torch.bfloat16
ELEMENTS = 2**28
OPERATIONS = ("forward", "add_forward", "backward")


@dataclass(frozen=True)
class Speed:
    """The times of an operator and of a copy, and what they had to move, in bytes."""

    case: Case
    rows: int
    operation: str
    time: Timing
    moved_bytes: int
    copy: Timing  # the faster of a memcpy and an elementwise kernel
    copy_bytes: int

    @property
    def gb_s(self) -> float:
        return traffic.gigabytes_per_second(self.moved_bytes, self.time.median_us)

    @property
    def copy_gb_s(self) -> float:
        return traffic.gigabytes_per_second(self.copy_bytes, self.copy.median_us)

    @property
    def fraction(self) -> float:
        """Of the copy's speed, each by the bytes that it had to move."""
        return self.gb_s / self.copy_gb_s


def measure(case: Case, device: torch.device, operation: str = "forward", elements: int = ELEMENTS) -> Speed:
    """Time ``operation`` on ``case`` in bf16 at about ``elements`` elements, or as many as the free memory holds."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # The operands, the copy's target, outputs in the graphs' pools, those of the warm-up; and room for others.
        while elements * DTYPE.itemsize * 16 > free:
            elements //= 2
    rows = max(1, elements // case.hidden)
    memcpys, kernels, calls = [], [], []
    for seed in range(timing.buffer_sets(traffic.copy(rows * case.hidden, DTYPE))):
        operands = cases.make(case, dtype=DTYPE, device=device, seed=seed, rows=rows)
        memcpys.append(partial(torch.empty_like(operands.x).copy_, operands.x))
        kernels.append(partial(torch.neg, operands.x))
        calls.append(_call(operation, case, operands))
    # A copy's speed is that of the faster way to move its bytes. In a graph copy_ is a memcpy node, which on an H200 may reach
    # two thirds of what an elementwise kernel does.
    timed = timing.time_together({"memcpy": memcpys, "kernel": kernels, operation: calls}, device)
    copy = min(timed["memcpy"], timed["kernel"], key=lambda timing: timing.median_us)
    weight = None if operands.weight is None else operands.weight.dtype
    return Speed(
        case, rows, operation, timed[operation], _moved(operation, rows, case.hidden, weight),
        copy, traffic.copy(rows * case.hidden, DTYPE),
    )  # fmt: skip


def _call(operation: str, case: Case, operands: Operands) -> Callable[[], Any]:
    x, weight = operands
    if operation == "forward":
        return partial(torch.ops.rmsnorm.forward, x, weight, case.eps, **case.options)
    other = torch.randn_like(x)
    if operation == "add_forward":
        return partial(torch.ops.rmsnorm.add_forward, x, other, weight, case.eps, **case.options)
    return partial(torch.ops.rmsnorm.backward, other, x, weight, case.eps)


def _moved(operation: str, rows: int, hidden: int, weight: torch.dtype | None) -> int:
    if operation == "forward":
        return traffic.forward(rows, hidden, DTYPE, weight)
    if operation == "add_forward":
        return traffic.add_forward(rows, hidden, DTYPE, DTYPE, weight)
    return traffic.backward(rows, hidden, DTYPE, weight)

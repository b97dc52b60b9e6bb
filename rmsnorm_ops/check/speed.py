"""How fast the forward is on a GPU, against a copy of the same tensor in the same run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from rmsnorm_ops.bench import cases, timing, traffic
from rmsnorm_ops.bench.cases import Case
from rmsnorm_ops.bench.timing import Timing

DTYPE = torch.bfloat16
ELEMENTS = 2**28


@dataclass(frozen=True)
class Speed:
    """The times of the operator and of the copy, and what they had to move, in bytes."""

    case: Case
    rows: int
    forward: Timing
    forward_bytes: int
    copy: Timing
    copy_bytes: int

    @property
    def forward_gb_s(self) -> float:
        return traffic.gigabytes_per_second(self.forward_bytes, self.forward.median_us)

    @property
    def copy_gb_s(self) -> float:
        return traffic.gigabytes_per_second(self.copy_bytes, self.copy.median_us)

    @property
    def fraction(self) -> float:
        """Of the copy's speed, each by the bytes that it had to move."""
        return self.forward_gb_s / self.copy_gb_s


def measure(case: Case, device: torch.device, elements: int = ELEMENTS) -> Speed:
    """Time ``case`` in bf16 at about ``elements`` elements, or as many as the free memory holds."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # x, the copy's target, two outputs in the graph's pool, one of the warm-up; and room for others.
        while elements * DTYPE.itemsize * 8 > free:
            elements //= 2
    rows = max(1, elements // case.hidden)
    copies, calls = [], []
    for seed in range(timing.buffer_sets(traffic.copy(rows * case.hidden, DTYPE))):
        x, weight = cases.make(case, dtype=DTYPE, device=device, seed=seed, rows=rows)
        copies.append(partial(torch.empty_like(x).copy_, x))
        calls.append(partial(torch.ops.rmsnorm.forward, x, weight, case.eps, **case.options))
    timed = timing.time_together({"copy": copies, "forward": calls}, device)
    return Speed(
        case, rows,
        timed["forward"], traffic.forward(rows, case.hidden, DTYPE, None if weight is None else weight.dtype),
        timed["copy"], traffic.copy(rows * case.hidden, DTYPE),
    )  # fmt: skip

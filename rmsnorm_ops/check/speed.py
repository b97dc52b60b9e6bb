"""How fast the operators are on a GPU, against a copy in the same run."""

from __future__ import annotations

import torch

from rmsnorm_ops.bench import measure as measuring
from rmsnorm_ops.bench import problem as problems
from rmsnorm_ops.bench import timing
from rmsnorm_ops.bench.cases import Case
from rmsnorm_ops.bench.measure import Measurement
from rmsnorm_ops.bench.providers import OURS

DTYPE = torch.bfloat16
OPERATIONS = ("forward", "add_forward", "backward")


def measure(case: Case, device: torch.device, operation: str = "forward", elements: int | None = None) -> Measurement:
    """Time ``operation`` on ``case`` in bf16 at about ``elements`` elements, or as many as the free memory holds."""
    problem = problems.sized(operation, case, DTYPE, device, elements=elements)
    return measuring.measure(problem, [OURS], rounds=timing.ROUNDS)[0]

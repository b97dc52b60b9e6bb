"""What is timed: an operation on a case at a size, and its operands."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rmsnorm_ops.bench import cases, timing, traffic
from rmsnorm_ops.bench.cases import Case

# Large enough that neither a start nor a tail shows; on a CPU, small enough for seconds.
GPU_ELEMENTS, CPU_ELEMENTS = 2**28, 2**20
# On a CPU operands may be found in a cache: cold ones would cost minutes.
CPU_SETS = 2
# Room that one provider takes, in tensors of x's size: the outputs and temporaries of a call and of the next, twice over for
# the warm-up has a pool of its own.
TENSORS_PER_PROVIDER = 8


@dataclass(frozen=True)
class Problem:
    """``operation`` of traffic.OPERATIONS or QUANTISED on ``rows`` rows of ``case``, the same for all that are compared."""

    operation: str
    case: Case
    dtype: torch.dtype
    device: torch.device
    rows: int

    @property
    def elements(self) -> int:
        return self.rows * self.case.hidden

    @property
    def weight_dtype(self) -> torch.dtype | None:
        return {"none": None, "float32": torch.float32, "as x": self.dtype}[self.case.weight]

    @property
    def moved_bytes(self) -> int:
        return traffic.moved(self.operation, self.rows, self.case.hidden, self.dtype, self.weight_dtype)

    @property
    def copy_bytes(self) -> int:
        return traffic.copy(self.elements, self.dtype)

    @property
    def sets(self) -> int:
        """How many sets of operands the calls rotate through."""
        sets = timing.buffer_sets(self.copy_bytes)
        return sets if self.device.type == "cuda" else min(sets, CPU_SETS)


class Inputs(NamedTuple):
    """The operands of one call; those that the operation does not take are None."""

    x: Tensor
    weight: Tensor | None
    residual: Tensor | None
    dy: Tensor | None


def sized(
    operation: str, case: Case, dtype: torch.dtype, device: torch.device, *, providers: int = 1, elements: int | None = None
) -> Problem:
    """``case`` at its own rows where they are few, else at about ``elements`` elements, or as many as free memory holds."""
    if case.few:
        return Problem(operation, case, dtype, device, case.rows)
    if elements is None:
        elements = GPU_ELEMENTS if device.type == "cuda" else CPU_ELEMENTS
    if device.type == "cuda":
        with suppress(RuntimeError):  # after a capture that became invalid the allocator may refuse
            torch.cuda.empty_cache()  # what the last problem left in torch's cache is free
        free, _ = torch.cuda.mem_get_info(device)
        while elements * dtype.itemsize * TENSORS_PER_PROVIDER * (1 + providers) > free:
            elements //= 2
    unit = case.heads * (2 if case.heads > 1 else 1)  # whole tokens, and two batches of them
    return Problem(operation, case, dtype, device, max(1, elements // case.hidden // unit) * unit)


def operands(problem: Problem, seed: int) -> Inputs:
    """The operands of ``problem``: other values, in other memory, for another seed."""
    made = cases.make(problem.case, dtype=problem.dtype, device=problem.device, seed=seed, rows=problem.rows)
    operation, _ = traffic.QUANTISED.get(problem.operation, (problem.operation, None))
    if operation == "forward":
        return Inputs(*made, None, None)
    generator = torch.Generator(problem.device).manual_seed(seed + 2**31)  # not x's values again
    other = torch.randn(made.x.shape, dtype=problem.dtype, device=problem.device, generator=generator)
    return Inputs(*made, other, None) if operation == "add_forward" else Inputs(*made, None, other)

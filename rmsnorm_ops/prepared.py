"""Kernels with all but their tensors decided, kept from the first launch on, and the one place that launches them."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rmsnorm_ops.plan import LaunchPlan
from rmsnorm_ops.rows import Rows


@dataclass
class Prepared:
    """A kernel, its plan and its constexprs, for one (operator, hidden, dtypes, options, alignment, device)."""

    kernel: Any
    plan: LaunchPlan
    constants: tuple[Any, ...]
    index: int | None  # of the GPU; None for the interpreter and for inspect/
    # Held after the first launch (executors.py): the compiled kernel's own launch, what it takes before the kernel's
    # arguments, and the hooks of a profiler, which want the public launch.
    run: Callable[..., Any] | None = None
    before: tuple[Any, ...] = ()
    hooks: Any = None


# Of kernels/shared.py and exchange.py: lines of slots a row, and what a slot holds at first.
FORWARD_LINES, BACKWARD_LINES, EMPTY = 3, 5, -1
HIP = torch.version.hip is not None
# What torch.cuda's functions of the same names call once CUDA is initialised, as it is wherever there is a tensor.
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

_prepared: dict[tuple[Any, ...], Prepared] = {}

find = _prepared.get

# Takes the launches, which are on meta tensors, while inspect/ records: (prepared, grid, arguments).
RECORDED: ContextVar[list[tuple[Prepared, tuple[int, int], tuple[Any, ...]]] | None] = ContextVar("recorded", default=None)


def keep(key: tuple[Any, ...], made: Prepared) -> Prepared:
    """The kernel for ``key``: what another thread has kept meanwhile, else ``made``."""
    if RECORDED.get() is not None:  # meta tensors stand for one GPU after another
        return made
    return _prepared.setdefault(key, made)


@cache
def kernel(module: str, name: str) -> Any:
    """A Triton kernel by name. Triton is imported here, at the first launch, not with the package."""
    return getattr(import_module(f"rmsnorm_ops.kernels.{module}"), name)


@cache
def _executors() -> ModuleType:
    return import_module("rmsnorm_ops.executors")


def large(*tensors: Tensor | None) -> bool:
    """Whether Triton for AMD GPUs must address any of these with 64 bits, which a kernel is compiled for. CUDA always does."""
    return HIP and any(tensor is not None and tensor.untyped_storage().nbytes() >= 2**31 for tensor in tensors)


def slots(plan: LaunchPlan, rows: Rows, lines: int) -> tuple[Tensor, ...]:
    """What the programs that share a row publish their parts of its sums in: an argument more of their kernel."""
    assert rows.tensor is not None
    return (torch.full((rows.n_rows, lines, plan.slots), EMPTY, dtype=torch.int32, device=rows.tensor.device),)


def launch(prepared: Prepared, x: int, y: int, arguments: tuple[Any, ...]) -> None:
    """Run ``x`` by ``y`` programs on the tensors' own device, whichever is current."""
    index = prepared.index
    if prepared.run is not None and index == _current_device() and not prepared.hooks.calls:
        # All that the public launch would look up again, ``prepared`` stands for.
        prepared.run(x, y, 1, _current_stream(index), *prepared.before, *arguments, *prepared.constants)
    elif index is None:
        recorded = RECORDED.get()
        if recorded is None:
            _executors().interpreted(prepared, (x, y), arguments)
        else:
            recorded.append((prepared, (x, y), arguments))
    elif index == _current_device():
        _executors().compiled(prepared, (x, y), arguments)
    else:
        with torch.cuda.device(index):
            launch(prepared, x, y, arguments)

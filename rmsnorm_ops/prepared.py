"""Kernels with all but their tensors decided, kept from the first launch on, and the one place that launches them."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from rmsnorm_ops.plan import LaunchPlan


@dataclass
class Prepared:
    """A kernel, its plan and its constexprs, for one (operator, hidden, dtypes, options, alignment, device)."""

    kernel: Any
    plan: LaunchPlan
    constants: tuple[Any, ...]
    device: torch.device
    compiled: Any = field(default=None)  # held after the first launch


_HIP = torch.version.hip is not None

_prepared: dict[tuple[Any, ...], Prepared] = {}

# Takes the launches on meta tensors, while inspect/ records them: (prepared, grid, arguments).
RECORDED: ContextVar[list[tuple[Prepared, tuple[int, int], tuple[Any, ...]]]] = ContextVar("recorded launches")


def prepared(key: tuple[Any, ...], build: Callable[[], Prepared]) -> Prepared:
    """What was built for ``key`` before, or is built now."""
    found = _prepared.get(key)
    if found is None:
        found = build()
        if found.device.type != "meta":  # meta tensors stand for one GPU after another
            _prepared[key] = found
    return found


@cache
def kernel(module: str, name: str) -> Any:
    """A Triton kernel by name. Triton is imported here, at the first launch, not with the package."""
    return getattr(import_module(f"rmsnorm_ops.kernels.{module}"), name)


def large(*tensors: Tensor | None) -> bool:
    """Whether Triton for AMD GPUs must address any of these with 64 bits, which a kernel is compiled for. CUDA always does."""
    return _HIP and any(tensor is not None and tensor.untyped_storage().nbytes() >= 2**31 for tensor in tensors)


def launch(prepared: Prepared, grid: tuple[int, int], arguments: tuple[Any, ...]) -> None:
    """Run on the tensors' own device, whichever is current."""
    from rmsnorm_ops import executors

    index = prepared.device.index
    if prepared.device.type == "cpu":
        executors.interpreted(prepared, grid, arguments)
    elif prepared.device.type == "meta":
        RECORDED.get().append((prepared, grid, arguments))
    elif index == torch.cuda.current_device():
        executors.held(prepared, grid, arguments)
    else:
        with torch.cuda.device(index):
            executors.held(prepared, grid, arguments)

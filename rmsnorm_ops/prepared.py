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


@dataclass
class Prepared:
    """A kernel, its plan and its constexprs, for one (operator, hidden, dtypes, options, alignment, device)."""

    kernel: Any
    plan: LaunchPlan
    constants: tuple[Any, ...]
    device: torch.device
    # Held after the first launch: the compiled kernel's own launch, its function and its metadata.
    run: Callable[..., Any] | None = None
    function: Any = None
    metadata: Any = None


_HIP = torch.version.hip is not None

_prepared: dict[tuple[Any, ...], Prepared] = {}

find = _prepared.get

# Takes the launches on meta tensors, while inspect/ records them: (prepared, grid, arguments).
RECORDED: ContextVar[list[tuple[Prepared, tuple[int, int], tuple[Any, ...]]]] = ContextVar("recorded launches")


def keep(key: tuple[Any, ...], made: Prepared) -> Prepared:
    """The kernel for ``key``: what another thread has kept meanwhile, else ``made``."""
    if made.device.type == "meta":  # which stands for one GPU after another
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
    return _HIP and any(tensor is not None and tensor.untyped_storage().nbytes() >= 2**31 for tensor in tensors)


def launch(prepared: Prepared, grid: tuple[int, int], arguments: tuple[Any, ...]) -> None:
    """Run on the tensors' own device, whichever is current."""
    kind, index = prepared.device.type, prepared.device.index
    if kind == "cpu":
        _executors().interpreted(prepared, grid, arguments)
    elif kind == "meta":
        RECORDED.get().append((prepared, grid, arguments))
    elif index == torch._C._cuda_getDevice():
        _executors().held(prepared, grid, arguments)
    else:
        with torch.cuda.device(index):
            _executors().held(prepared, grid, arguments)

"""Each operator as the call of its launcher on meta tensors: what inspect/ records."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rmsnorm_ops import launch, launch_backward

ROWS = 1024  # of every tensor. No plan depends on it; up to hidden = 2¹⁹ in fp32, a tensor stays below 2 GiB
EPS = 1e-6

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def _forward(x: Tensor, weight: Tensor) -> None:
    launch.forward(x, weight, EPS)


def _add_forward(x: Tensor, weight: Tensor) -> None:
    launch.add_forward(x, x, weight, EPS)


def _backward(x: Tensor, weight: Tensor) -> None:
    launch_backward.backward(x, x, weight, EPS)


def _backward_input(x: Tensor, weight: Tensor) -> None:
    launch_backward.backward_input(x, x, weight, EPS)


def _add_backward(x: Tensor, weight: Tensor) -> None:
    launch_backward.add_backward(x, x, x, weight, EPS)


def _add_backward_input(x: Tensor, weight: Tensor) -> None:
    launch_backward.add_backward_input(x, x, x, weight, EPS)


_LAUNCHERS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "forward": _forward,
    "add_forward": _add_forward,
    "backward": _backward,
    "backward_input": _backward_input,
    "add_backward": _add_backward,
    "add_backward_input": _add_backward_input,
}
OPERATIONS = tuple(_LAUNCHERS)


def call(operation: str, hidden: int, dtype: str) -> None:
    """The operator on dense rows with a weight, every tensor of ``dtype``."""
    x = torch.empty(ROWS, hidden, dtype=DTYPES[dtype], device="meta")
    _LAUNCHERS[operation](x, torch.empty(hidden, dtype=x.dtype, device="meta"))

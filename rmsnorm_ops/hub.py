"""Layers for the ``kernels`` package, by which Hugging Face's transformers swaps the forward of its norms.

A layer there has no state of its own: its forward becomes that of the model's norm, whose weight and eps it reads. One name
("RMSNorm") stands for norms that round differently, so the layers are chosen for a model, by trial as in replace.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rmsnorm_ops.functional import rms_norm
from rmsnorm_ops.module import RMSNorm
from rmsnorm_ops.replace import _equivalent

DEVICES = ("cpu", "cuda", "rocm")


@dataclass(frozen=True)
class Repository:
    """What ``kernels`` calls a repository: where a layer comes from, which is here."""

    layer_name: str
    weight_offset: float
    round_before_weight: bool

    def load(self) -> type[torch.nn.Module]:
        """The layer."""
        return _layer(self.weight_offset, self.round_before_weight)


def kernel_mapping(model: torch.nn.Module) -> dict[str, dict[str, Repository]]:
    """What ``kernels.use_kernel_mapping`` takes, for the norms of ``model``.

    Each layer compiles and has a backward. A name is left out where a norm of that name is one that ``replace_rms_norm`` would
    leave alone, or where two of them follow different conventions.

    Args:
        model: not changed; its norms are run on a fixed input, as in ``replace_rms_norm``.

    Returns:
        Layer names to devices to repositories.

    Example:
        >>> with kernels.use_kernel_mapping(rmsnorm_ops.hub.kernel_mapping(model)):
        ...     kernels.kernelize(model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE)
    """
    conventions: dict[str, set[tuple[float, bool] | None]] = {}
    for module in model.modules():
        name = getattr(type(module), "kernel_layer_name", None)
        if name is not None and type(module).__name__.endswith("RMSNorm"):
            norm = _equivalent(module)
            known = (norm.weight_offset, norm.round_before_weight) if isinstance(norm, RMSNorm) else None
            conventions.setdefault(name, set()).add(known)
    agreed = {name: next(iter(found)) for name, found in conventions.items() if len(found) == 1}
    return {
        name: {device: Repository(name, *convention) for device in DEVICES}
        for name, convention in agreed.items()
        if convention is not None
    }


@cache
def _layer(weight_offset: float, round_before_weight: bool) -> type[torch.nn.Module]:
    options: dict[str, Any] = {"weight_offset": weight_offset, "round_before_weight": round_before_weight}

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        return rms_norm(hidden_states, self.weight, eps, **options)

    members: dict[str, bool | Callable[..., Tensor]] = {"can_torch_compile": True, "has_backward": True, "forward": forward}
    return type("RMSNorm", (torch.nn.Module,), {"__doc__": "The norm of the module whose forward this becomes.", **members})

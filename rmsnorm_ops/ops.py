"""The registered operators: schemas, kernels by device, fake implementations, autograd.

Registered as a library FRAGMENT with hand-written schemas, the cheapest way through the dispatcher. ``_library`` must
outlive every call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rmsnorm_ops import cpu, launch, plain
from rmsnorm_ops.contracts import check_forward

_library = torch.library.Library("rmsnorm", "FRAGMENT")
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)

_library.define(
    "forward(Tensor x, Tensor? weight, float eps, *, float weight_offset=0., bool round_before_weight=False) -> Tensor",
    tags=_TAGS,
)
_library.impl("forward", cpu.forward, "CPU")
_library.impl("forward", launch.forward, "CUDA")  # ROCm devices too
_library.impl("forward", plain.forward, "CompositeExplicitAutograd")  # devices without Triton


def _fake_forward(
    x: Tensor, weight: Tensor | None, eps: float, *, weight_offset: float = 0.0, round_before_weight: bool = False
) -> Tensor:
    check_forward(x, weight, eps, weight_offset)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


torch.library.register_fake("rmsnorm::forward", _fake_forward, lib=_library)


def _forward_autograd(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    if torch.is_grad_enabled() and torch._C._any_requires_grad(x, weight):
        raise NotImplementedError(
            "rmsnorm.forward has no gradient yet: call it under torch.no_grad(), or on tensors that do not require grad"
        )
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.rmsnorm.forward.default(x, weight, eps, **options)


_library.impl("forward", _forward_autograd, "Autograd")

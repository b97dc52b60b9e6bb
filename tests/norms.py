"""Norm classes in the style of Hugging Face's transformers, one a convention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def normed(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def define(name: str, compute: Callable[..., Tensor], *, attribute: str = "eps", base: type[nn.Module] = nn.Module) -> type:
    """A norm class of that name in the style of Hugging Face's transformers: ``compute(x, weight, eps)``."""

    def __init__(self: nn.Module, hidden: int, eps: float = 1e-6) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.ones(hidden))
        setattr(self, attribute, eps)

    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        return compute(hidden_states, self.weight, getattr(self, attribute))

    return type(name, (base,), {"__init__": __init__, "forward": forward})


Llama = define("LlamaRMSNorm", lambda x, w, eps: w * normed(x, eps).to(x.dtype), attribute="variance_epsilon")
Once = define("OnceRMSNorm", lambda x, w, eps: (w * normed(x, eps)).to(x.dtype), attribute="variance_epsilon")
Gemma = define("GemmaRMSNorm", lambda x, w, eps: (normed(x, eps) * (1.0 + w.float())).type_as(x))
Twice = define("OffsetTwiceRMSNorm", lambda x, w, eps: (normed(x, eps).to(x.dtype).float() * (1 + w.float())).to(x.dtype))
CONVENTIONS = {Once: (0.0, False), Llama: (0.0, True), Gemma: (1.0, False), Twice: (1.0, True)}


def holder(*norms: nn.Module) -> nn.Module:
    return nn.ModuleList(norms)

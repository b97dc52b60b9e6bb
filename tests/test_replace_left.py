"""replace_rms_norm: the norms that it leaves alone, and why."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from rmsnorm_ops import replace_rms_norm
from tests.norms import Gemma, Llama, Once, define, holder, normed

# What a norm may compute that no convention of ours does, although on ordinary input it may look like one.
OTHERS = {
    "eps outside the root": lambda x, w, eps: (w * (x.float() / (x.float().pow(2).mean(-1, keepdim=True).sqrt() + eps))).to(
        x.dtype
    ),
    "eps as a floor": lambda x, w, eps: (w * x.float() * x.float().pow(2).mean(-1, keepdim=True).clamp(min=eps).rsqrt()).to(
        x.dtype
    ),
    "another eps": lambda x, w, eps: (w * normed(x, 2 * eps)).to(x.dtype),
    "sum for mean": lambda x, w, eps: (w * x.float() * (x.float().pow(2).sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype),
    "mean removed": lambda x, w, eps: (w * normed(x.float() - x.float().mean(-1, keepdim=True), eps)).to(x.dtype),
    "groups": lambda x, w, eps: (w * normed(x.unflatten(-1, (2, -1)), eps).flatten(-2)).to(x.dtype),
    "over the batch": lambda x, w, eps: (w * normed(x.mT, eps).mT).to(x.dtype),
    "part of the row": lambda x, w, eps: torch.cat([(w * normed(x, eps)).to(x.dtype)[..., :-1], x[..., -1:]], -1),
    "|weight|": lambda x, w, eps: (w.abs() * normed(x, eps)).to(x.dtype),
    "exp(weight)": lambda x, w, eps: (w.exp() * normed(x, eps)).to(x.dtype),
    "offset rounded": lambda x, w, eps: (normed(x, eps) * (1.0 + w).float()).to(x.dtype),
    "weight first": lambda x, w, eps: normed(x.float() * w.float(), eps).to(x.dtype),
    "in bf16 throughout": lambda x, w, eps: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)),
    "rstd rounded": lambda x, w, eps: w * x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps).to(x.dtype),
}


@pytest.mark.parametrize("hidden", [2, 4, 16, 256])
@pytest.mark.parametrize("name", OTHERS)
def test_other_arithmetic_is_left(name: str, hidden: int) -> None:
    model = holder(define("OddRMSNorm", OTHERS[name])(hidden))
    old = model[0]
    assert replace_rms_norm(model).left == {"0": "no convention reproduces what it computes"}
    assert model[0] is old


@pytest.mark.parametrize("mode", [True, False], ids=["training", "eval"])
def test_both_modes_are_probed(mode: bool) -> None:
    """Noise inside a norm that shows in one mode alone, whichever mode the model is in."""

    class DroppingRMSNorm(Llama):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), 0.5, self.training is mode)

    for training in (True, False):
        assert replace_rms_norm(holder(DroppingRMSNorm(8)).train(training)).left


def with_attribute(norm: nn.Module, **attributes: object) -> nn.Module:
    for name, value in attributes.items():
        setattr(norm, name, value)
    return norm


class GatedRMSNorm(Llama):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x) if gate is None else super().forward(x) * gate


def hooked(register: str) -> nn.Module:
    norm = nn.RMSNorm(8)
    getattr(norm, register)(lambda *arguments: None)
    return norm


def obstacles() -> dict[str, nn.Module]:
    norms = {name: hooked(f"register_{name}") for name in ("forward_hook", "forward_pre_hook", "full_backward_hook")}
    norms["state_dict_hook"] = hooked("register_state_dict_post_hook")
    norms["instance"] = with_attribute(nn.RMSNorm(8), forward=lambda x: x)
    norms["parametrized"] = nn.utils.parametrizations.weight_norm(nn.RMSNorm(8))
    norms["bias"] = with_attribute(Llama(8), bias=nn.Parameter(torch.zeros(8)))
    norms["child"] = with_attribute(Llama(8), inner=nn.Linear(2, 2))
    norms["buffer"] = define("BufferRMSNorm", lambda x, w, eps: x)(8)
    del norms["buffer"].weight
    norms["buffer"].register_buffer("weight", torch.ones(8))
    norms["weightless"] = with_attribute(Once(8), weight=None)
    norms["dimensions"] = with_attribute(Llama(8), weight=nn.Parameter(torch.ones(2, 4)))
    norms["int8"] = with_attribute(Llama(8), weight=nn.Parameter(torch.ones(8, dtype=torch.int8), requires_grad=False))
    norms["eps"] = with_attribute(Gemma(8), eps=None)
    norms["negative"] = Gemma(8, -1e-6)
    norms["gate"] = GatedRMSNorm(8)
    norms["fails"] = define("FailingRMSNorm", lambda x, w, eps: x.missing)(8)
    norms["shape"] = define("ShapeRMSNorm", lambda x, w, eps: x[..., :1])(8)
    norms["dtype"] = define("FloatRMSNorm", lambda x, w, eps: w * normed(x, eps))(8)
    norms["subclass"] = define("OddNorm", lambda x, w, eps: 2 * w * normed(x, eps).to(x.dtype), base=nn.RMSNorm)(8)
    return norms


def test_what_is_left_and_why() -> None:
    model = nn.ModuleDict({**obstacles(), "other": nn.LayerNorm(8)})
    old = dict(model.items())
    found = replace_rms_norm(model)
    assert not found.replaced
    assert dict(model.items()) == old
    assert_expected_inline(
        "\n".join(f"{name}: {reason}" for name, reason in found.left.items()),
        """\
forward_hook: it has hooks
forward_pre_hook: it has hooks
full_backward_hook: it has hooks
state_dict_hook: it has hooks
instance: its forward was replaced on the instance
parametrized: it has hooks
bias: it holds more than a weight: weight, bias
child: it holds more than a weight: weight, inner.weight, inner.bias, inner
buffer: its weight is not a parameter of dtype float16, bfloat16, float32 or float64
weightless: it has no weight, which would say over how many elements it norms
dimensions: its weight must have one dimension and an element, and has shape (2, 4)
int8: its weight is not a parameter of dtype float16, bfloat16, float32 or float64
eps: its variance_epsilon or eps must be a finite number that is not negative, and is None
negative: its variance_epsilon or eps must be a finite number that is not negative, and is -1e-06
gate: its forward must take one argument, and takes x, gate
fails: its forward failed on a [batch, rows, hidden] tensor (AttributeError: 'Tensor' object has no attribute 'missing')
shape: its forward does not return one tensor of its input's shape and dtype
dtype: its forward does not return one tensor of its input's shape and dtype
subclass: no convention reproduces what it computes""",
    )

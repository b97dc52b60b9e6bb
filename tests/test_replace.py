"""replace_rms_norm: which convention each norm is found to follow, and that nothing else changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from rmsnorm_ops import RMSNorm, replace_rms_norm
from tests.implementations import random
from tests.norms import CONVENTIONS, Gemma, Llama, define, holder


def convention(norm: RMSNorm) -> tuple[float, bool]:
    return norm.weight_offset, norm.round_before_weight


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-6, 1e-5, 1.0])
@pytest.mark.parametrize("kind", CONVENTIONS)
def test_each_convention_is_found(kind: type, eps: float) -> None:
    for hidden in (1, 2, 3, 4, 7, 8, 16, 64, 1000, 2048):
        if hidden == 1 and eps == 0:  # x · rstd is ±1: there is nothing to round
            continue
        model = holder(kind(hidden, eps))
        found = replace_rms_norm(model)
        assert not found.left, hidden
        assert found.replaced == {"0": model[0]}
        assert convention(model[0]) == CONVENTIONS[kind], hidden
        assert (model[0].normalized_shape, model[0].eps) == ((hidden,), eps)


def test_of_two_conventions_none_is_guessed() -> None:
    found = replace_rms_norm(holder(Llama(1, 0.0)))
    assert found.left == {"0": "more than one convention reproduces what it computes"}


@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", CONVENTIONS)
def test_the_weights_own_value_dtype_and_device_do_not_matter(kind: type, weight_dtype: torch.dtype) -> None:
    zeros, meta = kind(16).to(weight_dtype), kind(16).to(weight_dtype).to("meta")
    nn.init.zeros_(zeros.weight)
    weights = zeros.weight, meta.weight
    model = holder(zeros, meta)
    assert not replace_rms_norm(model).left
    assert [convention(norm) for norm in model] == [CONVENTIONS[kind]] * 2
    assert (model[0].weight, model[1].weight) == weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [*CONVENTIONS, nn.RMSNorm])
def test_the_same_numbers_and_gradients(kind: type, dtype: torch.dtype) -> None:
    old = kind(64).to(dtype)
    nn.init.normal_(old.weight)
    model = holder(copy.deepcopy(old))
    replace_rms_norm(model)
    x = random(32, 64, dtype=dtype).requires_grad_()
    dy = random(32, 64, dtype=dtype, seed=1)
    y, expected = model[0](x), old(x)
    if dtype is torch.bfloat16:
        assert (y == expected).float().mean() > 0.999
    gradients = torch.autograd.grad(y, (x, model[0].weight), dy)
    theirs = torch.autograd.grad(expected, (x, old.weight), dy)
    for ours, reference in zip((y, *gradients), (expected, *theirs), strict=True):
        assert ours.dtype is reference.dtype
        # Norm by norm: the old ones round several times on the way back.
        assert (ours - reference).norm() <= 2 * torch.finfo(dtype).eps * reference.norm()


def test_y_keeps_the_dtype_of_x_where_the_old_norm_promoted() -> None:
    """The documented difference: an fp32 weight under bf16 x."""
    model, x = holder(Llama(16)), random(3, 16, dtype=torch.bfloat16)
    before = model[0](x)
    replace_rms_norm(model)
    assert (before.dtype, model[0](x).dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(model[0](x), before.bfloat16(), rtol=0, atol=0)


def test_torch_norms_keep_their_settings() -> None:
    class Renamed(nn.RMSNorm):  # its forward is torch's
        pass

    old = [nn.RMSNorm([2, 8], 1e-3), nn.RMSNorm(8), nn.RMSNorm(8, elementwise_affine=False), Renamed(8), nn.RMSNorm(0)]
    model = holder(*old).eval()
    model[1].weight.requires_grad_(False)
    assert set(replace_rms_norm(model).replaced) == {"0", "1", "2", "3", "4"}
    for new, was in zip(model, old, strict=True):
        assert type(new) is RMSNorm
        assert (new.normalized_shape, new.eps, new.weight) == (was.normalized_shape, was.eps, was.weight)
        assert new.elementwise_affine == was.elementwise_affine
        assert not new.training
        assert convention(new) == (0.0, False)
    assert not model[1].weight.requires_grad


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.last = Llama(8), nn.Linear(8, 8), Gemma(8)
        self.again = self.norm
        self.last.weight = self.norm.weight  # tied
        self.none = None

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(self.linear(self.norm(x))))


def test_shared_modules_tied_weights_and_the_optimizer() -> None:
    block = Block()
    model = nn.Sequential(block, nn.Sequential(block, nn.Identity()), block.norm)
    names, optimizer = list(model.state_dict()), torch.optim.SGD(model.parameters(), 0.1)
    weight, before = block.norm.weight, model(random(4, 8))
    found = replace_rms_norm(model)
    assert sorted(found.replaced) == ["0.again", "0.last", "0.norm", "2"]
    assert model[2] is block.norm is block.again
    assert model[1][0] is block
    assert block.norm.weight is block.last.weight is weight
    assert list(model.state_dict()) == names
    assert [id(p) for p in model.parameters()] == [id(p) for p in optimizer.param_groups[0]["params"]]
    torch.testing.assert_close(model(random(4, 8)), before)
    old = weight.detach().clone()
    model(random(4, 8)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(block.last.weight, old)


def test_a_second_call_changes_nothing() -> None:
    model = nn.Sequential(Block(), nn.RMSNorm(8), define("OddRMSNorm", lambda x, w, eps: x * w)(8))
    first = replace_rms_norm(model)
    modules = list(model.modules())
    second = replace_rms_norm(model)
    assert list(model.modules()) == modules
    assert not second.replaced
    assert second.left == first.left != {}


@pytest.mark.parametrize("root", [nn.RMSNorm(8), Llama(8)])
def test_the_model_itself_is_left(root: nn.Module) -> None:
    found = replace_rms_norm(root)
    assert (found.replaced, list(found.left)) == ({}, [""])
    assert replace_rms_norm(RMSNorm(8)) == ({}, {})

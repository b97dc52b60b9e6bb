"""Derivatives of every operator against differences in fp64: first, second, forward mode, batched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from tests.implementations import DEVICES, random

ops = torch.ops.rmsnorm
on_each_device = pytest.mark.parametrize("device", DEVICES)
OPTIONS = ({}, {"weight_offset": 1.0})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@on_each_device
def test_gradcheck(device: str, weighted: bool, options: dict[str, float]) -> None:
    """First and second derivatives, forward and reverse, batched, against differences in fp64."""
    if options and not weighted:
        return
    generator = {"dtype": torch.float64, "device": device}
    x, residual = random(2, 5, **generator).requires_grad_(), random(2, 5, seed=1, **generator).requires_grad_()
    weight = (random(5, seed=2, **generator).requires_grad_(),) if weighted else ()

    def one(x: Tensor, *weight: Tensor) -> Tensor:
        return ops.forward(x, weight[0] if weight else None, 1e-2, **options)

    def add(x: Tensor, residual: Tensor, *weight: Tensor) -> tuple[Tensor, Tensor]:
        return ops.add_forward(x, residual, weight[0] if weight else None, 1e-2, **options)

    for function, inputs in ((one, (x, *weight)), (add, (x, residual, *weight))):
        assert gradcheck(function, inputs, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
        assert gradgradcheck(function, inputs, check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True)


@on_each_device
def test_gradients_of_the_backward_operators(device: str) -> None:
    """What create_graph=True differentiates: each of the four, with a gradient at the sum and without."""
    generator = {"dtype": torch.float64, "device": device}
    dy, x, dsum = (random(2, 5, seed=seed, **generator).requires_grad_() for seed in range(3))
    weight = random(5, seed=3, **generator).requires_grad_()
    gradcheck(lambda *t: ops.backward(*t, 1e-2, weight_offset=1.0), (dy, x, weight), check_forward_ad=True)
    gradcheck(lambda *t: ops.backward_input(*t, 1e-2), (dy, x, weight), check_forward_ad=True)
    for arrived in (dsum, None):
        given = (dy, x, weight) if arrived is None else (dy, x, weight, arrived)
        gradcheck(lambda dy, x, weight, dsum=None: ops.add_backward(dy, dsum, x, weight, 1e-2)[::2], given)
        gradcheck(lambda dy, x, weight, dsum=None: ops.add_backward_input(dy, dsum, x, weight, 1e-2)[0], given)

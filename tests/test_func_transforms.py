"""torch.func transforms and their compositions, against the textbook formula: never a silent zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad

from tests.gradients import textbook, textbook_add
from tests.implementations import DEVICES, random

ops = torch.ops.rmsnorm
Function = Callable[..., Any]
EPS = 1e-2


def total(f: Function) -> Function:
    return lambda *args: f(*args).sin().sum()


# Each makes a function of (x, weight) from one.
TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "grad": lambda f: func.grad(total(f)),
    "grad of weight": lambda f: func.grad(total(f), argnums=1),
    "vjp": lambda f: lambda x, weight: func.vjp(f, x, weight)[1](torch.ones_like(f(x, weight)).cumsum(-1))[0],
    "jvp": lambda f: lambda x, weight: func.jvp(f, (x, weight), (x.cos(), weight.sin()))[1],
    "jacrev": func.jacrev,
    "jacfwd": func.jacfwd,
    "vmap x": lambda f: func.vmap(f, in_dims=(0, None)),
    "vmap weight": lambda f: lambda x, weight: func.vmap(f, in_dims=(None, 0))(x, torch.stack((weight, weight + 1))),
    "vmap both": lambda f: lambda x, weight: func.vmap(f)(torch.stack((x, x + 1)), torch.stack((weight, weight * 2))),
    "vmap inner": lambda f: lambda x, weight: func.vmap(f, in_dims=(-2, None), out_dims=-1)(x, weight),
}


def through_add(x: Tensor, weight: Tensor) -> Tensor:
    y, residual_out = ops.add_forward(x, x.sin() + 1, weight, EPS)
    return y * residual_out


def through_textbook_add(x: Tensor, weight: Tensor) -> Tensor:
    y, residual_out = textbook_add(x, x.sin() + 1, weight, EPS)
    return y * residual_out


FUNCTIONS = {
    "forward": (lambda x, w: ops.forward(x, w, EPS), lambda x, w: textbook(x, w, EPS)),
    "add_forward": (through_add, through_textbook_add),
}


def operands(device: str) -> tuple[Tensor, Tensor]:
    return random(2, 3, 4, dtype=torch.float64, device=device), random(4, dtype=torch.float64, device=device, seed=1)


def assert_same(actual: Any, expected: Any) -> None:
    assert bool((expected != 0).any()), "a silent zero would pass"
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("outer", [None, *TRANSFORMS])
@pytest.mark.parametrize("inner", TRANSFORMS)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_two_deep(device: str, function: str, inner: str, outer: str | None) -> None:
    ours, right = (TRANSFORMS[inner](f) for f in FUNCTIONS[function])
    if outer is not None:
        ours, right = TRANSFORMS[outer](ours), TRANSFORMS[outer](right)
    assert_same(ours(*operands(device)), right(*operands(device)))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_hessian_and_a_third_derivative(device: str, function: str) -> None:
    x, weight = operands(device)
    ours, right = (total(f) for f in FUNCTIONS[function])
    assert_same(func.hessian(ours)(x, weight), func.hessian(right)(x, weight))
    thrice = [func.grad(total(func.grad(total(func.grad(f))))) for f in (ours, right)]
    assert_same(thrice[0](x, weight), thrice[1](x, weight))


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_forward_mode_level(device: str, function: str, required: bool) -> None:
    """Of tensors that require grad too, and the gradient of the tangent."""
    tangents = []
    for f in FUNCTIONS[function]:
        x, weight = operands(device)
        x.requires_grad_(required)
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, x.detach().cos()), weight)).tangent
        tangents.append((tangent, torch.autograd.grad(tangent.sin().sum(), x)[0] if required else tangent))
    for actual, expected in zip(*tangents, strict=True):
        assert_same(actual, expected)


@pytest.mark.parametrize("transform", ["grad", "grad of weight", "vjp", "jvp", "jacrev", "vmap x", "vmap both"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_compiled(function: str, transform: str) -> None:
    ours, right = (TRANSFORMS[transform](f) for f in FUNCTIONS[function])
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert_same(compiled(*operands("cpu")), right(*operands("cpu")))


def test_vmap_of_every_backward_operator() -> None:
    dy, x, dsum = (random(3, 2, 4, dtype=torch.float64, seed=seed) for seed in range(3))
    weight = random(4, dtype=torch.float64, seed=3)
    for operator, tensors in (
        (lambda dy, x: ops.backward(dy, x, weight, EPS), (dy, x)),
        (lambda dy, x: ops.backward_input(dy, x, weight, EPS), (dy, x)),
        (lambda dy, x, dsum: ops.add_backward(dy, dsum, x, weight, EPS)[::2], (dy, x, dsum)),
        (lambda dy, x, dsum: ops.add_backward_input(dy, dsum, x, weight, EPS, dx_dtype=torch.float32), (dy, x, dsum)),
    ):
        one_by_one = [operator(*rows) for rows in zip(*tensors, strict=True)]
        if isinstance(one_by_one[0], tuple):
            one_by_one = tuple(torch.stack(part) for part in zip(*one_by_one, strict=True))
        else:
            one_by_one = torch.stack(one_by_one)
        torch.testing.assert_close(func.vmap(operator)(*tensors), one_by_one)

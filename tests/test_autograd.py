"""Gradients of the raw operators and the functions: right, and no more of them than is asked for."""

from __future__ import annotations

import threading
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from rmsnorm_ops import add_rms_norm, rms_norm
from tests.gradients import textbook, textbook_add
from tests.implementations import DEVICES, DTYPES, assert_same_bits, random

ops = torch.ops.rmsnorm
on_each_device = pytest.mark.parametrize("device", DEVICES)
BOTH = (("raw", ops.forward, ops.add_forward), ("function", rms_norm, add_rms_norm))
each_surface = pytest.mark.parametrize(("norm", "add_norm"), [pair[1:] for pair in BOTH], ids=[pair[0] for pair in BOTH])


class Counter(TorchDispatchMode):
    """The rmsnorm operators that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "rmsnorm":
            self.names.append(function._opname)
        return function(*args, **(kwargs or {}))


def leaves(device: str, needs: tuple[bool, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, residual and weight."""
    shapes = ((5, 24), (5, 24), (24,))
    tensors = [random(*shape, dtype=dtype, device=device, seed=seed) for seed, shape in enumerate(shapes)]
    return [tensor.requires_grad_(need) for tensor, need in zip(tensors, needs, strict=True)]


def gradients_of(loss: Tensor, tensors: list[Tensor]) -> list[Tensor | None]:
    return list(torch.autograd.grad(loss, [t for t in tensors if t.requires_grad], allow_unused=True))


def assert_close(actual: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for got, right in zip(actual, expected, strict=True):
        assert (got is None) == (right is None)
        if got is not None:
            torch.testing.assert_close(got, right, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("weight_kind", ["none", "frozen", "trained"])
@pytest.mark.parametrize("x_needs", [False, True])
@each_surface
@on_each_device
def test_forward_computes_what_is_asked_for(device: str, norm: Any, add_norm: Any, x_needs: bool, weight_kind: str) -> None:
    x, _, weight = leaves(device, (x_needs, False, weight_kind == "trained"))
    weight = None if weight_kind == "none" else weight
    y = norm(x, weight, 1e-6)
    assert y.requires_grad == (x_needs or weight_kind == "trained")
    if not y.requires_grad:
        return
    dy = random(5, 24, dtype=torch.float64, device=device, seed=9)
    before = dy.clone()
    with Counter() as counter:
        y.backward(dy)
    assert_same_bits(dy, before)
    assert counter.names == (["backward"] if weight_kind == "trained" else ["backward_input"])
    tensors = [t for t in (x, weight) if t is not None]
    assert_close([t.grad for t in tensors if t.requires_grad], gradients_of((textbook(x, weight, 1e-6) * dy).sum(), tensors))
    assert all(t.grad is None for t in tensors if not t.requires_grad)


@pytest.mark.parametrize("used", ["both", "y", "residual_out"])
@pytest.mark.parametrize("needs", list(product((False, True), repeat=3)), ids=str)
@each_surface
@on_each_device
def test_add_forward_computes_what_is_asked_for(
    device: str, norm: Any, add_norm: Any, needs: tuple[bool, ...], used: str
) -> None:
    tensors = leaves(device, needs)
    outputs = add_norm(*tensors, 1e-6)
    expected = textbook_add(*tensors, 1e-6)
    chosen = {"both": (0, 1), "y": (0,), "residual_out": (1,)}[used]
    cotangents = [random(5, 24, dtype=torch.float64, device=device, seed=7 + index) for index in range(2)]
    if not any(needs) or not any(expected[index].requires_grad for index in chosen):
        return
    loss, right = (sum((out[index] * cotangents[index]).sum() for index in chosen) for out in (outputs, expected))
    with Counter() as counter:
        loss.backward()
    if used == "residual_out":
        assert counter.names == [], "the gradient of a sum is what arrives"
    else:
        assert counter.names == (["add_backward"] if needs[2] else ["add_backward_input"])
    assert_close([t.grad for t in tensors if t.requires_grad], gradients_of(right, tensors))
    stored = [t.grad.untyped_storage().data_ptr() for t in tensors if t.grad is not None]
    assert len(set(stored)) == len(stored), "a .grad is added to in place"


@on_each_device
def test_neither_output_used(device: str) -> None:
    tensors = leaves(device, (True, True, True))
    y, residual_out = ops.add_forward(*tensors, 1e-6)
    with Counter() as counter:
        grads = torch.autograd.grad(torch.zeros((), device=device, requires_grad=True) * 1, tensors, allow_unused=True)
        del y, residual_out
    assert grads == (None, None, None)
    assert counter.names == []


MIXTURES = [
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.float32, torch.bfloat16, torch.float16),
    (torch.float64, torch.float32, torch.bfloat16),
    *((dtype,) * 3 for dtype in DTYPES),
]


@pytest.mark.parametrize("used", ["both", "y", "residual_out"])
@pytest.mark.parametrize("dtypes", MIXTURES, ids=str)
@on_each_device
def test_gradients_have_the_dtypes_of_their_tensors(device: str, dtypes: tuple[torch.dtype, ...], used: str) -> None:
    shapes = ((5, 24), (5, 24), (24,))
    tensors = [
        random(*shape, dtype=dtype, device=device, seed=seed).requires_grad_()
        for seed, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    y, residual_out = ops.add_forward(*tensors, 1e-6)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    right = textbook_add(*wide, 1e-6)
    chosen = {"both": (0, 1), "y": (0,), "residual_out": (1,)}[used]
    sum((out.double() * 2).sum() for index, out in enumerate((y, residual_out)) if index in chosen).backward()
    sum((right[index] * 2).sum() for index in chosen).backward()
    for tensor, exact in zip(tensors, wide, strict=True):
        assert (tensor.grad is None) == (exact.grad is None)
        if tensor.grad is not None:
            assert tensor.grad.dtype is tensor.dtype
            tolerance = 64 * max(torch.finfo(dtype).eps for dtype in dtypes)
            torch.testing.assert_close(tensor.grad.double(), exact.grad, rtol=tolerance, atol=tolerance)


@on_each_device
def test_x_that_is_its_own_residual(device: str) -> None:
    x = random(5, 24, dtype=torch.float64, device=device).requires_grad_()
    weight = random(24, dtype=torch.float64, device=device, seed=1)
    y, residual_out = ops.add_forward(x, x, weight, 1e-6)
    actual = torch.autograd.grad((y.sin() + residual_out.cos()).sum(), x)
    y, residual_out = textbook_add(x, x, weight, 1e-6)
    torch.testing.assert_close(actual, torch.autograd.grad((y.sin() + residual_out.cos()).sum(), x))


@on_each_device
def test_a_view_that_is_differentiated_through(device: str) -> None:
    base = random(5, 48, dtype=torch.float64, device=device).requires_grad_()
    ops.forward(base[..., ::2], None, 1e-6).square().sin().sum().backward()
    (expected,) = torch.autograd.grad(textbook(base[..., ::2], None, 1e-6).square().sin().sum(), base)
    torch.testing.assert_close(base.grad, expected)
    assert not base.grad[..., 1::2].any()


@on_each_device
def test_backward_twice_and_after_a_change_in_place(device: str) -> None:
    x, _, weight = leaves(device, (True, False, True))
    inner = x * 1
    y = ops.forward(inner, weight, 1e-6)
    first = torch.autograd.grad(y.sin().sum(), (x, weight), retain_graph=True)
    for actual, expected in zip(torch.autograd.grad(y.sin().sum(), (x, weight), retain_graph=True), first, strict=True):
        assert_same_bits(actual, expected)
    inner.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    residual_out = ops.add_forward(x, x.detach(), weight, 1e-6)
    residual_out[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        residual_out[0].sum().backward()


@on_each_device
def test_saved_is_what_backward_reads_and_nothing_else(device: str) -> None:
    tensors = leaves(device, (True, True, True))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        ops.forward(tensors[0], tensors[2], 1e-6)
        assert [t.data_ptr() for t in saved] == [tensors[0].data_ptr(), tensors[2].data_ptr()]
        saved.clear()
        _, residual_out = ops.add_forward(*tensors, 1e-6)
        assert [t.data_ptr() for t in saved] == [residual_out.data_ptr(), tensors[2].data_ptr()]


@on_each_device
def test_activation_checkpointing(device: str) -> None:
    x, residual, weight = leaves(device, (True, True, True))

    def block(x: Tensor, residual: Tensor) -> Tensor:
        y, residual_out = add_rms_norm(x.sin(), residual, weight, 1e-6)
        return rms_norm(y * residual_out, weight, 1e-6)

    expected = torch.autograd.grad(block(x, residual).cos().sum(), (x, residual, weight))
    actual = torch.autograd.grad(checkpoint(block, x, residual, use_reentrant=False).cos().sum(), (x, residual, weight))
    for got, right in zip(actual, expected, strict=True):
        assert_same_bits(got, right)


@on_each_device
def test_backward_in_several_threads(device: str) -> None:
    results: list[list[Tensor | None]] = [[] for _ in range(6)]

    def work(index: int) -> None:
        tensors = leaves(device, (True, True, True), torch.float32)
        for _ in range(5):
            y, residual_out = ops.add_forward(*tensors, 1e-6)
            results[index] = gradients_of((y.sin() + residual_out).sum(), tensors)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            assert_same_bits(actual, expected)


@on_each_device
def test_autocast_leaves_gradients_alone(device: str) -> None:
    with torch.autocast(device, dtype=torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            x, residual, weight = leaves(device, (True, True, True), dtype)
            y, residual_out = ops.add_forward(x, residual, weight, 1e-6)
            assert (y.dtype, residual_out.dtype) == (dtype, dtype)
            assert all(grad.dtype is dtype for grad in gradients_of((y + residual_out).sum(), [x, residual, weight]))

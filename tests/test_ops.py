"""The registered operator: its schema, its fake, what it never aliases, and that it loses no gradient silently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

from rmsnorm_ops import rms_norm
from tests.implementations import DEVICES, DTYPES, Implementation, assert_same_bits, random
from tests.layouts import LAYOUTS, Layout
from tests.strategies import Case, cases

EXAMPLES = settings.default.max_examples
forward = torch.ops.rmsnorm.forward.default
WEIGHTS = {
    "no weight": lambda hidden, device: (None, {}),
    "dense": lambda hidden, device: (random(hidden, device=device), {}),
    "strided": lambda hidden, device: (random(2 * hidden, device=device)[::2], {"weight_offset": 1.0}),
    "bf16": lambda hidden, device: (random(hidden, dtype=torch.bfloat16, device=device), {"round_before_weight": True}),
}


def make(layout: Layout, hidden: int, dtype: torch.dtype, device: str) -> Tensor:
    return layout.make(lambda *shape: random(*shape, dtype=dtype, device=device), hidden)


def test_the_schema() -> None:
    schemas = [str(getattr(torch.ops.rmsnorm.forward, overload)._schema) for overload in torch.ops.rmsnorm.forward.overloads()]
    assert_expected_inline(
        "\n".join(schemas).replace(", *, ", ",\n  *, "),
        """\
rmsnorm::forward(Tensor x, Tensor? weight, float eps,
  *, float weight_offset=0., bool round_before_weight=False) -> Tensor""",
    )


def test_inductor_is_told_to_keep_strides() -> None:
    """With a flexible layout it gave x a last stride of 6, which costs a copy; with a fixed order it copied slices of a qkv."""
    assert torch.Tag.needs_exact_strides in forward.tags
    assert torch.Tag.pt2_compliant_tag in forward.tags
    assert not {torch.Tag.flexible_layout, torch.Tag.needs_fixed_stride_order} & set(forward.tags)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_opcheck(layout: Layout, weight: str, device: str) -> None:
    x = make(layout, 16, torch.float32, device)
    w, options = WEIGHTS[weight](16, device)
    torch.library.opcheck(forward, (x, w, 1e-6), options)


@pytest.mark.parametrize("shape", [(5, 0), (0, 0), (0,), (0, 3, 7)], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_opcheck_of_empty_tensors(shape: tuple[int, ...], weighted: bool) -> None:
    torch.library.opcheck(forward, (torch.empty(shape), torch.empty(shape[-1]) if weighted else None, 1e-6))


@settings(max_examples=5 * EXAMPLES)
@given(case=cases())
def test_the_fake_is_the_operator_without_values(operator: Implementation, case: Case) -> None:
    """Strides above all, which not every version of opcheck compares."""
    x, weight = case.tensors(operator)
    assert_fake_is_real(operator, x, weight, case.eps, case.options)


@pytest.mark.parametrize("hidden", [0, 1, 2, 64])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_fake_at_any_layout(implementation: Implementation, layout: Layout, hidden: int) -> None:
    x = make(layout, hidden, torch.float16, implementation.device)
    assert_fake_is_real(implementation, x, None, 1e-6, {})


def assert_fake_is_real(run: Implementation, x: Tensor, weight: Tensor | None, eps: float, options: dict[str, Any]) -> None:
    real = run.forward(x, weight, eps, **options)
    with FakeTensorMode() as mode:
        fake = forward(mode.from_tensor(x), None if weight is None else mode.from_tensor(weight), eps, **options)
    meta = forward(x.to("meta"), None if weight is None else weight.to("meta"), eps, **options)
    expected = facts(real)
    assert facts(fake) == expected
    assert facts(meta)[:-1] == expected[:-1]
    assert real.is_contiguous()


def facts(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.requires_grad, tensor.device


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_y_is_fresh_and_x_and_weight_are_left_alone(implementation: Implementation, layout: Layout) -> None:
    for dtype in DTYPES:
        x, weight = make(layout, 24, dtype, implementation.device), random(48, device=implementation.device)[::2]
        buffers = [tensor._base if tensor._base is not None else tensor for tensor in (x, weight)]
        before = [buffer.clone() for buffer in buffers]
        for used in (weight, None):
            y = implementation.forward(x, used, 0.0)
            if y.numel():
                storages = {tensor.untyped_storage().data_ptr() for tensor in (x, weight)}
                assert y.untyped_storage().data_ptr() not in storages
            y.fill_(7)
        for buffer, old in zip(buffers, before, strict=True):
            assert_same_bits(buffer, old)


@pytest.mark.parametrize("device", DEVICES)
def test_a_negative_bit_is_not_lost(device: str) -> None:
    """The imaginary part of a conjugate shares its memory: only a bit of the tensor says that it is negated."""
    x = torch.view_as_complex(random(3, 16, 2, device=device)).conj().imag
    assert x.is_neg()
    assert_same_bits(forward(x, None, 1e-6), forward(x.resolve_neg(), None, 1e-6))
    weight = torch.view_as_complex(random(16, 2, device=device)).conj().imag
    expected = forward(x.resolve_neg(), weight.resolve_neg(), 1e-6)
    assert_same_bits(forward(x, weight, 1e-6), expected)
    assert_same_bits(rms_norm(x, weight, 1e-6), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_inference_mode(device: str) -> None:
    x = random(3, 16, device=device)
    with torch.inference_mode():
        y = rms_norm(x, x[0])
    assert y.is_inference()
    assert_same_bits(y.clone(), rms_norm(x, x[0]))


def exact_gradients(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
    return torch.autograd.grad(y.square().sum(), (x, weight))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", ["x", "weight", "both"])
def test_a_gradient_is_right_or_refused(which: str, device: str) -> None:
    x, weight = random(3, 16, dtype=torch.float64, device=device), random(16, dtype=torch.float64, device=device)
    needed = [tensor.requires_grad_() for name, tensor in (("x", x), ("weight", weight)) if which in (name, "both")]
    try:
        y = forward(x, weight, 1e-6)
    except NotImplementedError as refusal:
        assert "torch.no_grad()" in str(refusal)  # noqa: PT017  (it need not raise)
    else:
        expected = exact_gradients(x.detach().requires_grad_(), weight.detach().requires_grad_())
        expected = [grad for name, grad in zip(("x", "weight"), expected, strict=True) if which in (name, "both")]
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), needed), tuple(expected))
    with torch.no_grad():
        assert not forward(x, weight, 1e-6).requires_grad


def dual(f: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "forward-mode level": dual,
    "vmap": lambda f, x: torch.vmap(f)(x),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform_is_right_or_refused(transform: str) -> None:
    """Zero tangents, or none, would be wrong without a word."""
    x = random(3, 16, dtype=torch.float64)
    expected = TRANSFORMS[transform](lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6), x)
    try:
        result = TRANSFORMS[transform](lambda x: forward(x, None, 1e-6), x)
    except NotImplementedError:
        return
    torch.testing.assert_close(result, expected)

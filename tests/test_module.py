"""RMSNorm in place of torch.nn.RMSNorm: the same numbers, gradients and checkpoints, and a module in every other respect."""

import copy
import io
import pickle

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from rmsnorm_ops import RMSNorm, accuracy, rms_norm
from tests.implementations import DEVICES, DTYPES, assert_same_bits, random

OPTIONS = {"weight_offset": 1.0, "round_before_weight": True}
# As random input: (normalized_shape, leading dimensions).
SHAPES = [((64,), (5,)), ((1,), (3, 2)), ((3, 5), (4,)), ((2, 3, 4), (2, 2)), ((6, 7), ())]


def pair(shape: tuple[int, ...], dtype: torch.dtype, eps: float | None = 1e-6, device: str = "cpu") -> tuple[RMSNorm, nn.RMSNorm]:
    """This library's module and torch's, of one random weight."""
    ours, theirs = (kind(list(shape), eps, device=device, dtype=dtype) for kind in (RMSNorm, nn.RMSNorm))
    with torch.no_grad():
        theirs.weight.copy_(random(*shape, seed=1))
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def flat(tensor: Tensor, norm: nn.RMSNorm) -> Tensor:
    """With the normalised dimensions as one."""
    return tensor.detach().flatten(tensor.dim() - len(norm.normalized_shape))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "leading"), SHAPES, ids=str)
def test_the_numbers_of_torch(shape: tuple[int, ...], leading: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    ours, theirs = pair(shape, dtype, device=device)
    x = random(*leading, *shape, dtype=dtype, device=device)
    y, reference = ours(x), theirs(x)
    assert (y.shape, y.dtype) == (reference.shape, reference.dtype)
    bound = accuracy.forward_bound(dtype)
    rows, weight = flat(x, ours), ours.weight.detach().reshape(-1)
    assert accuracy.forward_error(flat(y, ours), rows, weight, 1e-6) <= bound
    assert accuracy.forward_error(flat(reference, ours), rows, weight, 1e-6) <= bound + 2, "torch's norm is another one"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "leading"), SHAPES, ids=str)
def test_the_gradients_of_torch(shape: tuple[int, ...], leading: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    ours, theirs = pair(shape, dtype, device=device)
    x = random(*leading, *shape, dtype=dtype, device=device).requires_grad_()
    dy = random(*leading, *shape, dtype=dtype, device=device, seed=2)
    dx, dweight = torch.autograd.grad(ours(x), (x, ours.weight), dy)
    their_dx, their_dweight = torch.autograd.grad(theirs(x), (x, theirs.weight), dy)
    assert (dx.shape, dx.dtype, dweight.shape, dweight.dtype) == (x.shape, dtype, ours.weight.shape, dtype)
    rows, weight = (flat(dy, ours), flat(x, ours)), ours.weight.detach().reshape(-1)
    assert accuracy.input_gradient_error(flat(dx, ours), *rows, weight, 1e-6) <= 1
    assert accuracy.weight_gradient_error(dweight.reshape(-1), *rows, weight, 1e-6) <= 1
    # Torch's half-precision gradients pass through several roundings, and cancel where hidden is 1.
    unit = torch.finfo(dtype).eps * 32
    torch.testing.assert_close(dx, their_dx, rtol=unit, atol=unit)
    torch.testing.assert_close(dweight, their_dweight, rtol=unit, atol=unit)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eps_none_is_torchs_rule(dtype: torch.dtype) -> None:
    """At a magnitude where eps is most of the mean square."""
    ours, theirs = pair((32,), dtype, None)
    x = (random(4, 32, dtype=torch.float64) * (2.0**-27 if dtype is torch.float64 else 2.0**-13)).to(dtype)
    torch.testing.assert_close(ours(x), theirs(x), rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert not torch.allclose(ours(x), RMSNorm(32, 0.0, dtype=dtype)(x), rtol=0.1)


def test_the_options_reach_the_operator_and_its_gradient() -> None:
    norm = RMSNorm([4, 8], 1e-6, dtype=torch.bfloat16, **OPTIONS)
    with torch.no_grad():
        norm.weight.copy_(random(4, 8))
    x = random(3, 4, 8, dtype=torch.bfloat16).requires_grad_()
    rows, weight = x.detach().flatten(1).requires_grad_(), norm.weight.detach().flatten().requires_grad_()
    expected = rms_norm(rows, weight, 1e-6, **OPTIONS)
    y = norm(x)
    assert_same_bits(y.flatten(1).detach(), expected.detach())
    y.sum().backward()
    expected.sum().backward()
    assert_same_bits(x.grad.flatten(1), rows.grad)
    assert_same_bits(norm.weight.grad.flatten(), weight.grad)


def test_state_dicts_go_both_ways() -> None:
    for affine in (True, False):
        ours = RMSNorm([2, 3], 1e-5, affine)
        theirs = nn.RMSNorm([2, 3], 1e-5, affine)
        if affine:
            nn.init.normal_(ours.weight)
        assert list(ours.state_dict()) == list(theirs.state_dict()) == (["weight"] if affine else [])
        theirs.load_state_dict(ours.state_dict())
        nn.init.zeros_(ours.weight) if affine else None
        ours.load_state_dict(theirs.state_dict())
        x = random(4, 2, 3)
        torch.testing.assert_close(ours(x), theirs(x))
    with pytest.raises(RuntimeError, match="size mismatch"):
        RMSNorm(4).load_state_dict(nn.RMSNorm(5).state_dict())


def via_torch_save(norm: RMSNorm) -> RMSNorm:
    buffer = io.BytesIO()
    torch.save(norm, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda norm: pickle.loads(pickle.dumps(norm)), via_torch_save])
def test_copies(copied: object) -> None:
    norm = RMSNorm([3, 4], 1e-5, **OPTIONS).eval()
    nn.init.normal_(norm.weight)
    norm(random(3, 4))  # what it may hold after a call must not get in the way
    other = copied(norm)
    assert repr(other) == repr(norm)
    assert not other.training
    assert other.weight.data_ptr() != norm.weight.data_ptr()
    x = random(2, 3, 4)
    assert_same_bits(other(x).detach(), norm(x).detach())


@pytest.mark.parametrize("offset", [0.0, 1.0, 0.5])
def test_initialised_to_scale_by_one(offset: float) -> None:
    norm = RMSNorm(8, 1e-6, device="meta", dtype=torch.bfloat16, weight_offset=offset)
    assert (norm.weight.device.type, norm.weight.dtype) == ("meta", torch.bfloat16)
    assert norm(torch.empty(2, 8, device="meta")).device.type == "meta"
    norm.to_empty(device="cpu")
    nn.init.constant_(norm.weight, 7)
    norm.reset_parameters()
    assert torch.equal(norm.weight, torch.full((8,), 1 - offset, dtype=torch.bfloat16))
    assert torch.equal(RMSNorm(8, weight_offset=offset).weight, torch.full((8,), 1 - offset))
    x = random(2, 8, dtype=torch.bfloat16)
    assert_same_bits(norm(x).detach(), rms_norm(x, None, 1e-6))


def test_casts() -> None:
    norm = RMSNorm(8).half()
    assert norm.weight.dtype is torch.float16
    assert norm(random(2, 8, dtype=torch.float16)).dtype is torch.float16
    assert RMSNorm(8)(random(2, 8, dtype=torch.bfloat16)).dtype is torch.bfloat16, "y has x's dtype whatever weight's is"


def test_strided_input_over_several_dimensions() -> None:
    norm = RMSNorm([4, 6], 1e-6)
    nn.init.normal_(norm.weight)
    wide = random(5, 4, 12)
    for x in (wide[..., ::2], random(6, 5, 4).permute(1, 2, 0), wide[:1, :, :6].expand(5, 4, 6), random(4, 6)):
        assert_same_bits(norm(x).detach(), norm(x.contiguous()).detach())
        assert norm(x).is_contiguous()


def test_empty() -> None:
    for shape, x in (
        ([3, 0], torch.ones(2, 3, 0)),
        ([0], torch.ones(2, 0)),
        ([4], torch.ones(0, 4)),
        ([2, 4], torch.ones(0, 2, 4)),
    ):
        norm = RMSNorm(shape)
        y = norm(x.requires_grad_())
        assert y.shape == x.shape
        y.sum().backward()
        assert torch.equal(norm.weight.grad, torch.zeros(shape))


def test_vmap_over_any_dimension() -> None:
    for norm in (RMSNorm(6, 1e-6), RMSNorm([4, 6], 1e-6)):
        x = random(4, 3, 6)
        y = torch.func.vmap(norm, in_dims=1, out_dims=1)(x)
        expected = norm(x.transpose(0, 1)).transpose(0, 1)
        torch.testing.assert_close(y, expected)


# This module does without "from __future__ import annotations": a torch.fx graph does not pickle a string for a type.
class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = RMSNorm(8, 1e-6, **OPTIONS), RMSNorm([2, 4])
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.linear(self.first(x)).unflatten(-1, (2, 4)))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_whole(backend: str) -> None:
    model, x = Model(), random(3, 8)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for rows in (x, random(7, 8, seed=3)):
        gradients = [torch.autograd.grad(call(rows).square().sum(), list(model.parameters())) for call in (model, compiled)]
        torch.testing.assert_close(compiled(rows), model(rows))
        torch.testing.assert_close(*gradients)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace:DeprecationWarning")
def test_traces() -> None:
    """By torch.jit.trace, torch.export and torch.fx, whose Proxy has neither a shape to check nor a dtype for eps=None."""
    model, x, more = Model(), random(3, 8), random(5, 8, seed=4)
    graph = torch.fx.symbolic_trace(model)
    rows = torch.export.Dim("rows", min=2)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: rows},)).module()
    for traced in (graph, pickle.loads(pickle.dumps(graph)), torch.jit.trace(model, (x,)), exported):
        for rows in (x, more):
            torch.testing.assert_close(traced(rows), model(rows))
    with pytest.raises(ValueError, match="last dimensions"):
        graph(random(3, 9))


def test_representation() -> None:
    assert repr(RMSNorm([2, 4], 1e-6, False)) == repr(nn.RMSNorm([2, 4], 1e-6, False))
    assert_expected_inline(
        f"{RMSNorm(8)}\n{RMSNorm(8, 1e-5, **OPTIONS)}",
        """\
RMSNorm((8,), eps=None, elementwise_affine=True)
RMSNorm((8,), eps=1e-05, elementwise_affine=True, weight_offset=1.0, round_before_weight=True)""",
    )


def test_errors() -> None:
    calls = {
        "another width": lambda: RMSNorm(8)(torch.ones(2, 9)),
        "without a weight": lambda: RMSNorm(8, elementwise_affine=False)(torch.ones(2, 9)),
        "too few dimensions": lambda: RMSNorm([2, 4])(torch.ones(4)),
        "same number of elements": lambda: RMSNorm([2, 4])(torch.ones(3, 8)),
        "no dimension": lambda: RMSNorm(8)(torch.tensor(1.0)),
        "nothing to norm": lambda: RMSNorm([]),
        "offset without weight": lambda: RMSNorm(8, elementwise_affine=False, weight_offset=1.0),
    }
    sentences = []
    for name, call in calls.items():
        with pytest.raises(ValueError, match="must") as raised:
            call()
        sentences.append(f"{name}: {raised.value}")
    assert_expected_inline(
        "\n".join(sentences),
        """\
another width: x must have last dimensions (8,), got shape (2, 9)
without a weight: x must have last dimensions (8,), got shape (2, 9)
too few dimensions: x must have last dimensions (2, 4), got shape (4,)
same number of elements: x must have last dimensions (2, 4), got shape (3, 8)
no dimension: x must have last dimensions (8,), got shape ()
nothing to norm: normalized_shape must name at least one dimension, got ()
offset without weight: weight_offset must be 0 when there is no weight, got 1.0""",
    )

"""The fused residual add: the sum as it is stored, and the norm of what is stored."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from rmsnorm_ops import accuracy, add_rms_norm, reference
from rmsnorm_ops.contracts import compute_dtype
from tests.gradients import PLAIN, TRITON, Training, assert_dense, each_dtype, each_implementation, each_operator
from tests.implementations import CPU, DTYPES, assert_same_bits
from tests.implementations import TRITON as TRITON_FORWARD
from tests.layouts import LAYOUTS, Layout
from tests.strategies import Case, cases

EXAMPLES = settings.default.max_examples
OPTIONS = ({}, {"weight_offset": 1.0}, {"round_before_weight": True}, {"round_before_weight": True, "weight_offset": 1.0})
HALVES = (torch.float16, torch.bfloat16)


def assert_right(run: Training, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, **options: float) -> None:
    y, residual_out = run.of.add_forward(x, residual, weight, eps, **options)
    assert_dense(y, x.shape, x.dtype)
    assert_dense(residual_out, x.shape, residual.dtype)
    assert_sum(run, residual_out, x, residual)
    # Of the sum as it is stored, in the compute type of both.
    compute = torch.promote_types(compute_dtype(x.dtype), compute_dtype(residual.dtype))
    stored = residual_out.to(compute)
    exact = reference.forward(stored, weight, eps, weight_offset=options.get("weight_offset", 0.0))
    bound = accuracy.forward_bound(
        x.dtype,
        round_before_weight=bool(options.get("round_before_weight")),
        interpreted=run.interpreted,
        unfused=run in PLAIN,
    )
    assert accuracy.ulp_error(y, exact, abs(exact) * accuracy.unit(compute)) <= bound


def assert_sum(run: Training, residual_out: Tensor, x: Tensor, residual: Tensor) -> None:
    """One rounding of the sum, which fp64 holds exactly but for fp64's own; the interpreter's bf16 is cut off instead."""
    wide = x.double() + residual.double()
    expected = (x.to(compute := sum_type(x, residual)) + residual.to(compute)).to(residual.dtype)
    if run.interpreted and residual.dtype is torch.bfloat16:
        assert accuracy.ulp_error(residual_out, reference.wide(wide)) <= 1
    else:
        assert_same_bits(residual_out, expected)


def sum_type(x: Tensor, residual: Tensor) -> torch.dtype:
    return torch.promote_types(compute_dtype(x.dtype), compute_dtype(residual.dtype))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("residual_dtype", DTYPES, ids=str)
@each_dtype
@each_implementation
def test_any_pair_of_dtypes(run: Training, dtype: torch.dtype, residual_dtype: torch.dtype, options: dict[str, float]) -> None:
    if run.interpreted and torch.bfloat16 in (dtype, residual_dtype) and torch.float64 in (dtype, residual_dtype):
        pytest.skip("needs a GPU: Triton's interpreter has no cast from fp64 to bf16")
    x, residual = run.random(5, 96, dtype=dtype), run.random(5, 96, dtype=residual_dtype, seed=1)
    for weight in (run.random(96, dtype=torch.bfloat16, seed=2), run.random(96, dtype=residual_dtype, seed=2)):
        assert_right(run, x, residual, weight, 1e-6, **options)


@pytest.mark.parametrize("hidden", [1, 3, 127, 1025, 4096, 5120, 20000])
@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32], ids=str)
@each_implementation
def test_any_size(run: Training, residual_dtype: torch.dtype, hidden: int) -> None:
    x, residual = run.random(3, hidden, dtype=torch.bfloat16), run.random(3, hidden, dtype=residual_dtype, seed=1)
    assert_right(run, x, residual, run.random(hidden, seed=2), 1e-6)
    assert_right(run, x, residual, None, 0.0)


@settings(max_examples=EXAMPLES)
@given(case=cases())
@each_operator
def test_the_norm_of_the_stored_sum_to_the_bit(run: Training, case: Case) -> None:
    """Where the dtypes agree; over the whole range, so that sums overflow too."""
    x, weight = case.tensors(TRITON_FORWARD if run is TRITON else CPU)
    residual = x.flip(-1).contiguous() * 3 if not run.interpreted or x.dtype is not torch.bfloat16 else x.neg() * 0.5
    y, residual_out = run.of.add_forward(x, residual, weight, case.eps, **case.options)
    assert_same_bits(y, run.of.forward(residual_out, weight, case.eps, **case.options))
    if not (run.interpreted and x.dtype is torch.bfloat16):
        assert_same_bits(residual_out, x + residual)
        assert_same_bits(y, run.of.forward(x + residual, weight, case.eps, **case.options))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@each_implementation
def test_a_sum_that_rounds(run: Training, dtype: torch.dtype) -> None:
    """|residual| ≫ |x|: the norm of the unrounded sum would be another."""
    x, residual = run.random(8, 512, dtype=dtype) * 0.3, run.random(8, 512, dtype=dtype, seed=1) * 256
    assert_right(run, x, residual, None, 1e-6)
    y = run.of.add_forward(x, residual, None, 1e-6)[0]
    unrounded = run.of.forward(x.float() + residual.float(), None, 1e-6)
    assert not torch.equal(y.float(), unrounded.to(dtype).float())


@each_implementation
def test_a_sum_beyond_fp16(run: Training) -> None:
    """Infinite in fp16, finite in an fp32 residual."""
    x = torch.full((2, 64), 4e4, dtype=torch.float16, device=run.device)
    y, residual_out = run.of.add_forward(x, x, None, 1e-6)
    assert bool(residual_out.isinf().all())
    assert bool(y.isnan().all()), "infinity · 0, as forward(residual_out) has it"
    y, residual_out = run.of.add_forward(x, x.float(), None, 1e-6)
    assert bool((residual_out == 8e4).all())
    assert bool((y == 1).all())


@pytest.mark.parametrize("hidden", [24])
@pytest.mark.parametrize("residual_layout", LAYOUTS[3::6], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@each_operator
def test_any_two_layouts(run: Training, layout: Layout, residual_layout: Layout, hidden: int) -> None:
    x = layout.make(lambda *shape: run.random(*shape, dtype=torch.float16), hidden)
    residual = residual_layout.make(lambda *shape: run.random(*shape, seed=1), hidden)
    count = min(x.numel(), residual.numel()) // hidden
    x, residual = flat(x, count), flat(residual, count)
    dense = [tensor.clone(memory_format=torch.contiguous_format) for tensor in (x, residual)]
    before = [tensor.clone() for tensor in (x, residual)]
    for actual, expected in zip(run.of.add_forward(x, residual, None, 0.0), run.of.add_forward(*dense, None, 0.0), strict=True):
        assert_same_bits(actual, expected)
    for tensor, old in zip((x, residual), before, strict=True):
        assert_same_bits(tensor, old)


def flat(tensor: Tensor, rows: int) -> Tensor:
    """The first ``rows`` rows along the dims that a view reaches, else all of them along the first dim."""
    try:
        return tensor.view(-1, tensor.shape[-1])[:rows]
    except RuntimeError:
        return tensor.flatten(0, -2)[:rows]


@each_implementation
def test_nothing_aliases(run: Training) -> None:
    """Adding zeros, an empty tensor, a tensor to itself: y and residual_out are always new."""
    for x in (run.random(3, 64), run.random(0, 64), run.random(1, 1)):
        for residual in (x, torch.zeros_like(x)):
            outputs = run.of.add_forward(x, residual, None, 0.0)
            addresses = [tensor.untyped_storage().data_ptr() for tensor in (x, *outputs) if tensor.numel()]
            assert len(set(addresses)) == len(addresses)


@each_implementation
def test_empty_tensors(run: Training) -> None:
    for shape in ((0, 64), (5, 0), (0,), (3, 0, 64)):
        x = torch.empty(shape, dtype=torch.bfloat16, device=run.device)
        y, residual_out = run.of.add_forward(x, x.float(), None, 0.0)
        assert (y.shape, y.dtype, residual_out.shape, residual_out.dtype) == (x.shape, x.dtype, x.shape, torch.float32)


def test_the_function_names_its_results_and_goes_by_the_compute_type_for_eps() -> None:
    x, residual = torch.full((1, 8), 1e-8), torch.zeros(1, 8, dtype=torch.float64)
    result = add_rms_norm(x, residual)
    assert result._fields == ("y", "residual_out")
    assert_same_bits(result.y, torch.ops.rmsnorm.add_forward(x, residual, None, torch.finfo(torch.float64).eps)[0])
    assert not torch.equal(result.y, torch.ops.rmsnorm.add_forward(x, residual, None, torch.finfo(torch.float32).eps)[0])

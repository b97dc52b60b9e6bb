"""Codes and scales: the rules of docs/quantisation.md, against extended precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rmsnorm_ops.contracts_quant import FORMATS
from tests.implementations import assert_same_bits
from tests.quantised import (
    TRITON,
    Quantiser,
    assert_right,
    assert_same_codes,
    bytes_of,
    codes_of,
    each_format,
    each_implementation,
    values_of,
)  # fmt: skip
from tests.strategies import Case, cases

EXAMPLES = settings.default.max_examples
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# Beside it x² does not count where |x| < 2¹⁶: rstd is 2⁻³⁰, and y is x · 2⁻³⁰ · weight.
EPS = 2.0**60


def exactly(run: Quantiser, y: Tensor) -> tuple[Tensor, Tensor, float]:
    """x, weight and eps whose y is ``y``, to the last bit: products with powers of two."""
    exponent = math.frexp(float(y.abs().max()))[1]
    x = y * 2.0 ** (15 - exponent)
    return x.to(run.device), torch.full(y.shape[-1:], 2.0 ** (exponent + 15), device=run.device), EPS


@settings(max_examples=4 * EXAMPLES)
@given(
    case=cases(dtypes=FLOATS),
    dtype=st.sampled_from(list(FORMATS)),
    group_size=st.sampled_from([None, None, 32, 64, 128]),
    power_of_two=st.booleans(),
)
@each_implementation
def test_any_magnitude_group_and_shape(
    run: Quantiser, case: Case, dtype: torch.dtype, group_size: int | None, power_of_two: bool
) -> None:
    x, weight = case.tensors(run.like)
    options = {"dtype": dtype, "group_size": group_size, "weight_offset": case.weight_offset}
    q, scale = run.of.forward_quant(x, weight, case.eps, power_of_two_scale=power_of_two, **options)
    assert (q.shape, q.dtype) == (x.shape, dtype)
    assert q.is_contiguous()
    if x.numel():
        assert_right(run, q, scale, x, weight, case.eps, power_of_two=power_of_two, **options)


@pytest.mark.parametrize("hidden", [1, 31, 64, 100, 128, 300, 1024, 1001, 5120, 20000])
@pytest.mark.parametrize("group_size", [None, 64, 128])
@each_implementation
def test_any_size(run: Quantiser, group_size: int | None, hidden: int) -> None:
    for dtype in (torch.float8_e4m3fn, torch.int8):
        x, weight = run.random(5, hidden, dtype=torch.float16), run.random(hidden, seed=1)
        q, scale = run.of.forward_quant(x, weight, 1e-6, dtype=dtype, group_size=group_size)
        assert scale.shape == (5, -(-hidden // group_size) if group_size else 1)
        assert_right(run, q, scale, x, weight, 1e-6, dtype=dtype, group_size=group_size)


@pytest.mark.parametrize("group_size", [None, 32, 64, 128])
@each_format
@each_implementation
def test_scales_are_exact_where_y_is(run: Quantiser, dtype: torch.dtype, group_size: int | None) -> None:
    y = torch.randn(6, 300, generator=torch.Generator().manual_seed(3)) * torch.logspace(-12, 5, 6)[:, None]
    q, scale = run.of.forward_quant(*exactly(run, y), dtype=dtype, group_size=group_size)
    group = group_size or 300
    amax = torch.nn.functional.pad(y, (0, -300 % group)).unflatten(-1, (-1, group)).abs().amax(-1)
    assert_same_bits(scale.cpu(), amax / FORMATS[dtype].qmax)
    expected = saturated(y / scale.cpu().repeat_interleave(group, -1)[:, :300], dtype)
    if not run.unfused or run is not TRITON:
        assert_same_codes(q.cpu(), expected)


def saturated(quotient: Tensor, dtype: torch.dtype) -> Tensor:
    """The rule on what is divided already, by torch's own casts."""
    qmax = FORMATS[dtype].qmax
    if dtype is torch.int8:
        return quotient.round().clamp(-qmax, qmax).to(dtype)
    return quotient.clamp(-qmax, qmax).to(dtype)


def around_every_code(dtype: torch.dtype) -> Tensor:
    """Each value of a format, each tie, their fp32 neighbours, what lies beyond, and both zeros."""
    values = codes_of(dtype)
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    points = torch.from_numpy(np.concatenate([points, values[-1:] * 1.0625, values[-1:] * 4, values[:1] * 4])).float()
    up, down = (torch.nextafter(points, torch.tensor(end)) for end in (math.inf, -math.inf))
    found = torch.cat([points, up, down, torch.tensor([0.0, -0.0, 1e-20, -1e-20])])
    return found[(found.abs() > 1e-30) | (found == 0)]


@each_format
@each_implementation
def test_every_code_and_every_tie(run: Quantiser, dtype: torch.dtype) -> None:
    """As torch casts, to the bit: nearest, ties to even, subnormal codes, saturated, the sign of zero."""
    y = around_every_code(dtype)
    for exponent in (0, -20, 70):
        q = static(run, y * 2.0**exponent, torch.tensor(2.0**exponent), dtype)
        assert_same_codes(q, saturated(y, dtype))


def static(run: Quantiser, y: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    x, weight, eps = exactly(run, y)
    q: Tensor = run.of.forward_quant_static(x, weight, scale.to(run.device), eps, dtype=dtype)
    return q.cpu()


@each_format
@each_implementation
def test_a_scale_that_is_no_power_of_two(run: Quantiser, dtype: torch.dtype) -> None:
    """The division is a true one: with a reciprocal in its place some of these ties would fall the other way."""
    points = around_every_code(dtype)
    differ = total = 0
    for number in (3.0, 0.7, 1 / 448, 1.9999999, 1e-15, 1.2345e4):
        scale = torch.tensor(number)
        y = points * scale
        q = static(run, y, scale, dtype)
        expected = saturated(y / scale, dtype)
        total += y.numel()
        differ += int((bytes_of(q) != bytes_of(expected)).sum())
        assert (
            np.abs(np.searchsorted(codes_of(dtype), values_of(q)) - np.searchsorted(codes_of(dtype), values_of(expected))).max()
            <= 1
        )
    assert differ == 0 or (run is TRITON and run.unfused and differ < total / 4)


@each_format
@each_implementation
def test_rounding_is_unbiased(run: Quantiser, dtype: torch.dtype) -> None:
    """Over numbers that fall anywhere between two codes, as many go up as down, and errors cancel: to four standard errors."""
    generator = torch.Generator().manual_seed(1)
    y = (torch.rand(64, 1024, generator=generator) * 2 - 1) * 100
    error = static(run, y, torch.tensor(1.0), dtype).double() - y.double()
    moved = error[error != 0]
    assert abs(float(moved.mean())) < 4 * float(moved.std()) / len(moved) ** 0.5
    ups = int((moved > 0).sum())
    assert abs(ups - len(moved) / 2) < 4 * (len(moved) / 4) ** 0.5

"""Codes and scales of zeros, NaN and infinities, and what the options of a scale do."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from rmsnorm_ops import prepared
from rmsnorm_ops.contracts_quant import FORMATS, SMALLEST_SCALE
from tests.implementations import assert_same_bits
from tests.quantised import (
    TRITON,
    Quantiser,
    assert_right,
    assert_same_codes,
    bytes_of,
    each_format,
    each_implementation,
    each_operator,
    values_of,
)  # fmt: skip


@pytest.mark.parametrize("group_size", [None, 64])
@each_format
@each_implementation
def test_zero_rows(run: Quantiser, dtype: torch.dtype, group_size: int | None) -> None:
    x = run.random(3, 200)
    x[1] = 0
    q, scale = run.of.forward_quant(x, None, 1e-6, dtype=dtype, group_size=group_size)
    assert not bytes_of(q[1]).any()
    assert bool((scale[1] == SMALLEST_SCALE).all())
    q, scale = run.of.forward_quant(x, None, 0.0, dtype=dtype, group_size=group_size)
    assert bool(scale[1].isnan().all()), "y is NaN there, as that of forward"


@each_format
@each_implementation
def test_nan_and_infinity_poison_their_group_alone(run: Quantiser, dtype: torch.dtype) -> None:
    weight = torch.ones(256, device=run.device)
    weight[3], weight[140] = math.nan, math.inf
    x = run.random(4, 256)
    clean = run.of.forward_quant(x, torch.ones_like(weight), 1e-6, dtype=dtype, group_size=64)
    q, scale = run.of.forward_quant(x, weight, 1e-6, dtype=dtype, group_size=64)
    assert_same_bits(scale[:, [1, 3]], clean[1][:, [1, 3]])
    assert_same_codes(q[:, 64:128].contiguous(), clean[0][:, 64:128].contiguous())
    assert bool(scale[:, [0, 2]].isnan().all())
    bad = q[:, :64]
    assert bool((bad == 0).all() if dtype is torch.int8 else bad.float().isnan().all())
    for value in (math.nan, math.inf, -math.inf):
        x[2, 5] = value
        q, scale = run.of.forward_quant(x, None, 1e-6, dtype=dtype, max_scale=1.0)
        assert scale.isnan().flatten().tolist() == [False, False, True, False]


@each_format
@each_implementation
def test_static_saturates_and_keeps_nan(run: Quantiser, dtype: torch.dtype) -> None:
    weight = torch.tensor([1.0, 1e30, -1e30, math.inf, -math.inf, math.nan, 0.0, -0.0], device=run.device)
    q = run.of.forward_quant_static(
        torch.ones(1, 8, device=run.device), weight, torch.tensor([0.5], device=run.device), 0.0, dtype=dtype
    )
    qmax = FORMATS[dtype].qmax
    expected = [2.0, qmax, -qmax, qmax, -qmax, 0.0 if dtype is torch.int8 else math.nan, 0.0, 0.0]
    np.testing.assert_array_equal(values_of(q)[0], expected)


@each_format
@each_implementation
def test_an_upper_bound_on_the_scale(run: Quantiser, dtype: torch.dtype) -> None:
    x, weight = run.random(40, 128), run.random(128, seed=1)
    free = run.of.forward_quant(x, weight, 1e-6, dtype=dtype)[1]
    bound = float(free.median())
    q, scale = run.of.forward_quant(x, weight, 1e-6, dtype=dtype, max_scale=bound)
    assert_same_bits(scale, free.clamp(max=bound))
    assert_right(run, q, scale, x, weight, 1e-6, dtype=dtype, max_scale=bound)
    assert float(values_of(q).max()) == FORMATS[dtype].qmax


@pytest.mark.parametrize("group_size", [None, 32])
@each_format
@each_implementation
def test_power_of_two_scales(run: Quantiser, dtype: torch.dtype, group_size: int | None) -> None:
    x = run.random(9, 224) * torch.logspace(-8, 8, 9, device=run.device)[:, None]
    free = run.of.forward_quant(x, None, 1e-3, dtype=dtype, group_size=group_size)[1]
    options: dict[str, Any] = {"dtype": dtype, "group_size": group_size}
    q, scale = run.of.forward_quant(x, None, 1e-3, power_of_two_scale=True, **options)
    assert_same_bits(scale, torch.exp2(torch.ceil(torch.log2(free.double()))).float())
    q8, scale8 = run.of.forward_quant(x, None, 1e-3, scale_dtype=torch.float8_e8m0fnu, **options)
    assert scale8.dtype is torch.float8_e8m0fnu
    assert_same_bits(scale8.float(), scale)
    assert_same_codes(q8, q)
    x[0, 0] = math.nan
    assert bool(run.of.forward_quant(x, None, 1e-3, scale_dtype=torch.float8_e8m0fnu, **options)[1][0].float().isnan().all())


@each_operator
def test_max_scale_and_powers_of_two_together(run: Quantiser) -> None:
    x = run.random(50, 64) * torch.logspace(-3, 3, 50, device=run.device)[:, None]
    scale = run.of.forward_quant(x, None, 1.0, dtype=torch.int8, max_scale=2.0**-7, power_of_two_scale=True)[1]
    free = run.of.forward_quant(x, None, 1.0, dtype=torch.int8, power_of_two_scale=True)[1]
    assert_same_bits(scale, free.clamp(max=2.0**-7))
    assert not torch.equal(scale, free)


@each_implementation
def test_scales_by_column(run: Quantiser) -> None:
    x = run.random(3, 5, 300)
    for scale_dtype in (None, torch.float8_e8m0fnu):
        options: dict[str, Any] = {"dtype": torch.float8_e4m3fn, "group_size": 128, "scale_dtype": scale_dtype}
        q, scale = run.of.forward_quant(x, None, 1e-6, **options)
        q_columns, columns = run.of.forward_quant(x, None, 1e-6, column_major_scale=True, **options)
        assert columns.shape == scale.shape == (3, 5, 3)
        assert (columns.stride(), scale.stride()) == ((5, 1, 15), (15, 3, 1))
        assert torch.equal(columns.float(), scale.float())
        assert_same_codes(q_columns, q)


@pytest.mark.parametrize("round_before_weight", [False, True])
@each_implementation
def test_round_before_weight(run: Quantiser, round_before_weight: bool) -> None:
    """Codes of (x · rstd, rounded to x's dtype) · weight."""
    x, weight = run.random(16, 512, dtype=torch.float16), run.random(512, seed=1)
    y = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    y = (y.half().double() if round_before_weight else y) * (weight.double() + 1)
    scale = torch.tensor(0.01, device=run.device)
    options: dict[str, Any] = {"weight_offset": 1.0, "round_before_weight": round_before_weight}
    q = run.of.forward_quant_static(x, weight, scale, 1e-6, dtype=torch.int8, **options)
    wrong = q.double() != (y / scale.double()).round().clamp(-127, 127)
    assert float(wrong.double().mean()) < 1e-3
    found = run.of.forward_quant(x, weight, 1e-6, dtype=torch.int8, **options)[1]
    torch.testing.assert_close(
        found.double(), y.abs().amax(-1, keepdim=True) / 127, rtol=1e-3 if round_before_weight else 1e-6, atol=0
    )


@each_implementation
def test_negation(run: Quantiser) -> None:
    """f(−x) is −f(x), in int8 too, whose −128 is not used."""
    x = run.random(8, 300)
    for dtype in FORMATS:
        q, scale = run.of.forward_quant(x, None, 1e-6, dtype=dtype, max_scale=1e-3)
        negated, same = run.of.forward_quant(-x, None, 1e-6, dtype=dtype, max_scale=1e-3)
        assert_same_bits(scale, same)
        np.testing.assert_array_equal(values_of(negated), -values_of(q))


@pytest.mark.parametrize("shape", [(0, 64), (5, 0), (0,), (2, 0, 130), (0, 0)], ids=str)
@each_implementation
def test_empty_tensors(run: Quantiser, shape: tuple[int, ...]) -> None:
    """Nothing is launched; a row without elements has the scale of a row of zeros."""
    x = torch.empty(shape, device=run.device)
    for options in (
        {},
        {"group_size": 64},
        {"group_size": 64, "column_major_scale": True},
        {"scale_dtype": torch.float8_e8m0fnu},
    ):
        q, scale, total = run.of.add_forward_quant(x, x.half(), None, 0.0, dtype=torch.float8_e4m3fn, **options)
        assert (q.shape, total.shape, total.dtype) == (x.shape, x.shape, torch.float16)
        assert scale.shape[:-1] == x.shape[:-1]
        assert bool((scale.float() == SMALLEST_SCALE).all())
    assert run.of.forward_quant_static(x, None, torch.ones((), device=run.device), 0.0, dtype=torch.int8).shape == x.shape


def test_one_kernel_serves_every_bound_scale_and_number_of_rows() -> None:
    before = len(prepared._prepared)
    for rows in (1, 2, 16, 33):
        x = TRITON.random(rows, 48)
        for bound in (1e-3, 2e-3, 1.0):
            TRITON.of.forward_quant(x, None, 1e-6, dtype=torch.int8, max_scale=bound)
        for number in (0.1, 0.2):
            TRITON.of.forward_quant_static(x, None, torch.tensor(number, device=x.device), 1e-6, dtype=torch.int8)
    assert len(prepared._prepared) == before + 2

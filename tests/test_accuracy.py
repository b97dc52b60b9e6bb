"""The judge is judged: a tolerance that lets everything through would make every other test pass."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from rmsnorm_ops import accuracy, reference
from tests.implementations import DTYPES, random

EXACT = (1.0, 1.5, 2.0 - 2**-6, -3.0, 1000.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_neighbour_is_one_ulp_away(dtype: torch.dtype) -> None:
    exact = torch.tensor(EXACT, dtype=dtype)
    above = torch.nextafter(exact, exact * 2)
    assert accuracy.ulp_error(exact, reference.wide(exact)) == 0
    assert accuracy.ulp_error(above, reference.wide(exact)) == 1
    below_two = torch.tensor([2.0], dtype=dtype) - torch.finfo(dtype).eps
    assert accuracy.ulp_error(below_two, np.array([2.0], dtype=np.longdouble)) == 0.5, "the ulp is that of the oracle's binade"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_below_the_normal_numbers_the_ulp_is_the_smallest_subnormal(dtype: torch.dtype) -> None:
    smallest = accuracy.smallest_subnormal(dtype)
    assert accuracy.ulp_error(torch.zeros(1, dtype=dtype), np.array([smallest], dtype=np.longdouble)) == 1
    assert accuracy.ulp_error(torch.tensor([3 * smallest], dtype=torch.float64).to(dtype), np.zeros(1, dtype=np.longdouble)) == 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinity_and_nan_must_be_where_the_oracle_has_them(dtype: torch.dtype) -> None:
    def error(actual: float, exact: float) -> float:
        return accuracy.ulp_error(torch.tensor([actual], dtype=dtype), np.array([exact], dtype=np.longdouble))

    largest = torch.finfo(dtype).max
    assert error(math.nan, math.nan) == error(math.inf, math.inf) == 0
    assert error(math.nan, 1.0) == error(1.0, math.nan) == error(largest, math.inf) == error(math.inf, -math.inf) == math.inf
    assert error(math.inf, 1.0) > 100
    assert error(math.inf, largest) == 1, "infinity stands where the next number would"
    beyond = np.longdouble(largest) * 4
    assert accuracy.ulp_error(torch.tensor([math.inf], dtype=dtype), np.array([beyond])) == 0
    assert accuracy.ulp_error(torch.tensor([-math.inf], dtype=dtype), np.array([beyond])) > 100


def test_the_oracle_is_the_formula() -> None:
    """Against rational arithmetic: y² · (mean + eps) = x² · w² exactly."""
    x, weight, eps = random(3, 50, dtype=torch.float16), random(50, dtype=torch.bfloat16), 2.0**-7
    y = reference.forward(x, weight, eps, weight_offset=1.0)
    tolerance = Fraction(1, 2**60 if reference.EXTENDED else 2**49)
    for row, exact in zip(x.tolist(), y, strict=True):
        mean = sum(Fraction(value) ** 2 for value in row) / 50 + Fraction(eps)
        for value, w, got in zip(row, weight.tolist(), exact, strict=True):
            numerator = Fraction(value) * (Fraction(w) + 1)
            squared = Fraction(*got.as_integer_ratio()) ** 2 * mean
            assert abs(squared - numerator**2) <= tolerance * numerator**2
            assert np.sign(got) == np.sign(float(numerator))


def test_the_bounds_of_the_contract() -> None:
    bounds = [accuracy.forward_bound(dtype) for dtype in DTYPES]
    assert bounds == [0.5 + 1 / 128, 0.5 + 1 / 128, 4, 4]
    assert accuracy.forward_bound(torch.bfloat16, round_before_weight=True) <= 1.6
    assert accuracy.forward_bound(torch.bfloat16, interpreted=True) <= 1.1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrong", ["eps outside the root", "mean of hidden + 1", "rounded twice", "no offset", "fp16 squares"])
def test_a_wrong_norm_is_beyond_the_bound(wrong: str, dtype: torch.dtype) -> None:
    x, weight = random(4, 300, dtype=dtype), random(300, dtype=dtype, seed=1)
    wide, factor = x.double(), weight.double() + 1
    mean = wide.square().mean(-1, keepdim=True)
    rstd = torch.rsqrt(mean + 1e-3)
    y = {
        "eps outside the root": wide / (mean.sqrt() + 1e-3) * factor,
        "mean of hidden + 1": wide * torch.rsqrt(mean * 300 / 301 + 1e-3) * factor,
        "rounded twice": (wide * rstd).to(torch.float32 if dtype is torch.float64 else dtype).to(torch.bfloat16).double()
        * factor,
        "no offset": wide * rstd * weight.double(),
        "fp16 squares": wide * torch.rsqrt(x.half().square().double().mean(-1, keepdim=True).half() + 1e-3) * factor,
    }[wrong].to(dtype)
    assert accuracy.forward_error(y, x, weight, 1e-3, weight_offset=1.0) > accuracy.forward_bound(dtype)
    right = (wide * rstd * factor).to(dtype)
    assert accuracy.forward_error(right, x, weight, 1e-3, weight_offset=1.0) <= accuracy.forward_bound(dtype)

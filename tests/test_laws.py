"""What holds to the last bit whatever the values: sign, scale, runs, and rows that keep to themselves."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rmsnorm_ops.contracts import compute_dtype
from tests.implementations import DTYPES, Implementation, assert_accurate, assert_same_bits, random
from tests.strategies import Case, cases, exponents, hiddens, seeds

EXAMPLES = settings.default.max_examples
MAX_EXPONENT = {torch.float32: 126, torch.float64: 1022}


@settings(max_examples=3 * EXAMPLES)
@given(case=cases())
def test_the_norm_of_minus_x_is_minus_the_norm(implementation: Implementation, case: Case) -> None:
    x, weight = case.tensors(implementation)
    y = implementation.forward(x, weight, case.eps, **case.options)
    assert_same_bits(implementation.forward(-x, weight, case.eps, **case.options), -y)


@settings(max_examples=2 * EXAMPLES)
@given(case=cases())
def test_a_second_run_gives_the_same_bits_and_leaves_x_alone(operator: Implementation, case: Case) -> None:
    x, weight = case.tensors(operator)
    before = x.clone()
    first = operator.forward(x, weight, case.eps, **case.options)
    assert_same_bits(operator.forward(x, weight, case.eps, **case.options), first)
    assert_same_bits(x, before)


@settings(max_examples=4 * EXAMPLES)
@given(data=st.data(), hidden=hiddens, dtype=st.sampled_from(DTYPES), twice=st.booleans(), seed=seeds)
def test_scaling_x_by_a_power_of_two_and_eps_by_its_square_changes_nothing(
    implementation: Implementation, data: st.DataObject, hidden: int, dtype: torch.dtype, twice: bool, seed: int
) -> None:
    """Over the whole range of x: the law crosses into the rows whose squares over- and underflow."""
    # Magnitudes within 2⁻³ and 2, so that neither x nor its square loses a bit before the row as a whole does.
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((3, hidden), generator=generator, dtype=torch.float64).clamp(-1.9, 1.9)
    x = torch.where(x.abs() < 0.125, 0.125, x).to(dtype).to(implementation.device)
    weight = random(hidden, dtype=dtype, device=implementation.device)
    lowest_normal = int(math.log2(torch.finfo(dtype).smallest_normal))
    power = data.draw(st.integers(lowest_normal + 3, exponents(dtype)[1] - 1), label="power")
    log2_eps = data.draw(st.sampled_from((-math.inf, -12, 0)), label="log2 eps")
    if not -MAX_EXPONENT[compute_dtype(dtype)] < log2_eps + 2 * power < MAX_EXPONENT[compute_dtype(dtype)]:
        log2_eps = -math.inf
    y = implementation.forward(x, weight, 2.0**log2_eps, round_before_weight=twice)
    scaled = implementation.forward(x * 2.0**power, weight, 2.0 ** (log2_eps + 2 * power), round_before_weight=twice)
    assert_same_bits(scaled, y)


@settings(max_examples=2 * EXAMPLES)
@given(hidden=hiddens, dtype=st.sampled_from(DTYPES), bad=st.sampled_from((math.nan, math.inf, -math.inf)), seed=seeds)
def test_nan_and_infinity_stay_in_their_row(
    operator: Implementation, hidden: int, dtype: torch.dtype, bad: float, seed: int
) -> None:
    x = random(7, hidden, dtype=dtype, device=operator.device, seed=seed)
    clean = operator.forward(x, None, 1e-6)
    x[3, seed % hidden] = bad
    y = assert_accurate(operator, x, None, 1e-6)
    others = [row for row in range(7) if row != 3]
    assert_same_bits(y[others], clean[others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 5, 1000, 5120])
def test_nan_and_infinity_do_in_their_row_what_the_formula_does(
    implementation: Implementation, hidden: int, dtype: torch.dtype
) -> None:
    """An infinite mean square makes rstd zero: finite elements give 0, infinite ones inf · 0 = NaN."""
    x = random(3, hidden, dtype=dtype, device=implementation.device)
    x[0, -1], x[1, 0], x[2, hidden // 2] = math.nan, math.inf, -math.inf
    y = assert_accurate(implementation, x, None, 1e-6)
    assert bool(y[0].isnan().all())
    assert bool(y[1:][x[1:].isinf()].isnan().all())
    assert bool((y[1:][x[1:].isfinite()] == 0).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_of_weight_stay_in_their_column(implementation: Implementation, bad: float) -> None:
    weight = random(100, device=implementation.device, seed=1)
    weight[37] = bad
    x = random(5, 100, device=implementation.device)
    x[2, 37] = 0
    y = assert_accurate(implementation, x, weight, 1e-6)
    assert torch.nonzero(~y.isfinite())[:, 1].unique().tolist() == [37]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 100, 4096, 40000])
def test_a_zero_row(implementation: Implementation, hidden: int, dtype: torch.dtype) -> None:
    """0/0 at eps = 0, as torch.nn.functional.rms_norm has it; else zero, at however small an eps."""
    x = torch.zeros(2, hidden, dtype=dtype, device=implementation.device)
    assert bool(implementation.forward(x, None, 0.0).isnan().all())
    assert bool(torch.nn.functional.rms_norm(x, (hidden,), None, 0.0).isnan().all())
    for eps in (1e-40, 1e-30, 1e-6, 1e30):
        assert_same_bits(implementation.forward(x, None, eps), x)

"""Every implementation against the oracle, to the bound of accuracy.py."""

import pytest
import torch
from hypothesis import given, settings

from tests.implementations import DTYPES, Implementation, assert_accurate, random
from tests.layouts import LAYOUTS, Layout
from tests.strategies import Case, cases, exponents, values

EXAMPLES = settings.default.max_examples
WIDE = ((40000, torch.float32), (65537, torch.bfloat16), (32769, torch.float64), (131072, torch.float16))


@settings(max_examples=12 * EXAMPLES)
@given(case=cases())
def test_any_problem(implementation: Implementation, case: Case) -> None:
    x, weight = case.tensors(implementation)
    assert_accurate(implementation, x, weight, case.eps, **case.options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 3, 64, 127, 128, 769, 1024, 1536, 2880, 4096, 5120])
def test_ordinary_rows(implementation: Implementation, hidden: int, dtype: torch.dtype) -> None:
    x = random(5, hidden, dtype=dtype, device=implementation.device)
    weight = random(hidden, dtype=dtype, device=implementation.device, seed=1)
    assert_accurate(implementation, x, weight, 1e-6)


@pytest.mark.parametrize(("hidden", "dtype"), WIDE, ids=str)
def test_rows_wider_than_registers_hold(implementation: Implementation, hidden: int, dtype: torch.dtype) -> None:
    x = random(2, hidden, dtype=dtype, device=implementation.device)
    assert_accurate(implementation, x, random(hidden, device=implementation.device, seed=1), 1e-6, weight_offset=1.0)


def test_a_row_of_a_million(implementation: Implementation) -> None:
    assert_accurate(implementation, random(1, 2**20 + 1, dtype=torch.float16, device=implementation.device), None, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("hidden", "values"), [(4096, 9), (5120, 9), (40000, 9), (2**20 + 1, 3)])
def test_a_long_row_of_one_value(implementation: Implementation, hidden: int, values: int, dtype: torch.dtype) -> None:
    """Every addition of a sum of equal squares errs to the same side, so a long chain of them drifts."""
    for value in torch.linspace(1.1, 1.9, values, dtype=dtype):
        assert_accurate(implementation, value.expand(1, hidden).to(implementation.device), None, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("hidden", [128, 512, 1024, 2880, 4096, 5120, 20000])
def test_a_spike_among_equal_numbers(implementation: Implementation, hidden: int, dtype: torch.dtype) -> None:
    """Each equal square is rounded to the same side when it meets the spike's, so a chain of such additions drifts."""
    if implementation.interpreted:
        pytest.skip("the interpreter sums in numpy's order, not in a GPU's")
    x = torch.linspace(1, 2, 200, dtype=dtype)[:, None].repeat(1, hidden)
    weight = random(hidden, dtype=dtype, device=implementation.device)
    for spike in (3.0, 17.3, 119.0, 1000.0):
        x[:, 0] = spike
        assert_accurate(implementation, x.to(implementation.device), weight, 1e-6)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_layout(implementation: Implementation, layout: Layout, dtype: torch.dtype) -> None:
    def fill(*shape: int) -> torch.Tensor:
        return random(*shape, dtype=dtype, device=implementation.device)

    x = layout.make(fill, 72)
    for weight in (None, fill(144)[::2], fill(1).expand(72)):
        assert_accurate(implementation, x, weight, 1e-6)


@pytest.mark.parametrize("round_before_weight", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_pair_of_dtypes(
    implementation: Implementation, dtype: torch.dtype, weight_dtype: torch.dtype, round_before_weight: bool
) -> None:
    x = random(3, 96, dtype=dtype, device=implementation.device)
    weight = random(96, dtype=weight_dtype, device=implementation.device)
    for offset in (0.0, 1.0):
        assert_accurate(implementation, x, weight, 1e-6, weight_offset=offset, round_before_weight=round_before_weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 100, 1025, 4096])
def test_the_whole_range_of_magnitudes(implementation: Implementation, hidden: int, dtype: torch.dtype) -> None:
    """Σx² overflows, or vanishes, long before x does."""
    low, high = exponents(dtype)
    if not implementation.rounds_to_nearest(dtype):
        low += 8  # Triton's interpreter mishandles bf16 subnormals
    rows = [values("normal", (hidden,), dtype, exponent, exponent) for exponent in torch.linspace(low, high, 23).int().tolist()]
    x = torch.stack(rows).to(implementation.device)
    if not implementation.rounds_to_nearest(dtype):
        x = torch.where(x.abs() < torch.finfo(dtype).smallest_normal, 0, x)
    x[x.abs().amax(-1) == 0] = 1
    for eps in (0.0, 1e-6):
        assert_accurate(implementation, x[:-4] if implementation.interpreted and eps else x, None, eps)


def test_a_spike_among_small_numbers(implementation: Implementation) -> None:
    """The sum is of 4095 squares a billion times smaller than the one beside them, and eps belongs to all of them."""
    x = torch.full((2, 4096), 1e-3)
    x[0, 17], x[1, 4095] = 1e3, 3e4
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert_accurate(implementation, x.to(dtype).to(implementation.device), None, 1e-5)

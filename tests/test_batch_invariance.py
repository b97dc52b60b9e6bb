"""A row's bits depend on the row alone: not on the rows beside it, where it stands, how x is strided, or who computes it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.implementations import DTYPES, Implementation, assert_same_bits, random
from tests.layouts import LAYOUTS, Layout
from tests.strategies import Case, cases, hiddens, seeds, values

EXAMPLES = settings.default.max_examples
# Weights are of 24 bits: half-precision numbers alone have too few products for one to lie where the last bit of rstd shows.
WEIGHT_SEED = 9
ROWS_OF_TWO_TILES = 4099  # more than the tile of the narrowest row holds, and prime


@settings(max_examples=3 * EXAMPLES)
@given(case=cases(), data=st.data())
def test_rows_permuted(operator: Implementation, case: Case, data: st.DataObject) -> None:
    x, weight = case.tensors(operator)
    x = x.reshape(-1, case.hidden)
    order = torch.tensor(data.draw(st.permutations(range(len(x))), label="order"), dtype=torch.int64, device=x.device)
    y = operator.forward(x, weight, case.eps, **case.options)
    assert_same_bits(operator.forward(x[order], weight, case.eps, **case.options), y[order])


@settings(max_examples=2 * EXAMPLES)
@given(case=cases())
def test_each_row_alone(operator: Implementation, case: Case) -> None:
    x, weight = case.tensors(operator)
    y = operator.forward(x, weight, case.eps, **case.options)
    for row, expected in zip(x.reshape(-1, case.hidden), y.reshape(-1, case.hidden), strict=True):
        assert_same_bits(operator.forward(row, weight, case.eps, **case.options), expected)


@settings(max_examples=2 * EXAMPLES)
@given(hidden=hiddens, dtype=st.sampled_from(DTYPES), seed=seeds, data=st.data())
def test_a_slice_of_many_rows(operator: Implementation, hidden: int, dtype: torch.dtype, seed: int, data: st.DataObject) -> None:
    many = min(ROWS_OF_TWO_TILES, 16_384 // hidden + 3)
    x = random(many, hidden, dtype=dtype, device=operator.device, seed=seed)
    start = data.draw(st.integers(0, many - 1), label="start")
    stop = data.draw(st.integers(start, many), label="stop")
    weight = random(hidden, device=operator.device, seed=WEIGHT_SEED)
    y = operator.forward(x, weight, 1e-6)
    assert_same_bits(operator.forward(x[start:stop], weight, 1e-6), y[start:stop])
    assert_same_bits(operator.forward(x[start::3], weight, 1e-6), y[start::3])


@settings(max_examples=4 * EXAMPLES)
@given(case=cases())
def test_any_layout_is_its_dense_copy(operator: Implementation, case: Case) -> None:
    x, weight = case.tensors(operator)
    dense = torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
    y = operator.forward(dense, weight, case.eps, **case.options)
    assert_same_bits(operator.forward(x, weight, case.eps, **case.options), y)


@pytest.mark.parametrize("hidden", [64, 100, 1000, 1001, 4096, 5120, 5125, 40000])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_dense_copy_at_sizes_that_are_laid_out_differently(operator: Implementation, layout: Layout, hidden: int) -> None:
    """Other alignment, other code: the order in which a row is summed must not change with it."""
    x = layout.make(lambda *shape: random(*shape, dtype=torch.float16, device=operator.device), hidden)
    weight = random(hidden, device=operator.device, seed=WEIGHT_SEED)
    dense = torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x)
    assert_same_bits(operator.forward(x, weight, 0.0), operator.forward(dense, weight, 0.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [16, 100, 1024, 5120])
def test_x_at_any_address(operator: Implementation, hidden: int, dtype: torch.dtype) -> None:
    x = random(3, hidden, dtype=dtype, device=operator.device)
    weight = random(hidden, device=operator.device, seed=WEIGHT_SEED)
    expected = operator.forward(x, weight, 1e-6)
    for offset in range(1, 9):
        buffer = torch.zeros(3 * hidden + offset, dtype=dtype, device=operator.device)
        moved = buffer[offset:].view(3, hidden)
        assert_same_bits(operator.forward(moved.copy_(x), weight, 1e-6), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_weight_at_any_address_or_stride(operator: Implementation, dtype: torch.dtype) -> None:
    x = random(3, 1000, dtype=torch.float32, device=operator.device)
    weight = random(1000, dtype=dtype, device=operator.device)
    expected = operator.forward(x, weight, 1e-6)
    buffer = torch.zeros(3 * 1000, dtype=dtype, device=operator.device)
    for placed in (buffer[1:1001], buffer[5:1005], buffer[::3], buffer[1::2][:1000]):
        assert_same_bits(operator.forward(x, placed.copy_(weight), 1e-6), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [4, 100, 1024])
def test_rows_beside_rows_of_any_magnitude(operator: Implementation, hidden: int, dtype: torch.dtype) -> None:
    """A row whose squares overflow is computed another way; the rows of its tile are not."""
    ordinary = random(6, hidden, dtype=dtype, device=operator.device)
    expected = operator.forward(ordinary, None, 1e-6)
    for neighbours in _unusual(hidden, dtype, operator):
        x = torch.stack((ordinary, neighbours), 1).view(12, hidden)
        assert_same_bits(operator.forward(x, None, 1e-6)[::2], expected)


def _unusual(hidden: int, dtype: torch.dtype, operator: Implementation) -> list[Tensor]:
    info = torch.finfo(dtype)
    rows = [values("extreme", (6, hidden), dtype, 0, 0), torch.full((6, hidden), info.smallest_normal, dtype=dtype)]
    rows += [torch.full((6, hidden), value, dtype=dtype) for value in (0.0, float("nan"), float("inf"))]
    return [row.to(operator.device) for row in rows]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 4096), (64, 4096), (8192, 128), (16, 40000), (3, 65537), (2, 2**17)], ids=str)
def test_any_number_of_cpu_threads(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert_same_by_any_number_of_threads(random(*shape, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_wide_row_by_any_number_of_cpu_threads(dtype: torch.dtype) -> None:
    """torch splits a lone sum among threads."""
    for seed in range(6):
        assert_same_by_any_number_of_threads(random(1, 100_000, dtype=dtype, seed=seed))


def assert_same_by_any_number_of_threads(x: Tensor) -> None:
    threads, forward = torch.get_num_threads(), torch.ops.rmsnorm.forward.default
    weight = random(x.shape[1], seed=WEIGHT_SEED)
    expected = torch.cat([forward(row[None], weight, 1e-6) for row in x])
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            assert_same_bits(forward(x, weight, 1e-6), expected)
    finally:
        torch.set_num_threads(threads)

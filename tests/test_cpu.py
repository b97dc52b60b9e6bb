"""The CPU implementation by itself: its blocks and sums, which the tests of every implementation reach only by chance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rmsnorm_ops import cpu
from tests.implementations import DTYPES, Implementation, assert_accurate, assert_same_bits, random
from tests.layouts import LAYOUTS, Layout
from tests.strategies import Case, cases, exponents, values

DIRECT = Implementation("cpu.forward", "cpu", cpu.forward)
# Below, at and above what one vector, one block and one thread's share hold, primes, and sizes of real models.
HIDDEN = (1, 3, 7, 16, 64, 100, 128, 1000, 2880, 4096, 5125, 16384, 16385, 32769, 131072, 2**20)
SUMMED_DIFFERENTLY = (torch.bfloat16, torch.float32, torch.float64)
BLOCKS = (1, 300, 5000)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"weight_offset": 1.0},
    {"round_before_weight": True},
    {"weight_offset": -0.5, "round_before_weight": True},
)
INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=BLOCKS, ids="blocks of {}".format)
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks, the last one short, and blocks narrower than a row."""
    monkeypatch.setattr(cpu, "BLOCK_ELEMENTS", request.param)


@pytest.fixture
def any_threads() -> Iterator[None]:
    """Restores the number of threads that a test changed."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@settings(max_examples=300)
@given(case=cases(), block=st.sampled_from(BLOCKS))
def test_any_problem_in_any_blocks(case: Case, block: int) -> None:
    x, weight = case.tensors(DIRECT)
    before = x.clone()
    expected = assert_accurate(DIRECT, x, weight, case.eps, **case.options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "BLOCK_ELEMENTS", block)
        assert_same_bits(DIRECT.forward(x, weight, case.eps, **case.options), expected)
    assert_same_bits(x, before)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_options(small_blocks: None, dtype: torch.dtype, weight_dtype: torch.dtype, options: dict[str, float]) -> None:
    assert_accurate(DIRECT, random(19, 257, dtype=dtype), random(257, dtype=weight_dtype, seed=1), 1e-6, **options)


@pytest.mark.parametrize("dtype", SUMMED_DIFFERENTLY, ids=str)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_rows_that_are_hard_to_sum(hidden: int, dtype: torch.dtype) -> None:
    """A long chain of additions rounds equal squares, or small ones onto the square of a spike, to the same side each time."""
    weight = 1 + torch.rand(hidden, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    constant = torch.tensor([0.1, 0.3, 1.7, 1.1]).double()[: max(1, 2**20 // hidden), None].expand(-1, hidden)
    spike = torch.where(torch.arange(hidden) == 0, hidden**0.5, constant)
    late_spike = torch.where(torch.arange(hidden) == hidden // 2, 1.3 * hidden**0.5, constant)
    for x in (constant, spike, late_spike, random(2, hidden, dtype=torch.float64)):
        assert_accurate(DIRECT, x.to(dtype), weight, 0.0)


@pytest.mark.parametrize("dtype", SUMMED_DIFFERENTLY, ids=str)
@pytest.mark.parametrize("hidden", HIDDEN[::3])
def test_bits_depend_on_the_row_alone(any_threads: None, hidden: int, dtype: torch.dtype) -> None:
    rows = max(2, min(40, 2**18 // hidden))
    x, weight = random(rows, hidden, dtype=dtype), random(hidden, dtype=dtype, seed=1)
    torch.set_num_threads(1)
    expected = torch.cat([cpu.forward(row[None], weight, 1e-6) for row in x])
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        for count in {1, 2, 7, 33, rows}:
            for start in {0, (rows - count) // 2, rows - count} if count <= rows else ():
                some = slice(start, start + count)
                assert_same_bits(cpu.forward(x[some], weight, 1e-6), expected[some])


@pytest.mark.parametrize("dtype", SUMMED_DIFFERENTLY, ids=str)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_sums_depend_on_the_row_alone(any_threads: None, hidden: int, dtype: torch.dtype) -> None:
    """Sums are wider than y, whose rounding hides most of what a change in their order does."""
    rows = max(2, min(40, 2**18 // hidden))
    x = random(rows, hidden, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    torch.set_num_threads(1)
    expected = torch.cat([_sums(row[None], dtype) for row in x])
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        for count in {1, 2, 7, 33, rows}:
            for start in {0, (rows - count) // 2, rows - count} if count <= rows else ():
                some = slice(start, start + count)
                assert_same_bits(_sums(x[some], dtype), expected[some])


def _sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    return cpu._sum_of_squares(x, torch.empty(x.shape, dtype=dtype), None)


@pytest.mark.parametrize("dtype", SUMMED_DIFFERENTLY, ids=str)
@pytest.mark.parametrize("hidden", [3, 128, 1000, 16500])
def test_bits_do_not_depend_on_blocks(small_blocks: None, hidden: int, dtype: torch.dtype) -> None:
    x, weight = random(23, hidden, dtype=dtype), random(hidden, seed=1)
    x[11] *= 1e-30 if dtype is not torch.float64 else 1e-280
    assert_same_bits(cpu.forward(x, weight, 0.0), torch.cat([cpu.forward(row[None], weight, 0.0) for row in x]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_layout_has_the_bits_of_its_dense_copy(layout: Layout, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one block and in many; rows of ordinary size and rows that need a rescue; rstd as well, whose bits y mostly hides."""
    statistics: list[Tensor] = []
    with_rstd = cpu._with_rstd

    def recording(*operands: Any) -> tuple[Tensor, Tensor]:
        x, rstd = with_rstd(*operands)
        statistics.append(torch.as_tensor(rstd, dtype=x.dtype).clone())  # of a single row it is a number
        return x, rstd

    def results(x: Tensor, eps: float) -> Tensor:
        statistics.clear()
        y = cpu.forward(x, None, eps)
        return torch.cat((y.double().reshape(-1), *(rstd.double().reshape(-1) for rstd in statistics)))

    monkeypatch.setattr(cpu, "_with_rstd", recording)
    x = layout.make(lambda *shape: random(*shape, dtype=dtype) * exponent_for_rescue(dtype), 1000)
    dense = torch.empty(x.shape, dtype=dtype).copy_(x)
    for eps in (1e-6, 0.0):
        expected = results(dense, eps)
        assert_same_bits(results(x, eps), expected)
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "BLOCK_ELEMENTS", 2000)
            assert_same_bits(results(x, eps), expected)


def exponent_for_rescue(dtype: torch.dtype) -> float:
    return {torch.float16: 1.0, torch.float64: 2.0**-500}.get(dtype, 2.0**-80)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 100, 4096])
def test_every_magnitude(hidden: int, dtype: torch.dtype) -> None:
    """Rows of every tenth of the exponent range in one block: each is as right as if it were ordinary."""
    low, high = exponents(dtype)
    spread = torch.linspace(low, high, 41).int().tolist()
    x = torch.stack([values("normal", (hidden,), dtype, exponent, exponent) for exponent in spread])
    x[x.abs().amax(-1) == 0] = 1
    for eps in (0.0, 1e-6):
        y = assert_accurate(DIRECT, x, None, eps)
        assert_same_bits(y, torch.cat([cpu.forward(row[None], None, eps) for row in x]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_ends_of_the_range(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    x = torch.tensor([info.max, info.smallest_normal, smallest], dtype=torch.float64)[:, None].expand(3, 4097).to(dtype)
    y = assert_accurate(DIRECT, x, torch.full((4097,), 3.0), 0.0, weight_offset=-0.5)
    assert_same_bits(y, torch.full_like(y, 2.5))


@pytest.mark.parametrize(
    ("dtype", "spike", "small"), [(torch.float32, 70, -45), (torch.bfloat16, 72, -52), (torch.float64, 510, -460)], ids=str
)
def test_small_numbers_beside_huge_ones(dtype: torch.dtype, spike: int, small: int) -> None:
    """Scaled down until the square of the huge one fits, the small ones would be subnormal and lose bits that y shows."""
    x = random(5, 2**16, dtype=torch.float64) * 2.0**small
    x[:, 5] = 2.0**spike
    x[1, 6] = torch.finfo(dtype).max
    y = assert_accurate(DIRECT, x.to(dtype), None, 0.0)
    assert (y[0] != 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_a_norm_keep_to_themselves(small_blocks: None, dtype: torch.dtype) -> None:
    """What the formula says: NaN wherever a row has one, or is zero with eps = 0; an infinite element is NaN and makes the
    finite ones zero."""
    x = random(9, 130, dtype=dtype)
    ordinary = cpu.forward(x, None, 0.0)
    x[1] = 0
    x[3, 7], x[4, 0] = NAN, INF
    x[6, 129], x[6, 3] = -INF, NAN
    y = cpu.forward(x, None, 0.0)
    assert_same_bits(y[[0, 2, 5, 7, 8]], ordinary[[0, 2, 5, 7, 8]])
    assert y[[1, 3, 6]].isnan().all()
    assert y[4, 0].isnan()
    assert (y[4, 1:] == 0).all()
    assert (cpu.forward(x[1:2], None, 1e-6) == 0).all()


def test_eps_of_the_compute_type() -> None:
    """eps is rounded to float32 for all but float64: 1e39 is infinite there and y zero, 1e-46 is zero, 0.1 is 13421773 · 2⁻²⁷."""
    x = random(3, 50)
    assert (cpu.forward(x, None, 1e39) == 0).all()
    assert_same_bits(cpu.forward(x, None, 0.1), cpu.forward(x, None, 13421773 * 2.0**-27))
    tiny = x * 1e-38
    assert_same_bits(cpu.forward(tiny, None, 1e-46), cpu.forward(tiny, None, 0.0))
    assert_accurate(DIRECT, x.double(), None, 1e39)
    assert_accurate(DIRECT, x.double(), None, 0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (50,), (1, 50), (3, 50), (2, 3, 50)], ids=str)
def test_y_is_new_and_the_operands_unchanged(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], dtype=dtype, seed=1)
    operands = (x, weight)
    before = [operand.clone() for operand in operands]
    for options in OPTIONS:
        y = cpu.forward(x, weight, 1e-6, **options)
        assert y.untyped_storage().data_ptr() not in [operand.untyped_storage().data_ptr() for operand in operands]
        y.zero_()
    for operand, copy in zip(operands, before, strict=True):
        assert_same_bits(operand, copy)


@pytest.mark.parametrize("weighted", [False, True], ids=["no weight", "weight"])
@pytest.mark.parametrize("shape", [(0,), (0, 7), (3, 0), (2, 0, 7), (0, 0)], ids=str)
def test_empty(shape: tuple[int, ...], weighted: bool) -> None:
    for x in (torch.empty(shape), torch.empty((*shape, 2))[..., 0].half()):
        y = cpu.forward(x, torch.ones(shape[-1]) if weighted else None, 0.0)
        assert (y.shape, y.dtype, y.stride()) == (x.shape, x.dtype, torch.empty(shape, device="meta").stride())


def test_bad_operands_are_refused_before_anything_is_computed() -> None:
    with pytest.raises(ValueError, match=r"^weight must have shape \(50,\), got \(49,\)$"):
        cpu.forward(torch.empty(0, 50), torch.ones(49), 1e-6)
    with pytest.raises(ValueError, match=r"^eps must be finite and not negative, got -1\.0$"):
        cpu.forward(torch.empty(0, 50), None, -1.0)


def test_rounding_before_the_weight_is_a_rounding() -> None:
    """Of x · rstd, as if y without a weight were multiplied by it; and not what the other convention gives."""
    x, weight = random(64, 128, dtype=torch.bfloat16), random(128, seed=1)
    once, twice = (cpu.forward(x, weight, 1e-6, round_before_weight=early) for early in (False, True))
    unweighted: Tensor = cpu.forward(x, None, 1e-6)
    assert_same_bits(twice, (unweighted.float() * weight).bfloat16())
    assert not torch.equal(once, twice)

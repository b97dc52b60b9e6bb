"""Every implementation of the backward operators against the oracle, to the bounds of accuracy.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rmsnorm_ops.contracts import compute_dtype
from rmsnorm_ops.plan import LaunchPlan
from tests.gradients import (
    LAUNCHERS,
    TRITON,
    Training,
    assert_accurate,
    call,
    compute_of,
    cut_to_bf16,
    each_dtype,
    each_implementation,
    each_operator,
    ranged,
    scaled_into_range,
)
from tests.implementations import DTYPES, assert_same_bits
from tests.strategies import EPS, KINDS, exponents, seeds

EXAMPLES = settings.default.max_examples
# What is asked for: (weight's gradient, a gradient at the sum, dx in another dtype)
ASKED = [(grad, summed, mixed) for grad in (False, True) for summed in (False, True) for mixed in (False, True)]
# Wider rows take the interpreter a second each.
narrow = st.one_of(st.integers(1, 300), st.sampled_from((1, 2, 127, 128, 129, 513, 769, 1025)))
OTHER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.bfloat16, torch.float64: torch.float32}


@settings(max_examples=2 * EXAMPLES)
@given(data=st.data(), hidden=narrow, dtype=st.sampled_from(DTYPES), seed=seeds)
@each_implementation
def test_any_problem(run: Training, data: st.DataObject, hidden: int, dtype: torch.dtype, seed: int) -> None:
    rows = data.draw(st.integers(1, 9 if hidden > 1000 else 40), label="rows")
    kind = data.draw(st.sampled_from(KINDS), label="kind of x")
    exponent = data.draw(st.integers(*exponents(dtype)), label="exponent of x")
    x = ranged(kind, (rows, hidden), dtype, exponent, seed, run)
    eps = data.draw(st.sampled_from([value for value in EPS if value < 1e4]), label="eps")
    weight_dtype = data.draw(st.sampled_from((None, *DTYPES)), label="weight")
    weight = None if weight_dtype is None else ranged("normal", (hidden,), weight_dtype, 0, seed + 1, run)
    offset = 0.0 if weight is None else data.draw(st.sampled_from((0.0, 1.0, 0.1)), label="offset")
    dx_dtype = data.draw(st.sampled_from((None, *DTYPES)), label="dx_dtype")
    dy_dtype = data.draw(st.sampled_from((dtype, *DTYPES)), label="dy")
    dy = ranged(data.draw(st.sampled_from(("normal", "sparse", "spike")), label="kind of dy"), (rows, hidden), dy_dtype, 0,
                seed + 2, run)  # fmt: skip
    dy = scaled_into_range(dy, x, weight, eps, offset, compute_of(x, dx_dtype))
    dsum = ranged("normal", (rows, hidden), dtype, 0, seed + 3, run) if data.draw(st.booleans(), label="dsum") else None
    weight_grad = weight is not None and data.draw(st.booleans(), label="weight_grad")
    if run.interpreted:
        assume(not (weight_grad and cut_to_bf16(run, compute_of(x, dx_dtype), weight.dtype)))
        assume(not cut_to_bf16(run, compute_of(x, dx_dtype), dx_dtype or dtype, dtype))
        # What it stores or loads as a subnormal bf16 is not judged: dx of a huge x is as small as 1 / x.
        assume(not any(t is not None and t.dtype is torch.bfloat16 and exponent < -60 for t in (x, dy, weight)))
        assume(not (torch.bfloat16 in (dx_dtype or dtype, dtype) and float(x.abs().max()) > 2.0**80))
    assert_accurate(run, dy, x, weight, eps, dsum=dsum, dx_dtype=dx_dtype, weight_offset=offset, weight_grad=weight_grad)


@pytest.mark.parametrize("hidden", [1, 3, 127, 128, 769, 1024, 2880, 5120])
@each_dtype
@each_implementation
def test_ordinary_rows(run: Training, dtype: torch.dtype, hidden: int) -> None:
    rows = 5 if hidden > 1024 else 7
    dy, x = run.random(rows, hidden, dtype=dtype), run.random(rows, hidden, dtype=dtype, seed=1)
    weight = run.random(hidden, dtype=dtype, seed=2)
    for weight_grad in (False, True):
        assert_accurate(run, dy, x, weight, 1e-6, weight_grad=weight_grad)
    assert_accurate(run, dy, x, None, 1e-6)


@pytest.mark.parametrize(("weight_grad", "summed", "mixed"), ASKED)
@pytest.mark.parametrize("weight_dtype", [None, *DTYPES], ids=str)
@each_dtype
@each_implementation
def test_what_is_asked_for_in_any_dtypes(
    run: Training, dtype: torch.dtype, weight_dtype: torch.dtype | None, weight_grad: bool, summed: bool, mixed: bool
) -> None:
    if weight_dtype is None and weight_grad:
        weight_grad = False
    if weight_grad and cut_to_bf16(run, dtype, weight_dtype):
        pytest.skip("needs a GPU: Triton's interpreter cannot cast fp64 to bf16")
    x, dx_dtype = run.random(6, 96, dtype=dtype), OTHER[dtype] if mixed else None
    dy = run.random(6, 96, dtype=dx_dtype or dtype, seed=1)
    dsum = run.random(6, 96, dtype=dtype, seed=2) if summed else None
    weight = None if weight_dtype is None else run.random(96, dtype=weight_dtype, seed=3)
    for offset in (0.0, 1.0)[: 1 if weight is None else 2]:
        assert_accurate(
            run, dy, x, weight, 1e-6, dsum=dsum, dx_dtype=dx_dtype, weight_grad=weight_grad, weight_offset=offset, add=True
        )


@each_dtype
@each_implementation
def test_rows_wider_than_registers_hold(run: Training, dtype: torch.dtype) -> None:
    hidden = 20000
    dy, x = run.random(3, hidden, dtype=dtype), run.random(3, hidden, dtype=dtype, seed=1)
    weight, dsum = run.random(hidden, seed=2), run.random(3, hidden, seed=3)
    assert_accurate(run, dy, x, weight, 1e-6, weight_offset=1.0)
    assert_accurate(run, dy, x, weight, 1e-6, dsum=dsum, dx_dtype=OTHER[dtype], weight_grad=False)


@each_implementation
def test_more_streamed_rows_than_a_tile_of_dweight(run: Training) -> None:
    """Tiles of 8 rows; the ninth starts another, and 33 more than one a program where there are few."""
    dy, x = run.random(9, 20000), run.random(9, 20000, seed=1)
    assert_accurate(run, dy, x, run.random(20000, seed=2), 1e-6)


@each_implementation
def test_a_row_of_a_million(run: Training) -> None:
    dy, x = run.random(1, 2**20 + 1, dtype=torch.float16), run.random(1, 2**20 + 1, dtype=torch.float16, seed=1)
    # The interpreter takes minutes for dweight.
    assert_accurate(run, dy, x, run.random(2**20 + 1, seed=2), 1e-6, weight_grad=not run.interpreted)


@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (511, 64), (1025, 64), (700, 100), (2049, 3), (100, 512), (27, 1000),
                                              (13, 4096), (11, 5120)], ids=str)  # fmt: skip
@each_implementation
def test_more_rows_than_the_programs_take_at_once(run: Training, rows: int, hidden: int) -> None:
    """A persistent program goes from tile to tile, the last of them not full; dweight is of all."""
    dy, x = run.random(rows, hidden, dtype=torch.bfloat16), run.random(rows, hidden, dtype=torch.bfloat16, seed=1)
    dsum = run.random(rows, hidden, dtype=torch.bfloat16, seed=2)
    weight = run.random(hidden, seed=3)
    assert_accurate(run, dy, x, weight, 0.0)
    assert_accurate(run, dy, x, weight, 0.0, dsum=dsum)


@pytest.mark.parametrize("plan", [
    LaunchPlan("resident", 4, 128, 0, 4, persistent=2),
    LaunchPlan("resident", 2, 128, 0, 4, persistent=3, stages=3),
    LaunchPlan("resident", 1, 64, 64, 4, persistent=2),
    LaunchPlan("resident", 8, 128, 0, 4),
    LaunchPlan("streamed", 1, 32, 0, 4),
], ids=lambda plan: f"{plan.strategy}-{plan.rows}x{plan.head}+{plan.tail}-{plan.persistent}")  # fmt: skip
@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("rows", [1, 5, 19])
def test_any_plan(rows: int, eps: float, plan: LaunchPlan) -> None:
    """Rows beyond the last have no mean square: at eps = 0 their rstd is infinite and must not meet dweight."""
    run = Training("triton", TRITON.device, LAUNCHERS, TRITON.interpreted)
    dy, x, dsum = (run.random(rows, 100, seed=seed) for seed in range(3))
    weight = run.random(100, dtype=torch.bfloat16, seed=3)
    assert_accurate(run, dy, x, weight, eps, dsum=dsum, dx_dtype=torch.bfloat16, weight_offset=1.0, plan=plan)
    assert_accurate(run, dy, x, None, eps, plan=plan)


@pytest.mark.parametrize("hidden", [1, 100, 1025, 20000])
@each_dtype
@each_implementation
def test_the_whole_range_of_magnitudes(run: Training, dtype: torch.dtype, hidden: int) -> None:
    """Σx² overflows, or vanishes, long before x does: of rows side by side in a tile each is rescued or not for itself."""
    low, high = exponents(dtype)
    low += 24 if run.interpreted and dtype is torch.bfloat16 else 2
    steps = torch.linspace(low, high, 5 if hidden > 2000 else 23).int().tolist()
    for eps in (0.0, 1e-6):
        x = torch.cat([ranged("normal", (1, hidden), dtype, exponent, exponent, run) for exponent in steps])
        x[x.abs().amax(-1) == 0] = 1
        # dx of about 1 where h need not be extreme for that.
        size = torch.tensor([2.0 ** min(max(exponent, -60), 60) for exponent in steps], dtype=torch.float64).to(run.device)
        dy = (run.random(len(steps), hidden, dtype=torch.float64) * size[:, None]).to(compute_dtype(dtype))
        assert_accurate(run, dy, x, run.random(hidden, seed=1), eps, weight_grad=hidden < 2000)


@pytest.mark.parametrize("hidden", [4096, 5120, 40000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@each_implementation
def test_a_long_row_of_one_value(run: Training, dtype: torch.dtype, hidden: int) -> None:
    """Every addition of a sum of equal numbers errs to the same side, so a long chain of them drifts; and all of dx cancels."""
    for value in torch.linspace(1, 2, 5, dtype=dtype):
        x = value.expand(1, hidden).to(run.device)
        assert_accurate(run, run.random(1, hidden, dtype=dtype), x, None, 0.0)
        assert_accurate(run, x, x, None, 0.0)


@pytest.mark.parametrize("shape", [(0, 64), (0, 0), (5, 0), (0,), (3, 0, 64), (0, 20000)], ids=str)
@each_implementation
def test_empty_tensors(run: Training, shape: tuple[int, ...]) -> None:
    """Nothing to launch; the sum over no rows is zero."""
    x = torch.empty(shape, dtype=torch.bfloat16, device=run.device)
    weight = run.random(shape[-1])
    for asked in ({}, {"add": True}, {"dsum": x, "dx_dtype": torch.float32}, {"weight_grad": False}):
        dx, dresidual, dweight = call(run, x, x, weight, 0.0, **asked)
        assert dx.shape == x.shape
        assert dresidual is None or dresidual.shape == x.shape
        if dweight is not None:
            assert_same_bits(dweight, torch.zeros_like(weight))


@each_operator
@each_dtype
def test_a_zero_row(run: Training, dtype: torch.dtype) -> None:
    """With an eps: dx = rstd · h, finite, nothing for dweight. Without: NaN as the formula has it, in that row and in dweight."""
    x, dy = run.random(5, 100, dtype=dtype), run.random(5, 100, dtype=dtype, seed=1)
    weight = run.random(100, seed=2)
    others = [0, 1, 3, 4]
    x[2] = 0
    for eps in (1e-6, 1e-12, 1.0):
        dx, _, dweight = assert_accurate(run, dy, x, weight, eps)
        if dtype is not torch.float16 or eps > 1e-12:
            assert bool(dx.isfinite().all())
        assert bool(dweight.isfinite().all())
    dx, _, dweight = assert_accurate(run, dy, x, weight, 0.0)
    assert bool(dx[2].isnan().all())
    assert bool(dweight.isnan().all())
    assert_same_bits(dx[others], call(run, dy[others], x[others], weight, 0.0).dx)

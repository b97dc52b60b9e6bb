"""What holds of gradients whatever the values: rows that keep to themselves, runs, scale, orthogonality."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rmsnorm_ops import accuracy, reference
from rmsnorm_ops.contracts import compute_dtype
from tests.gradients import CPU, Training, call, each_dtype, each_implementation, each_operator
from tests.implementations import DTYPES, assert_same_bits
from tests.strategies import values

SIZES = (3, 64, 100, 1024, 5120)


@pytest.mark.parametrize("hidden", SIZES)
@each_dtype
@each_operator
def test_a_row_alone_has_the_bits_it_has_among_many(run: Training, dtype: torch.dtype, hidden: int) -> None:
    rows = {3: 150, 64: 150, 100: 70}.get(hidden, 4)
    dy, x, dsum = (run.random(rows, hidden, dtype=dtype, seed=seed) for seed in range(3))
    weight = run.random(hidden, seed=3)
    whole = call(run, dy, x, weight, 1e-6).dx
    # Whether dweight is asked for or not; the interpreter takes its time over it.
    asked = {"weight_grad": False}
    assert_same_bits(call(run, dy, x, weight, 1e-6, **asked).dx, whole)
    summed = call(run, dy, x, weight, 1e-6, dsum=dsum, **asked).dx
    for start, stop in ((0, 1), (1, rows)):
        part = slice(start, stop)
        assert_same_bits(call(run, dy[part], x[part], weight, 1e-6, **asked).dx, whole[part])
        assert_same_bits(call(run, dy[part], x[part], weight, 1e-6, dsum=dsum[part], **asked).dx, summed[part])
    order = torch.arange(rows - 1, -1, -1, device=run.device)
    assert_same_bits(call(run, dy[order], x[order], weight, 1e-6, **asked).dx, whole[order])


@each_dtype
@each_operator
def test_rows_beside_rows_of_any_magnitude(run: Training, dtype: torch.dtype) -> None:
    """A row whose squares overflow is computed another way; the rows of its tile are not. NaN and infinity stay in theirs."""
    x, dy = run.random(6, 100, dtype=dtype), run.random(6, 100, dtype=dtype, seed=1)
    expected = call(run, dy, x, None, 1e-6).dx
    info = torch.finfo(dtype)
    others = [values("extreme", (6, 100), dtype, 0, 0)]
    others += [torch.full((6, 100), value, dtype=dtype) for value in (0.0, info.smallest_normal, float("nan"), float("inf"))]
    for other in others:
        mixed = torch.stack((x, other.to(run.device)), 1).view(12, 100)
        assert_same_bits(call(run, dy.repeat_interleave(2, 0), mixed, None, 1e-6).dx[::2], expected)


@each_dtype
@pytest.mark.parametrize("shape", [(1, 4096), (1, 200000), (64, 4096), (16, 40000), (3000, 128)], ids=str)
def test_any_number_of_cpu_threads(shape: tuple[int, int], dtype: torch.dtype) -> None:
    dy, x, weight = CPU.random(*shape, dtype=dtype), CPU.random(*shape, dtype=dtype, seed=1), CPU.random(shape[1], seed=2)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            results.append(call(CPU, dy, x, weight, 1e-6))
    finally:
        torch.set_num_threads(threads)
    for dx, _, dweight in results[1:]:
        assert_same_bits(dx, results[0].dx)
        assert_same_bits(dweight, results[0].dweight)


@pytest.mark.parametrize(("rows", "hidden"), [(1100, 64), (28, 600), (3, 5120), (2, 17000)], ids=str)
@each_operator
def test_a_second_run_gives_the_same_bits(run: Training, rows: int, hidden: int) -> None:
    dy, x = run.random(rows, hidden, dtype=torch.bfloat16), run.random(rows, hidden, dtype=torch.bfloat16, seed=1)
    weight = run.random(hidden, seed=2)
    first = call(run, dy, x, weight, 1e-6)
    again = call(run, dy, x, weight, 1e-6)
    assert_same_bits(again.dx, first.dx)
    assert_same_bits(again.dweight, first.dweight)


@pytest.mark.parametrize("hidden", SIZES)
@each_dtype
@each_implementation
def test_dx_is_orthogonal_to_x_at_eps_0(run: Training, dtype: torch.dtype, hidden: int) -> None:
    """The norm does not change along x. Σ dx·x = 0, so what is left of it is Σ (error of dx)·x: each error is within its bound
    and half an ulp of its store, at most u_store·|dx|, so |Σ dx·x| ≤ Σ (bound + u_store·|dx| + smallest subnormal)·|x|."""
    dy, x = run.random(4, hidden, dtype=dtype), run.random(4, hidden, dtype=dtype, seed=1)
    weight = run.random(hidden, seed=2)
    dx = call(run, dy, x, weight, 0.0).dx
    exact = reference.backward(dy, x, weight, 0.0, compute=compute_dtype(dtype))
    bound = accuracy.unit(compute_dtype(dtype)) * (
        8 * exact.scaled_h + (16 + hidden / 2**14) * exact.scaled_correction + 2 * np.abs(exact.dx)
    )
    store = torch.finfo(dtype).eps * (1 if run.interpreted and dtype is torch.bfloat16 else 0.5)
    stored = store * (np.abs(exact.dx) + bound) + 4 * accuracy.smallest_subnormal(dtype)
    allowed = ((bound + stored) * np.abs(reference.wide(x))).sum(-1)
    assert (np.abs((reference.wide(dx) * reference.wide(x)).sum(-1)) <= allowed).all()


@pytest.mark.parametrize("power", [-7, -1, 5])
@each_dtype
@each_implementation
def test_linear_in_dy_by_powers_of_two(run: Training, dtype: torch.dtype, power: int) -> None:
    """To the bit, while nothing is subnormal."""
    factor = 2.0**power
    dy, x = run.random(5, 100, dtype=dtype), run.random(5, 100, dtype=dtype, seed=1)
    dy = torch.where(dy.abs() < 0.1, 0.5, dy)
    weight = run.random(100, seed=2)
    if dtype is torch.float16:
        dx_dtype = torch.float32  # an element of dx may be subnormal in fp16
        pairs = [call(run, dy * scale, x, weight, 1e-6, dx_dtype=dx_dtype, add=True) for scale in (1.0, factor)]
    else:
        pairs = [call(run, dy * scale, x, weight, 1e-6) for scale in (1.0, factor)]
    assert_same_bits(pairs[1].dx, pairs[0].dx * factor)
    assert_same_bits(pairs[1].dweight, pairs[0].dweight * factor)


@each_dtype
@each_implementation
def test_odd_in_dy_and_even_in_x(run: Training, dtype: torch.dtype) -> None:
    dy, x, weight = run.random(5, 100, dtype=dtype), run.random(5, 100, dtype=dtype, seed=1), run.random(100, seed=2)
    first, negative = call(run, dy, x, weight, 1e-6), call(run, dy, -x, weight, 1e-6)
    assert_same_bits(call(run, -dy, x, weight, 1e-6).dx, -first.dx)
    assert_same_bits(negative.dx, first.dx)
    assert_same_bits(negative.dweight, -first.dweight)


@each_implementation
def test_dsum_is_added_and_nothing_else(run: Training) -> None:
    """At dy = 0 both gradients are dsum, each in its dtype."""
    x, dsum = run.random(5, 100), run.random(5, 100, seed=1)
    for dtype in DTYPES:
        if run.interpreted and dtype is torch.bfloat16:
            continue  # it cuts off what does not fit
        dx, dresidual, dweight = call(run, torch.zeros_like(x), x, x[0], 1e-6, dsum=dsum, dx_dtype=dtype)
        assert_same_bits(dx, dsum.to(dtype))
        assert dresidual is None or torch.equal(dresidual, dsum)
        assert not dweight.any()

"""The layout probe: x, dy and weight of any strides, NaN all round them, give the bits of their dense copies."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.gradients import TRITON, Training, assert_accurate, assert_dense, call, each_dtype, each_operator
from tests.implementations import DTYPES, assert_same_bits, bits
from tests.layouts import LAYOUTS, Layout

GUARD = 40
# Four rows each, so that any two go together.
ROWS: dict[str, Callable[..., Tensor]] = {
    "dense": lambda fill, h: fill(4, h),
    "column slice": lambda fill, h: fill(4, 2 * h)[:, h:],
    "unaligned column slice": lambda fill, h: fill(4, h + 3)[:, 1 : h + 1],
    "unaligned start": lambda fill, h: fill(4 * h + 1)[1:].view(4, h),
    "transposed": lambda fill, h: fill(h, 4).t(),
    "stepped columns": lambda fill, h: fill(4, 2 * h)[:, ::2],
    "stepped rows": lambda fill, h: fill(8, h)[::2],
    "one row expanded": lambda fill, h: fill(1, h).expand(4, h),
    "one column expanded": lambda fill, h: fill(4, 1).expand(4, h),
    "one value expanded": lambda fill, h: fill(1).expand(4, h),
    "overlapping": lambda fill, h: fill(h + 3).unfold(0, h, 1),
}
WEIGHTS: dict[str, Callable[..., Tensor]] = {
    "dense": lambda fill, h: fill(h),
    "stepped": lambda fill, h: fill(2 * h)[::2],
    "expanded": lambda fill, h: fill(1).expand(h),
    "unaligned": lambda fill, h: fill(h + 1)[1:],
}


class Guarded:
    """Fills tensors inside buffers of NaN, and says afterwards whether any byte of a buffer has changed."""

    def __init__(self, run: Training, dtype: torch.dtype) -> None:
        self.run, self.dtype, self.seed = run, dtype, 0
        self.buffers: list[tuple[Tensor, Tensor]] = []

    def fill(self, *shape: int) -> Tensor:
        self.seed += 1
        size = math.prod(shape)
        buffer = torch.full((size + 2 * GUARD,), math.nan, dtype=self.dtype, device=self.run.device)
        tensor = buffer[GUARD : GUARD + size].view(shape)
        tensor.copy_(self.run.random(*shape, dtype=self.dtype, seed=self.seed))
        self.buffers.append((buffer, bits(buffer).clone()))
        return tensor

    def untouched(self) -> bool:
        return all(torch.equal(bits(buffer), before) for buffer, before in self.buffers)


def dense(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def assert_as_dense(run: Training, guarded: Guarded, dy: Tensor, x: Tensor, weight: Tensor, **asked: object) -> None:
    result = call(run, dy, x, weight, 1e-6, **asked)
    copies = {name: dense(value) if isinstance(value, Tensor) else value for name, value in asked.items()}
    expected = call(run, dense(dy), dense(x), dense(weight), 1e-6, **copies)
    for actual, other in zip(result, expected, strict=True):
        assert (actual is None) == (other is None)
        if actual is not None:
            assert bool(actual.isfinite().all()), "read beyond the rows"
            assert_dense(actual, other.shape, other.dtype)
            assert_same_bits(actual, other)
    assert guarded.untouched()


@pytest.mark.parametrize("hidden", [1, 17])
@pytest.mark.parametrize("dy_layout", ROWS)
@pytest.mark.parametrize("x_layout", ROWS)
@each_operator
def test_x_by_dy_by_weight(run: Training, x_layout: str, dy_layout: str, hidden: int) -> None:
    number = hidden + list(ROWS).index(x_layout) + list(ROWS).index(dy_layout)  # each pair with one weight and one dtype
    guarded = Guarded(run, DTYPES[number % 3])
    x, dy = ROWS[x_layout](guarded.fill, hidden), ROWS[dy_layout](guarded.fill, hidden)
    assert_as_dense(run, guarded, dy, x, list(WEIGHTS.values())[number % 4](guarded.fill, hidden))


@pytest.mark.parametrize("hidden", [1024, 5125, 17000])
@pytest.mark.parametrize("layout", ROWS)
@each_operator
def test_sizes_that_are_laid_out_differently(run: Training, layout: str, hidden: int) -> None:
    guarded = Guarded(run, torch.float16)
    x, dy = ROWS[layout](guarded.fill, hidden), ROWS[layout](guarded.fill, hidden)
    weight = guarded.fill(hidden + 1)[1:]
    # Of rows this wide dweight takes a pass of its own, laid out by what it loads: the contract pins dx's bits, not its.
    assert_as_dense(run, guarded, dy, x, weight, weight_grad=hidden < 17000)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@each_operator
def test_any_layout_of_dy_x_and_dsum(run: Training, layout: Layout) -> None:
    """Any number of dims, those of size 1 with odd strides among them."""
    guarded = Guarded(run, torch.float32)
    dy, x, dsum = (layout.make(guarded.fill, 24) for _ in range(3))
    assert_as_dense(run, guarded, dy, x, guarded.fill(24), dsum=dsum)
    assert_as_dense(run, guarded, dense(dy), x, guarded.fill(24), dsum=dsum, dx_dtype=torch.bfloat16)
    assert_as_dense(run, guarded, dy, dense(x), guarded.fill(24), weight_grad=False)


@each_dtype
@each_operator
def test_the_gradient_of_a_sum(run: Training, dtype: torch.dtype) -> None:
    """.sum() gives one number expanded over all dims."""
    x = run.random(2, 37, 256, dtype=dtype)
    dy = torch.ones((), dtype=dtype, device=run.device).expand(x.shape)
    weight = torch.ones(256, device=run.device)
    assert_accurate(run, dy, x, weight, 1e-6)
    assert_same_bits(call(run, dy, x, weight, 1e-6).dx, call(run, torch.ones_like(x), x, weight, 1e-6).dx)


@pytest.mark.parametrize(("rows", "hidden"), [(1, 5), (3, 100), (33, 64), (5, 769), (3, 1500)], ids=str)
def test_nothing_is_written_beyond_the_outputs(rows: int, hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and partial sums inside buffers of NaN: all of them written, and nothing round them."""
    dy, x, dsum = (TRITON.random(rows, hidden, seed=seed) for seed in range(3))
    weight = TRITON.random(hidden, seed=3)
    guards: list[tuple[Tensor, int]] = []

    new_empty = Tensor.new_empty

    def guarded(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None, **options: object) -> Tensor:
        if options:  # the interpreter's own
            return new_empty(tensor, shape, dtype=dtype, **options)
        size = math.prod(shape)
        buffer = torch.full((size + 128,), math.nan, dtype=dtype or tensor.dtype, device=tensor.device)
        guards.append((buffer, size))
        return buffer[64 : 64 + size].view(shape)

    monkeypatch.setattr(torch, "empty_like", lambda tensor, dtype=None, **options: guarded(tensor, tensor.shape, dtype))
    monkeypatch.setattr(Tensor, "new_empty", guarded)
    results = call(TRITON, dy, x, weight, 1e-6, dsum=dsum, dx_dtype=torch.float16)
    monkeypatch.undo()
    assert len(guards) >= 4, "dx, dresidual, dweight and its partial sums"
    for buffer, size in guards:
        assert bool(buffer[:64].isnan().all())
        assert bool(buffer[64 + size :].isnan().all())
        assert bool(buffer[64 : 64 + size].isfinite().all())
    for actual, expected in zip(results, call(TRITON, dy, x, weight, 1e-6, dsum=dsum, dx_dtype=torch.float16), strict=True):
        assert_same_bits(actual, expected)

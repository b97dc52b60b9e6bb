"""Faults that other norm kernels have had, one test a kind. Beside this file: those at the edges of memory, those that
only a GPU shows, and those of what is kept between calls there."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from rmsnorm_ops import launch, rms_norm
from tests.implementations import DTYPES, TRITON, Implementation, assert_accurate, assert_same_bits, random
from tests.launches import count_launches

HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("hidden", [1, 17, 63, 64, 127, 128, 1024])
def test_noncontiguous_input_silently_wrong(operator: Implementation, hidden: int) -> None:
    """Rows read at stride hidden, or columns at stride 1, whatever the strides were."""
    wide = random(2, 4, 3 * hidden, device=operator.device)
    q = wide[..., :hidden]
    inputs = (q, q.view(2, 4, 1, hidden), q.transpose(0, 1), wide[..., ::3], random(hidden, 6, device=operator.device).t())
    for x in inputs:
        for weight in (None, wide[0, 0, :hidden], wide[0, 0, ::3], wide[0, :1, 0].expand(hidden)):
            assert_accurate(operator, x, weight, 1e-6)


def test_in_place_aliasing(operator: Implementation) -> None:
    """The kernel scaled x itself, or the columns between those of a strided x."""
    for dtype in DTYPES:
        base = random(4, 64, dtype=dtype, device=operator.device)
        before = base.clone()
        operator.forward(base[:, ::2], base[0, ::2], 1e-6)
        operator.forward(base, base[0], 1e-6)
        assert_same_bits(base, before)


def test_fake_real_mismatch(operator: Implementation) -> None:
    """The fake said empty_like, which keeps a permuted x's strides; the kernel allocated a dense y."""
    for x in (random(2, 1, 4, 8).transpose(0, 1), random(3, 2, 8).permute(1, 0, 2), random(8, 6).t()):
        y = assert_accurate(operator, x.to(operator.device), None, 1e-6)
        with FakeTensorMode() as mode:
            fake = torch.ops.rmsnorm.forward(mode.from_tensor(x), None, 1e-6)
        assert fake.stride() == y.stride()


def test_grid_launch_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch · heads on the second grid axis, which ends at 65535. The rows belong on the first."""
    grids = []
    monkeypatch.setattr(launch, "launch", lambda prepared, *grid_and_arguments: grids.append(grid_and_arguments[:2]))
    launch.forward(torch.empty(2, 65538, 1, 16, device=TRITON.device), None, 1e-6)
    (grid,) = grids
    assert all(size < 65536 for size in grid[1:])


def test_graph_break_or_tracing_failure() -> None:
    """A fake GPU tensor made the launcher ask a driver that is not there."""
    with FakeTensorMode():
        x, weight = torch.empty(3, 5, 64, device="cuda", dtype=torch.bfloat16), torch.empty(64, device="cuda")
        for y in (rms_norm(x, weight), rms_norm(x), torch.ops.rmsnorm.forward(x, weight, 1e-6, weight_offset=1.0)):
            assert (y.shape, y.dtype, y.device.type, y.is_contiguous()) == (x.shape, x.dtype, "cuda", True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("limit", [16384, 32768])
def test_alignment_or_resource_limit(operator: Implementation, limit: int, dtype: torch.dtype) -> None:
    """Where one block becomes two, or a loop: the limit is in bytes or registers, so it differs by dtype."""
    for hidden in (limit // 2, limit // 2 + 1, limit, limit + 1):
        assert_accurate(operator, random(1, hidden, dtype=dtype, device=operator.device), None, 1e-6)


@pytest.mark.parametrize("shape", [(5, 0), (0, 0), (0,), (0, 64), (3, 0, 64), (0, 3, 0)], ids=str)
def test_empty_tensor(implementation: Implementation, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch over no programs, a mean over nothing, or an alias of the empty input."""
    launched = count_launches(monkeypatch)
    x = torch.empty(shape, device=implementation.device)
    for weight in (None, torch.ones(shape[-1], device=implementation.device)):
        y = implementation.forward(x, weight, 0.0)
        assert (y.shape, y.dtype, y.is_contiguous()) == (x.shape, x.dtype, True)
    assert not launched


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_numerics_accumulated_in_a_narrow_type(operator: Implementation, dtype: torch.dtype) -> None:
    """Squares or their sum in bf16, or in fp16: one large value hides 4095 others, and rstd is off by per cents."""
    for spike in (3e3, 3e4):
        x = random(4, 4096, dtype=dtype, seed=3)
        x[:, 2048] = spike
        assert_accurate(operator, x.to(operator.device), None, 1e-6)
    for seed in range(10):
        assert_accurate(operator, random(5, 123, 123, dtype=dtype, seed=seed)[:2, :9].to(operator.device), None, 1e-6)


@pytest.mark.parametrize("value", [300.0, 1000.0, 60000.0])
def test_half_precision_overflow(operator: Implementation, value: float) -> None:
    """The square of 300 is beyond fp16, the sum of squares of 60000 is not beyond fp32, and y is ±weight."""
    x = torch.full((2, 4096), value, dtype=torch.float16, device=operator.device)
    x[:, ::3] *= -1
    y = assert_accurate(operator, x, None, 1e-6)
    assert_same_bits(y, torch.sign(x))


def test_weight_dtype_mismatch(operator: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 x with fp32 weight, fp16 with bf16: read as x's type, or y in the weight's. And a launch a leading dim."""
    launched = count_launches(monkeypatch)
    for dtype, weight_dtype in ((torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16), (torch.float32, torch.float64)):
        x, weight = random(2, 3, 96, dtype=dtype), random(96, dtype=weight_dtype, seed=1)
        launched.clear()
        y = assert_accurate(operator, x.to(operator.device), weight.to(operator.device), 1e-6)
        assert y.dtype is dtype
        assert len(launched) == (operator is TRITON)


def test_eps_handling(operator: Implementation) -> None:
    """Added outside the root, or to the sum, or dropped where it is small beside one spike."""
    x = torch.full((2, 1024), 1e-3)
    x[0, 5] = 1e3
    for eps in (0.0, 1e-12, 1e-6, 1e-5, 1.0, 1e6):
        assert_accurate(operator, x.to(operator.device), None, eps)
    zero = torch.zeros(2, 64, device=operator.device)
    assert bool((operator.forward(zero, None, 1e-12) == 0).all())
    assert bool(operator.forward(zero, None, 0.0).isnan().all())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_offset_added_in_the_weights_type(operator: Implementation, dtype: torch.dtype) -> None:
    """1 + 2⁻⁸ is 1 in bf16, and 15.8125 + 1 is 16.75: the offset is added in fp32. Zero weights with offset 1 are ones."""
    x = random(3, 64, dtype=torch.float32, device=operator.device)
    for value in (0.00390625, 15.8125, 0.0):
        weight = torch.full((64,), value, dtype=dtype, device=operator.device)
        y = assert_accurate(operator, x, weight, 1e-6, weight_offset=1.0)
        assert_same_bits(y, operator.forward(x, weight.float() + 1, 1e-6))


def test_options_of_an_earlier_call_are_kept(operator: Implementation) -> None:
    """A compiled kernel found again by a key that leaves one of its constants out."""
    x, weight = random(3, 200, dtype=torch.float16, device=operator.device), random(200, device=operator.device)
    calls = [
        {"weight_offset": offset, "round_before_weight": twice} for offset in (0.0, 1.0, -1.0, 0.5) for twice in (False, True)
    ]
    for options in (*calls, *reversed(calls)):
        for eps in (1e-6, 1.0):
            assert_accurate(operator, x, weight, eps, **options)
    assert_accurate(operator, x, None, 1e-6)
    assert_accurate(operator, x.double(), weight, 1e-6)
    assert_accurate(operator, x, weight.half(), 1e-6)


def test_race_or_nondeterminism(operator: Implementation) -> None:
    x = random(37, 1000, dtype=torch.float16, device=operator.device)
    first = operator.forward(x, None, 1e-6)
    for _ in range(10 if operator.interpreted else 100):
        assert_same_bits(operator.forward(x, None, 1e-6), first)


def test_first_call_differs_from_the_next(operator: Implementation) -> None:
    """Autotuning ran the kernel several times over its own output. A hidden size that nothing else here uses is cold."""
    x = random(5, 1234, device=operator.device)
    first, second = operator.forward(x, None, 1e-6), operator.forward(x, None, 1e-6)
    assert_same_bits(first, second)
    assert_accurate(operator, x, None, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_that_aliases_an_input(operator: Implementation, dtype: torch.dtype) -> None:
    """x given back where nothing was to be done: empty, eps = 0, no weight, a norm of ones."""
    for x in (torch.ones(3, 16, dtype=dtype), torch.empty(0, 16, dtype=dtype), torch.ones(1, 1, dtype=dtype)):
        x = x.to(operator.device)
        y = operator.forward(x, None, 0.0)
        assert y is not x
        assert y._base is None
        assert not x.numel() or y.data_ptr() != x.data_ptr()


def test_recompiles_for_row_counts() -> None:
    """A kernel a row count, or one each for counts of 1 and of multiples of 16. The launcher prepares one a hidden size."""
    from rmsnorm_ops import prepared

    x = random(64, 1111, dtype=torch.float16, device=TRITON.device)
    launch.forward(x, None, 1e-6)
    before = len(prepared._prepared)
    for rows in (1, 2, 3, 15, 16, 17, 33, 64):
        launch.forward(x[:rows], None, 1e-6)
    assert len(prepared._prepared) == before

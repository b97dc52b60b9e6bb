"""Rows that several programs share. Programs that wait for one another cannot run one after the other, as Triton's interpreter
runs them: there a row has one program, which publishes to itself; on a GPU it has as many as the plan says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rmsnorm_ops import accuracy, launch, launch_backward
from rmsnorm_ops.plan import LaunchPlan
from tests.hardware import needs_gpu
from tests.implementations import TRITON, assert_same_bits, random

ALONE = LaunchPlan("shared", 1, 128, 0, 4, persistent=3, stages=3)
# hidden that a GPU's plan gives to several programs, forward and backward, in every dtype
WIDE = (40_000, 65_536, 100_000)


def rows_of_all_magnitudes(rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """Some of whose squares over- and underflow, and one of zeros."""
    x = random(rows, hidden, dtype=torch.float64)
    x[1::5] *= 1e25
    x[2::5] *= 1e-30
    x[3] = 0
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype).to(TRITON.device)


def bound(dtype: torch.dtype) -> float:
    return accuracy.forward_bound(dtype, interpreted=TRITON.interpreted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_one_program_a_row(dtype: torch.dtype) -> None:
    x, residual = rows_of_all_magnitudes(10, 100, dtype), random(10, 100, dtype=dtype, device=TRITON.device, seed=1)
    weight, dy = (random(*shape, dtype=dtype, device=TRITON.device, seed=2) for shape in ((100,), (10, 100)))
    for eps in (0.0, 1e-6):
        y = launch.forward(x, weight, eps, plan=ALONE)
        assert accuracy.forward_error(y, x, weight, eps) <= bound(dtype)
    y, residual_out = launch.add_forward(x, residual, weight, 1e-6, plan=ALONE)
    assert_same_bits(residual_out, x + residual)
    assert_same_bits(y, launch.forward(residual_out, weight, 1e-6, plan=ALONE))
    dx, dweight = launch_backward.backward(dy, x, weight, 1e-6, plan=ALONE)
    assert accuracy.input_gradient_error(dx, dy, x, weight, 1e-6, interpreted=TRITON.interpreted) <= 1
    assert accuracy.weight_gradient_error(dweight, dy, x, weight, 1e-6, interpreted=TRITON.interpreted) <= 1


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7])
def test_any_number_of_rows_and_groups(rows: int) -> None:
    """Fewer rows than groups, and groups that take one row more than others."""
    x, weight = random(rows, 100, device=TRITON.device), random(100, device=TRITON.device, seed=1)
    expected = launch.forward(x, weight, 1e-6, plan=replace(ALONE, persistent=100))
    dx, dweight = launch_backward.backward(x, x, weight, 1e-6, plan=replace(ALONE, persistent=100))
    for groups in (1, 2, 5):
        plan = replace(ALONE, persistent=groups)
        assert_same_bits(launch.forward(x, weight, 1e-6, plan=plan), expected)
        found = launch_backward.backward(x, x, weight, 1e-6, plan=plan)
        assert_same_bits(found[0], dx)
        torch.testing.assert_close(found[1], dweight)


@needs_gpu()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", WIDE)
def test_many_programs_a_row(hidden: int, dtype: torch.dtype) -> None:
    x, residual = rows_of_all_magnitudes(70, hidden, dtype), random(70, hidden, dtype=dtype, device="cuda", seed=1)
    weight, dy = (random(*shape, dtype=dtype, device="cuda", seed=2) for shape in ((hidden,), (70, hidden)))
    y = launch.forward(x, weight, 0.0)
    assert accuracy.forward_error(y, x, weight, 0.0) <= bound(dtype)
    assert_same_bits(torch.cat([launch.forward(row[None], weight, 0.0) for row in x[:20]]), y[:20])
    y, residual_out = launch.add_forward(x, residual, weight, 1e-6)
    assert_same_bits(residual_out, x + residual)
    assert_same_bits(y, launch.forward(residual_out, weight, 1e-6))
    ordinary = random(70, hidden, dtype=dtype, device="cuda", seed=3)
    for rows in (x, ordinary):
        dx, dweight = launch_backward.backward(dy, rows, weight, 1e-6)
        assert accuracy.input_gradient_error(dx, dy, rows, weight, 1e-6) <= 1
        again = launch_backward.backward(dy, rows, weight, 1e-6)
        assert_same_bits(again[0], dx)
        assert_same_bits(again[1], dweight)
        assert_same_bits(launch_backward.backward_input(dy[5:9], rows[5:9], weight, 1e-6), dx[5:9])
    assert accuracy.weight_gradient_error(dweight, dy, ordinary, weight, 1e-6) <= 1


@needs_gpu()
def test_not_a_number_stays_in_its_row() -> None:
    """NaN is what marks a part that is not there yet: one that a program publishes must not look like it."""
    x, weight = random(40, 65_536, device="cuda"), random(65_536, device="cuda", seed=1)
    expected = launch.forward(x, weight, 1e-6)
    all_ones = torch.tensor([-1], dtype=torch.int32, device="cuda").view(torch.float32)
    x[3, 17], x[8, 60_000], x[9, 5] = torch.nan, all_ones[0], torch.inf
    y = launch.forward(x, weight, 1e-6)
    kept = [row for row in range(40) if row not in (3, 8, 9)]
    assert_same_bits(y[kept], expected[kept])
    assert y[[3, 8]].isnan().all()
    assert y[9, 5].isnan()
    assert (y[9, :5] == 0).all()


@needs_gpu()
def test_on_two_streams_and_in_a_graph() -> None:
    """Each launch takes most of the GPU, and waits for parts that only its own programs publish."""
    x, weight = random(300, 65_536, device="cuda"), random(65_536, device="cuda", seed=1)
    y, (dx, dweight) = launch.forward(x, weight, 1e-6), launch_backward.backward(x, x, weight, 1e-6)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(10):
        with torch.cuda.stream(streams[0]):
            first = launch.forward(x, weight, 1e-6)
        with torch.cuda.stream(streams[1]):
            second = launch_backward.backward(x, x, weight, 1e-6)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = launch.forward(x, weight, 1e-6)
    for _ in range(3):
        graph.replay()
    for found, expected in ((first, y), (captured, y), (second[0], dx), (second[1], dweight)):
        assert_same_bits(found, expected)

"""Faults of a backward that only a GPU shows: races, offsets beyond 32 bits, capture, threads of autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rmsnorm_ops import add_rms_norm, rms_norm
from tests.gradients import TRITON, assert_accurate
from tests.hardware import needs_gpu, two_gpus
from tests.implementations import assert_same_bits, random

ops = torch.ops.rmsnorm


@needs_gpu()
@pytest.mark.parametrize(("rows", "hidden"), [(8192, 2048), (57345, 128), (512, 20000)], ids=str)
def test_race_or_nondeterminism(rows: int, hidden: int) -> None:
    """dweight added up with atomics, or partial sums read before they are written."""
    dy, x = (random(rows, hidden, dtype=torch.bfloat16, device="cuda", seed=seed) for seed in range(2))
    weight = random(hidden, device="cuda", seed=2)
    first = ops.backward(dy, x, weight, 1e-6)
    for _ in range(50):
        for actual, expected in zip(ops.backward(dy, x, weight, 1e-6), first, strict=True):
            assert_same_bits(actual, expected)


@needs_gpu(40)
@pytest.mark.parametrize("shape", [(2**23 + 16, 256), (2**19 + 65, 4096 + 8), (2**16 + 3, 32776)], ids=str)
def test_int32_offset_overflow(shape: tuple[int, int]) -> None:
    """More than 2³¹ elements: the last rows against the same rows alone, and dweight, to which only they contribute."""
    torch.cuda.empty_cache()
    last = 1000
    x = torch.ones(shape, dtype=torch.bfloat16, device="cuda")
    dy = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    x[-last:] = random(last, shape[1], dtype=torch.bfloat16, device="cuda")
    dy[-last:] = random(last, shape[1], dtype=torch.bfloat16, device="cuda", seed=1)
    weight = torch.ones(shape[1], device="cuda")
    dx, dweight = ops.backward(dy, x, weight, 1e-6)
    tail, tail_dweight = ops.backward(dy[-last:].clone(), x[-last:].clone(), weight, 1e-6)
    assert_same_bits(dx[-last:], tail)
    assert not dx[:-last:997].any()
    torch.testing.assert_close(dweight, tail_dweight, rtol=1e-4, atol=1e-3)
    del dx
    dx, dresidual = ops.add_backward_input(dy, dy, x, weight, 1e-6, dx_dtype=torch.float16)
    tail = ops.add_backward_input(dy[-last:].clone(), dy[-last:].clone(), x[-last:].clone(), weight, 1e-6, dx_dtype=torch.float16)
    assert_same_bits(dx[-last:], tail[0])
    assert_same_bits(dresidual[-last:], tail[1])


@needs_gpu()
@pytest.mark.parametrize("shape", [(1, 65537, 3, 64), (2**20 + 5, 3), (57345, 128)], ids=str)
def test_grid_launch_limit(shape: tuple[int, ...]) -> None:
    dy, x = (random(*shape, dtype=torch.bfloat16, device="cuda", seed=seed) for seed in range(2))
    assert_accurate(TRITON, dy, x, random(shape[-1], device="cuda", seed=2), 1e-6)


def training_step(x: Tensor, residual: Tensor, weight: Tensor) -> list[Tensor]:
    y, residual_out = add_rms_norm(x, residual, weight, 1e-6)
    z = rms_norm(residual_out * y, weight, 1e-6)
    return list(torch.autograd.grad(z.float().square().cos().sum(), (x, residual, weight)))


@needs_gpu()
@pytest.mark.parametrize("hidden", [100, 1024, 20000])
def test_cuda_graph_of_forward_and_backward(hidden: int) -> None:
    inputs = [random(64, hidden, dtype=torch.bfloat16, device="cuda", seed=seed).requires_grad_() for seed in range(2)]
    inputs.append(random(hidden, device="cuda", seed=2).requires_grad_())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        training_step(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = training_step(*inputs)
    for seed in (5, 6):
        with torch.no_grad():
            for index, tensor in enumerate(inputs):
                tensor.copy_(random(*tensor.shape, device="cuda", seed=10 * seed + index))
        graph.replay()
        for actual, expected in zip(captured, training_step(*inputs), strict=True):
            assert_same_bits(actual, expected)


@two_gpus
def test_wrong_device() -> None:
    """Backward runs on a thread of autograd, whose current device is not the forward's."""
    torch.cuda.set_device(0)
    results = []
    for device in ("cuda:0", "cuda:1"):
        inputs = [random(33, 1000, device=device, seed=seed).requires_grad_() for seed in range(2)]
        results.append(training_step(*inputs, random(1000, device=device, seed=2).requires_grad_()))
    for first, second in zip(*results, strict=True):
        assert str(second.device) == "cuda:1"
        assert_same_bits(first.cpu(), second.cpu())
    assert torch.cuda.current_device() == 0

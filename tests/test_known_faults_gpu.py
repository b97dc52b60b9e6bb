"""Faults that other norm kernels have had and that only a GPU shows: offsets, grids, devices, streams, races."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.hardware import needs_gpu, two_gpus
from tests.implementations import TRITON, assert_accurate, assert_same_bits, random

forward = torch.ops.rmsnorm.forward.default


def eager(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return forward(x, weight, eps)


def assert_tail_is_right(x: Tensor, rows: int = 1000) -> Tensor:
    """The last rows of the whole against the same rows alone, at addresses that fit 32 bits."""
    torch.cuda.empty_cache()
    y = forward(x, None, 1e-6)
    tail = x.flatten(0, -2)[-rows:] if x.is_contiguous() else x[-1, -rows:]
    assert_same_bits(y.view(-1, x.shape[-1])[-rows:], forward(tail.clone(), None, 1e-6))
    return y


@needs_gpu(20)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2**23 + 16, 256), torch.bfloat16),  # several rows a program, 2³¹ elements
        ((2**20 + 65, 4096), torch.float16),  # a row a program, 2³² elements
        ((2**15 + 3, 131072), torch.bfloat16),  # streamed
    ],
    ids=str,
)
def test_int32_offset_overflow(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.zeros(shape, dtype=dtype, device="cuda")
    x[-1000:] = random(1000, shape[1], dtype=dtype, device="cuda")
    y = assert_tail_is_right(x)
    assert not y[:-1000:4099].any(), "rows of zeros"
    assert not y[: 2**14].any()


@needs_gpu(20)
def test_int32_stride_overflow() -> None:
    """A slice of a fused qkv of more than 2³¹ elements, of which the slice itself has fewer."""
    qkv = torch.zeros(2, 139811, 15360, dtype=torch.bfloat16, device="cuda")
    qkv[-1, -1000:] = random(1000, 15360, dtype=torch.bfloat16, device="cuda")
    assert_tail_is_right(qkv[:, :, 5120:10240])


@needs_gpu()
@pytest.mark.parametrize("shape", [(2, 32769, 1, 16), (1, 65537, 3, 128), (2**22 + 5, 3)], ids=str)
def test_grid_launch_limit(shape: tuple[int, ...]) -> None:
    x = random(*shape, dtype=torch.bfloat16, device="cuda")
    assert_accurate(TRITON, x, None, 1e-6)


@two_gpus
def test_wrong_device() -> None:
    """A launch on the current device, with the pointers of another."""
    x, weight = random(33, 1000, dtype=torch.bfloat16), random(1000)
    expected = forward(x.to("cuda:0"), weight.to("cuda:0"), 1e-6).cpu()
    compiled = torch.compile(eager, fullgraph=True)
    for current in (0, 1):
        with torch.cuda.device(current):
            for device in ("cuda:1", "cuda:0", "cuda:1"):
                for function in (eager, compiled):
                    y = function(x.to(device), weight.to(device), 1e-6)
                    assert str(y.device) == device
                    assert_same_bits(y.cpu(), expected)
                    assert torch.cuda.current_device() == current
    with pytest.raises(ValueError, match=r"^weight must be on x's device cuda:1, got cuda:0$"):
        forward(x.to("cuda:1"), weight.to("cuda:0"), 1e-6)


@two_gpus
def test_wrong_stream_of_another_device() -> None:
    """Right device, but the stream of the current one: a producer just before is not waited for."""
    torch.cuda.set_device(0)
    x = random(64, 4096, device="cuda:1")
    expected = forward(x * 2, None, 1e-6)
    for _ in range(100):
        with torch.cuda.device(1):
            torch.cuda._sleep(200_000)
        produced = x * 2
        assert_same_bits(forward(produced, None, 1e-6), expected)


@needs_gpu()
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_wrong_stream(compiled: bool) -> None:
    """On the default stream in place of the current one, between a slow producer and a consumer."""
    function = torch.compile(eager, fullgraph=True) if compiled else eager
    x = random(64, 4096, device="cuda")
    expected = function(x, None, 1e-6) + 1
    torch.cuda.synchronize()
    buffer, stream = torch.zeros_like(x), torch.cuda.Stream()
    for _ in range(200):
        with torch.cuda.stream(stream):
            buffer.zero_()
            torch.cuda._sleep(100_000)
            buffer.copy_(x)
            y = function(buffer, None, 1e-6)
            torch.cuda._sleep(100_000)
            consumed = y + 1
        stream.synchronize()
        assert_same_bits(consumed, expected)


@needs_gpu()
def test_race_between_programs() -> None:
    x = random(8192, 2048, dtype=torch.bfloat16, device="cuda")
    first = forward(x, None, 1e-6)
    for _ in range(100):
        assert_same_bits(forward(x, None, 1e-6), first)

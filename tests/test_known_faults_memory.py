"""Faults of other norm kernels at the edges of memory: reads and writes beyond the tensors, offsets beyond 32 bits."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import Tensor

from tests.implementations import CPU, TRITON, Implementation, assert_accurate, assert_same_bits, random
from tests.processes import run_python


def test_int32_offset_overflow(operator: Implementation) -> None:
    """Row offsets of 2³¹ elements and more wrapped round. Memory that is not touched is not taken."""
    stride = 2**31 + 64
    try:
        buffer = torch.empty(stride + 128, dtype=torch.float16, device=operator.device)
    except RuntimeError:
        pytest.skip("needs 4 GiB of address space")
    x = buffer.as_strided((2, 1, 128), (stride, 2**33, 1))
    x.copy_(random(2, 1, 128, dtype=torch.float16))
    assert_accurate(operator, x, None, 1e-6)
    assert_accurate(operator, buffer.as_strided((1, 2, 1, 128), (7, stride, 5, 1)), None, 1e-6)


@pytest.mark.parametrize("hidden", [1, 2, 3, 5, 7, 9, 100, 513, 767, 769, 1000, 1025, 1536, 2880, 5120, 40001])
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_mask_tail_or_block_shape(operator: Implementation, rows: int, hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes beyond the row were counted, read or written; rows beyond the last likewise. NaN all around shows either."""
    if rows == 33 and hidden > 2000:
        rows = 2
    x, weight = surrounded(random(rows, hidden, device=operator.device)), surrounded(random(hidden, device=operator.device))
    guards: list[tuple[Tensor, int]] = []

    def guarded_empty_like(tensor: Tensor, **options: object) -> Tensor:
        buffer = tensor.new_empty(tensor.numel() + 128).fill_(math.nan)
        guards.append((buffer, tensor.numel()))
        return buffer[64 : 64 + tensor.numel()].view(tensor.shape)

    if operator is TRITON:
        monkeypatch.setattr(torch, "empty_like", guarded_empty_like)
    y = operator.forward(x, weight, 1e-6)
    monkeypatch.undo()
    assert guards or operator is CPU
    for buffer, size in guards:
        assert bool(buffer[:64].isnan().all())
        assert bool(buffer[64 + size :].isnan().all())
    assert bool(y.isfinite().all())
    assert_same_bits(y, assert_accurate(operator, x.clone(), weight.clone(), 1e-6))


GUARDED = """
import ctypes, mmap, torch
from rmsnorm_ops import launch
kept = []

def at_the_end(values):
    size = values.numel() * values.element_size()
    inside = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, inside + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + inside), mmap.PAGESIZE, 0) == 0
    kept.append(memory)
    placed = torch.frombuffer(memory, dtype=values.dtype, count=values.numel(), offset=inside - size)
    return placed.view(values.shape).copy_(values)

for rows, hidden in ((3, 100), (1, 1000), (2, 5004), (1, 40004)):
    y = launch.forward(at_the_end(torch.ones(rows, hidden)), at_the_end(torch.ones(hidden)), 0.0)
    assert torch.allclose(y, torch.ones(rows, hidden))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs memory protection as Linux has it")
def test_read_beyond_the_tensors() -> None:
    """x and weight end where their memory ends: an element more, even one that changes nothing, would end the process."""
    run_python(GUARDED, TRITON_INTERPRET="1")


def surrounded(values: Tensor, by: float = math.nan) -> Tensor:
    buffer = torch.full((values.numel() + 128,), by, dtype=values.dtype, device=values.device)
    return buffer[64 : 64 + values.numel()].view(values.shape).copy_(values)

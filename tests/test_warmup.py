"""``warmup``: after it, no call of that kind compiles."""

from __future__ import annotations

import pytest
import torch

import rmsnorm_ops
from rmsnorm_ops import prepared, warmup
from tests.hardware import needs_gpu
from tests.implementations import assert_same_bits, random


@pytest.mark.parametrize("residual_dtype", [None, torch.float32])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("weight", [False, True])
def test_takes_what_the_functions_take(weight: bool, gradients: bool, residual_dtype: torch.dtype | None) -> None:
    warmup(96, torch.bfloat16, weight=weight, gradients=gradients, residual_dtype=residual_dtype, device="cpu")


def test_refuses_what_they_refuse() -> None:
    with pytest.raises(ValueError, match="weight_offset must be 0 when there is no weight"):
        warmup(96, torch.bfloat16, weight=False, weight_offset=1.0, device="cpu")
    with pytest.raises(TypeError, match="x must be float16"):
        warmup(96, torch.int32, device="cpu")


@needs_gpu()
@pytest.mark.parametrize("hidden", [120, 4104, 40_008])
def test_nothing_is_compiled_afterwards(hidden: int) -> None:
    warmup(hidden, torch.float16, gradients=True)
    warmup(hidden, torch.float16, residual_dtype=torch.float32, gradients=True)
    kernels = set(prepared._prepared)
    x, weight = random(37, hidden, dtype=torch.float16, device="cuda"), random(hidden, dtype=torch.float16, device="cuda")
    x.requires_grad_(), weight.requires_grad_()
    residual = random(37, hidden, device="cuda").requires_grad_()
    y = rmsnorm_ops.rms_norm(x, weight, 1e-5)
    torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    y, residual_out = rmsnorm_ops.add_rms_norm(x, residual, weight, 1e-5)
    torch.autograd.grad((y, residual_out), (x, residual, weight), (torch.ones_like(y), torch.ones_like(residual_out)))
    assert set(prepared._prepared) == kernels


@needs_gpu()
def test_a_shape_that_was_never_run_can_be_captured() -> None:
    warmup(1032, torch.bfloat16)
    x, weight = random(19, 1032, dtype=torch.bfloat16, device="cuda"), random(1032, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = rmsnorm_ops.rms_norm(x, weight, 1e-5)
    graph.replay()
    assert_same_bits(y, rmsnorm_ops.rms_norm(x, weight, 1e-5))

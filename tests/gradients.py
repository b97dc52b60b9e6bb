"""The implementations of the gradients and of the add that this machine has, and how their results are judged."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from rmsnorm_ops import accuracy, launch, launch_backward, plain, reference
from rmsnorm_ops.contracts import compute_dtype
from tests.implementations import DEVICES, DTYPES, GPU, random
from tests.strategies import values

LAUNCHERS = SimpleNamespace(
    forward=launch.forward,
    add_forward=launch.add_forward,
    backward=launch_backward.backward,
    backward_input=launch_backward.backward_input,
    add_backward=launch_backward.add_backward,
    add_backward_input=launch_backward.add_backward_input,
)


@dataclass(frozen=True)
class Training:
    """``of`` has the six operators as attributes, for tensors of ``device``."""

    name: str
    device: str
    of: Any
    interpreted: bool = False  # by Triton's interpreter, whose bf16 stores truncate

    def __str__(self) -> str:
        return self.name

    def random(self, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
        return random(*shape, dtype=dtype, device=self.device, seed=seed)


CPU = Training("cpu", "cpu", torch.ops.rmsnorm)
TRITON = Training("triton", "cuda", torch.ops.rmsnorm) if GPU else Training("triton", "cpu", LAUNCHERS, interpreted=True)
PLAIN = tuple(Training(f"plain-{device}", device, plain) for device in DEVICES)
# Those whose bits the contract pins, and all.
each_operator = pytest.mark.parametrize("run", [CPU, TRITON], ids=str)
each_implementation = pytest.mark.parametrize("run", [CPU, TRITON, *PLAIN], ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


class Result(NamedTuple):
    """What a backward operator returned; None for what was not asked for."""

    dx: Tensor
    dresidual: Tensor | None
    dweight: Tensor | None


def call(
    run: Training,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    dsum: Tensor | None = None,
    dx_dtype: torch.dtype | None = None,
    weight_offset: float = 0.0,
    weight_grad: bool | None = None,
    add: bool = False,
    **extra: Any,
) -> Result:
    """The operator of the four that does what is asked for, and no more."""
    weight_grad = weight is not None if weight_grad is None else weight_grad
    options = {"weight_offset": weight_offset, **extra}
    if not add and dsum is None and dx_dtype is None:
        if weight_grad:
            dx, dweight = run.of.backward(dy, x, weight, eps, **options)
            return Result(dx, None, dweight)
        return Result(run.of.backward_input(dy, x, weight, eps, **options), None, None)
    operator = run.of.add_backward if weight_grad else run.of.add_backward_input
    dx, dresidual, *dweight = operator(dy, dsum, x, weight, eps, dx_dtype=dx_dtype, **options)
    if dx.dtype is x.dtype:
        assert dresidual.shape == (0,), "dx serves both"
    return Result(dx, None if dx.dtype is x.dtype else dresidual, dweight[0] if weight_grad else None)


def assert_accurate(run: Training, dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, **asked: Any) -> Result:
    """Run, and hold the gradients to the contract: shapes, dtypes, dense, and within the bounds of the oracle."""
    result = call(run, dy, x, weight, eps, **asked)
    dx, dresidual, dweight = result
    assert dx.dtype is (asked.get("dx_dtype") or x.dtype)
    options = {"weight_offset": asked.get("weight_offset", 0.0), "dsum": asked.get("dsum"), "interpreted": run.interpreted}
    for gradient, dtype in ((dx, dx.dtype), (dresidual, x.dtype)):
        if gradient is not None:
            assert_dense(gradient, x.shape, dtype)
            error = accuracy.input_gradient_error(gradient, dy, x, weight, eps, fp64=dx.dtype is torch.float64, **options)
            assert error <= 1, f"{error} of its bound"
    if dweight is not None and weight is not None:
        assert_dense(dweight, weight.shape, weight.dtype)
        fp64 = dx.dtype is torch.float64
        error = accuracy.weight_gradient_error(dweight, dy, x, weight, eps, fp64=fp64, interpreted=run.interpreted)
        assert error <= 1, f"dweight: {error} of its bound"
    return result


def assert_dense(tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    assert (tensor.shape, tensor.dtype) == (shape, dtype)
    assert tensor.stride() == torch.empty(shape, device="meta").stride()


def textbook(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0) -> Tensor:
    """The formula in torch's own operators, in the dtype of its operands."""
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * (weight + weight_offset)


def textbook_add(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return textbook(x + residual, weight, eps), x + residual


def scaled_into_range(
    dy: Tensor, x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, compute: torch.dtype
) -> Tensor:
    """dy with each row scaled by a power of two such that its h, and h · rstd, lie well within the compute type.

    The bound cannot hold beyond. Sums of h · x run over x as it is where its mean square lies within 2^±60, else over x
    brought near 1: where they overflow dx is infinite or NaN though rstd · h is finite, where they vanish dx loses its second
    term. And dx itself is beyond any dtype where rstd · h is.
    """
    far = 60.0 if compute is torch.float32 else 480.0
    h = np.abs(reference.operand(dy, x, compute) * reference.effective_weight(x, weight, weight_offset, compute)).max(-1)
    rstd = np.clip(reference.rstd(x, eps, compute)[..., 0], 2.0**-1074, 2.0**1022)
    with np.errstate(all="ignore"):
        exponent = np.where(h > 0, np.log2(h), 0)
    target = np.clip(np.minimum(exponent, far - np.log2(rstd)), -far, far)
    shift = np.round((target - exponent).astype(np.float64))
    info = torch.finfo(dy.dtype)
    scaled = dy.double() * torch.exp2(torch.from_numpy(shift)).to(dy.device)[..., None]
    return scaled.clamp(-info.max, info.max).to(dy.dtype)


def without_bf16_subnormals(tensor: Tensor, smallest: float = 2.0**-126) -> Tensor:
    """Triton's interpreter mishandles bf16 subnormals."""
    return torch.where(tensor.abs() < smallest, 0, tensor) if tensor.dtype is torch.bfloat16 else tensor


def compute_of(x: Tensor, dx_dtype: torch.dtype | None) -> torch.dtype:
    return torch.promote_types(compute_dtype(x.dtype), compute_dtype(dx_dtype or x.dtype))


def ranged(kind: str, shape: tuple[int, ...], dtype: torch.dtype, exponent: int, seed: int, run: Training) -> Tensor:
    """``strategies.values``, on the implementation's device."""
    tensor = values(kind, shape, dtype, exponent, seed)
    return (without_bf16_subnormals(tensor) if run.interpreted else tensor).to(run.device)


def cut_to_bf16(run: Training, compute: torch.dtype, *stored: torch.dtype | None) -> bool:
    """Whether a result is cast from fp64 to bf16 by Triton's interpreter, which gives numbers that have nothing to do with it."""
    return run.interpreted and compute is torch.float64 and torch.bfloat16 in stored

"""The implementations of the forward that this machine has, and how their results are judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import rmsnorm_ops  # noqa: F401  (registers the operators)
from rmsnorm_ops import accuracy, launch, plain

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
GPU = torch.cuda.is_available()
DEVICES = ("cpu", "cuda") if GPU else ("cpu",)
INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Implementation:
    """``forward(x, weight, eps, *, weight_offset, round_before_weight)`` on tensors of ``device``."""

    name: str
    device: str
    forward: Callable[..., Tensor]
    interpreted: bool = False  # by Triton's interpreter, whose bf16 stores truncate

    def __str__(self) -> str:
        return self.name

    def rounds_to_nearest(self, dtype: torch.dtype) -> bool:
        return not (self.interpreted and dtype is torch.bfloat16)


def _operator(x: Tensor, weight: Tensor | None, eps: float, **options: object) -> Tensor:
    return torch.ops.rmsnorm.forward.default(x, weight, eps, **options)


CPU = Implementation("cpu", "cpu", _operator)
TRITON = Implementation("triton", "cuda", _operator) if GPU else Implementation("triton", "cpu", launch.forward, interpreted=True)
OPERATORS = (CPU, TRITON)
PLAIN = tuple(Implementation(f"plain-{device}", device, plain.forward) for device in DEVICES)
IMPLEMENTATIONS = (*OPERATORS, *PLAIN)


def assert_accurate(implementation: Implementation, x: Tensor, weight: Tensor | None, eps: float, **options: object) -> Tensor:
    """Run, and hold y to the contract: shape, dtype, dense, and within the bound of the fp64 oracle."""
    y = implementation.forward(x, weight, eps, **options)
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    assert y.stride() == torch.empty(x.shape, device="meta").stride()
    error = accuracy.forward_error(y, x, weight, eps, **options)
    rounded_twice = bool(options.get("round_before_weight"))
    bound = accuracy.forward_bound(
        x.dtype,
        round_before_weight=rounded_twice,
        interpreted=implementation.interpreted,
        unfused=implementation in PLAIN,
    )
    assert error <= bound, f"{error} ulp, the bound is {bound}"
    return y


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(INTEGER_OF_SIZE[tensor.element_size()])


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal to the last bit, the sign of zero included. NaN equals NaN, whatever its payload."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    differ = (bits(actual) != bits(expected)) & ~(actual.isnan() & expected.isnan())
    count = int(differ.sum())
    assert count == 0, f"{count} of {actual.numel()} differ: {actual[differ][:4]} and {expected[differ][:4]}"


def random(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Tensor:
    """Numbers of N(0, 1), the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

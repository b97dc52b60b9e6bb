"""The quantising implementations that this machine has, and how their codes and scales are judged."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rmsnorm_ops  # noqa: F401  (registers the operators)
from rmsnorm_ops import launch_quant, plain_quant, reference
from rmsnorm_ops.contracts_quant import FORMATS
from tests import implementations
from tests.implementations import DEVICES, GPU, Implementation, assert_same_bits, random

LAUNCHERS = SimpleNamespace(
    forward_quant=launch_quant.forward_quant,
    forward_quant_static=launch_quant.forward_quant_static,
    add_forward_quant=launch_quant.add_forward_quant,
    add_forward_quant_static=launch_quant.add_forward_quant_static,
)
UNIT = 2.0**-24
SCALE_ULP = 4.0
UNFUSED_ULP = 1.0  # plain torch and Triton's interpreter round between a product and its sum


@dataclass(frozen=True)
class Quantiser:
    """``of`` has the four operators as attributes, for tensors of ``device``."""

    name: str
    device: str
    of: Any
    like: Implementation  # the forward that it is made of
    unfused: bool = False

    def __str__(self) -> str:
        return self.name

    def random(self, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
        return random(*shape, dtype=dtype, device=self.device, seed=seed)


CPU = Quantiser("cpu", "cpu", torch.ops.rmsnorm, implementations.CPU)
TRITON = (
    Quantiser("triton", "cuda", torch.ops.rmsnorm, implementations.TRITON)
    if GPU
    else Quantiser("triton", "cpu", LAUNCHERS, implementations.TRITON, unfused=True)
)
PLAIN = tuple(Quantiser(f"plain-{device}", device, plain_quant, implementations.CPU, unfused=True) for device in DEVICES)
each_operator = pytest.mark.parametrize("run", [CPU, TRITON], ids=str)
each_implementation = pytest.mark.parametrize("run", [CPU, TRITON, *PLAIN], ids=str)
each_format = pytest.mark.parametrize("dtype", FORMATS, ids=lambda dtype: FORMATS[dtype].name)


def codes_of(dtype: torch.dtype) -> np.ndarray:
    """All finite values of a format, in order (int8: those that are used)."""
    if dtype is torch.int8:
        return np.arange(-127.0, 128.0)
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return np.unique(every[every.isfinite()].double().numpy())


def nearest(quotient: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The nearest value of a format, saturated; at a tie either."""
    values = codes_of(dtype)
    return values[np.searchsorted((values[1:] + values[:-1]) / 2, quotient)]


def values_of(q: Tensor) -> np.ndarray:
    return q.detach().cpu().float().double().numpy()


def bytes_of(q: Tensor) -> Tensor:
    """Codes as integers; NaN is one code, whatever its sign and payload."""
    code = q.view(torch.uint8).clone()
    return code if q.dtype is torch.int8 else code.masked_fill_(q.float().isnan(), 0x7F if q.dtype.is_floating_point else 0)


def assert_same_codes(actual: Tensor, expected: Tensor) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    differ = bytes_of(actual) != bytes_of(expected)
    assert not bool(differ.any()), f"{int(differ.sum())} of {actual.numel()} differ"


def by_group(array: np.ndarray, group: int) -> np.ndarray:
    """``[..., hidden]`` as ``[..., groups, group]``, with zeros where the last one is short."""
    padding = -array.shape[-1] % group
    padded = np.concatenate([array, np.zeros((*array.shape[:-1], padding), array.dtype)], -1)
    return padded.reshape(*array.shape[:-1], -1, group)


def assert_right(
    run: Quantiser, q: Tensor, scale: Tensor, x: Tensor, weight: Tensor | None, eps: float, *, dtype: torch.dtype,
    group_size: int | None = None, weight_offset: float = 0.0, power_of_two: bool = False, max_scale: float = np.inf,
) -> None:  # fmt: skip
    """Scales within SCALE_ULP of the exact ones; codes those of exact y and these scales, but for one code at a tie."""
    hidden, qmax = x.shape[-1], FORMATS[dtype].qmax
    group = min(group_size or hidden, hidden)
    exact = reference.forward(x, weight, eps, weight_offset=weight_offset)
    factor = np.abs(reference.effective_weight(x, weight, weight_offset))
    # What docs/numerics.md does not count: subnormal x · rstd under a large weight, and the rounding of weight + offset.
    lost = factor * 2.0**-148 + (np.abs(exact) * 2 * UNIT if weight_offset else 0)
    lost = np.broadcast_to(lost, exact.shape)
    amax = np.abs(by_group(exact, group)).max(-1)
    allowed = by_group(np.abs(exact) * 0 + lost, group).max(-1) / qmax
    ulps = SCALE_ULP + UNFUSED_ULP * run.unfused
    got = scale.detach().cpu().float().double().numpy().astype(np.longdouble)
    limit = float(torch.finfo(torch.float32).max)
    finite = amax < limit * (1 - 1e-6)
    assert (np.isnan(got) == ~(amax <= limit * (1 + 1e-6)))[finite | (amax > limit * (1 + 1e-6))].all()
    wanted = np.minimum(np.maximum(amax / qmax, 2.0**-126), max_scale)
    error = np.abs(got - wanted)
    bound = ulps * 2.0 ** (np.floor(np.log2(np.where(finite, wanted, 1).astype(float))) - 23) + allowed
    if power_of_two:
        # Up to the next one; where amax / qmax is one, its error decides.
        assert (np.log2(got[finite].astype(float)) % 1 == 0).all()
        assert ((got >= wanted - bound) & (got < 2 * (wanted + bound)) | ~finite).all()
    else:
        assert (error <= bound)[finite].all(), float((error / bound)[finite].max() * ulps)
    divisor = np.repeat(got, group, -1)[..., :hidden]
    with np.errstate(all="ignore"):
        quotient = np.where(np.isnan(divisor), 0, exact / divisor).astype(np.float64)
        room = (np.abs(quotient) * (6 + 2 * run.unfused) * UNIT + np.where(np.isnan(divisor), 0, lost / divisor)).astype(
            np.float64
        )
    codes = values_of(q)
    poisoned = np.isnan(divisor)
    if dtype is torch.int8:
        assert (codes[poisoned] == 0).all()
    else:
        assert np.isnan(codes[poisoned]).all()
    low, high = nearest(quotient - room, dtype), nearest(quotient + room, dtype)
    assert ((low <= codes) & (codes <= high))[~poisoned].all()


OPERATORS = ("forward_quant", "forward_quant_static", "add_forward_quant", "add_forward_quant_static")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"group_size": 64},
    {"group_size": 32, "column_major_scale": True},
    {"group_size": 32, "scale_dtype": torch.float8_e8m0fnu, "column_major_scale": True},
)


def arguments(name: str, x: Tensor, weight: Tensor | None) -> tuple[Any, ...]:
    residual = (x.detach().float() * 0.5,) if name.startswith("add") else ()
    scale = (torch.full((), 0.05, device=x.device),) if name.endswith("static") else ()
    return (x, *residual, weight, *scale, 1e-6)


def call(run: Quantiser, name: str, x: Tensor, weight: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
    if name.endswith("static"):
        options = {key: value for key, value in options.items() if key in ("dtype", "weight_offset", "round_before_weight")}
    outputs = getattr(run.of, name)(*arguments(name, x, weight), **options)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(actual, expected, strict=True):
        if one.dtype.itemsize == 1:
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert torch.equal(bytes_of(one), bytes_of(other))
        else:
            assert_same_bits(one, other)

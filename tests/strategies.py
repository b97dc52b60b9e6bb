"""What Hypothesis draws: problems of every size, dtype, magnitude and option. Elements come from a drawn seed, not one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from rmsnorm_ops.contracts import compute_dtype
from tests.implementations import DTYPES, Implementation
from tests.layouts import LAYOUTS, Layout

# Powers of two, their neighbours, one and two blocks, sizes of real models. The interpreter is slow: nothing wide here.
HIDDEN = (1, 2, 3, 5, 7, 8, 9, 17, 31, 63, 64, 127, 128, 129, 267, 513, 769, 1000, 1023, 1024, 1025, 1536, 2880, 4096, 4097, 5125)
EPS = (0.0, 1e-42, 1e-12, 1e-6, 1e-5, 1.0, 1e4, 1e30)
KINDS = ("normal", "spike", "constant", "wide", "sparse", "extreme", "subnormal")

hiddens = st.one_of(st.sampled_from(HIDDEN), st.integers(1, 300))
seeds = st.integers(0, 2**32 - 1)


def exponents(dtype: torch.dtype) -> tuple[int, int]:
    """Of the smallest subnormal and the largest number."""
    info = torch.finfo(dtype)
    return math.frexp(info.smallest_normal)[1] - 1 + round(math.log2(info.eps)), math.frexp(info.max)[1] - 1


def values(kind: str, shape: tuple[int, ...], dtype: torch.dtype, exponent: int, seed: int) -> Tensor:
    """Finite numbers of ``dtype`` around 2^exponent; wide: any exponent; extreme: ± the largest; subnormal: below the normal."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    low, high = exponents(dtype)
    info = torch.finfo(dtype)
    if kind == "wide":
        result = normal.sign() * torch.exp2(low + (high - low) * uniform)
    elif kind == "extreme":
        result = normal.sign() * info.max
    elif kind == "subnormal":
        result = normal.sign() * (uniform * info.smallest_normal)
    else:
        result = normal.clamp(-6, 6)
        if kind == "constant":
            result = torch.ones_like(normal) * (1 + uniform.flatten()[:1])
        elif kind == "sparse":
            result = torch.where(uniform < 0.9, 0.0, normal)
        elif kind == "spike":
            result = torch.where(torch.arange(shape[-1]) == seed % shape[-1], normal * 2.0**14, normal)
        result = result * 2.0**exponent
    return result.clamp(-info.max, info.max).to(dtype)


@dataclass(frozen=True)
class Case:
    """A call of the forward, printed as what to call ``tensors`` on."""

    layout: Layout
    hidden: int
    dtype: torch.dtype
    kind: str
    exponent: int
    weight_dtype: torch.dtype | None
    weight_kind: str
    weight_exponent: int
    eps: float
    weight_offset: float
    round_before_weight: bool
    seed: int

    @property
    def options(self) -> dict[str, float | bool]:
        return {"weight_offset": self.weight_offset, "round_before_weight": self.round_before_weight}

    def tensors(self, implementation: Implementation) -> tuple[Tensor, Tensor | None]:
        """x in its layout, and weight."""
        avoid_subnormals = not implementation.rounds_to_nearest(torch.bfloat16)
        weight = None
        if self.weight_dtype is not None:
            weight = values(self.weight_kind, (self.hidden,), self.weight_dtype, self.weight_exponent, self.seed + 1)
            # fp64 beyond fp32's range is infinite to an fp32 norm.
            largest = min(torch.finfo(dtype).max for dtype in (compute_dtype(self.dtype), weight.dtype))
            weight = weight.clamp(-largest, largest)
            if avoid_subnormals and weight.dtype is torch.bfloat16:
                weight = torch.where(weight.abs() < torch.finfo(weight.dtype).smallest_normal, 0, weight)

        def fill(*shape: int) -> Tensor:
            dense = torch.empty(shape, dtype=self.dtype)
            if dense.numel():
                dense = values(self.kind, shape, self.dtype, self.exponent, self.seed)
            if avoid_subnormals and self.dtype is torch.bfloat16:
                dense = without_subnormals(dense, weight, self.eps, self.weight_offset)
            return dense.to(implementation.device)

        return self.layout.make(fill, self.hidden), None if weight is None else weight.to(implementation.device)


def without_subnormals(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float) -> Tensor:
    """Zero where an element of x, or y of it, could be subnormal: Triton's interpreter mishandles bf16 subnormals, both in
    its loads and in its stores."""
    if x.numel() == 0:
        return x
    largest = torch.sqrt(x.double().abs().max() ** 2 + eps)
    smallest_weight = 1.0
    if weight is not None:
        factor = (weight.double() + weight_offset).abs()
        smallest_weight = min(1.0, float(factor[factor > 0].min())) if bool((factor > 0).any()) else 1.0
    smallest = x.double().abs() * min(1.0, smallest_weight / float(largest) if largest > 0 else 1.0)
    return torch.where(smallest < 4 * torch.finfo(x.dtype).smallest_normal, 0, x)


@st.composite
def cases(draw: st.DrawFn, layouts: tuple[Layout, ...] = LAYOUTS, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Case:
    dtype = draw(st.sampled_from(dtypes))
    weight_dtype = draw(st.sampled_from((None, *DTYPES)))
    largest_eps = torch.finfo(compute_dtype(dtype)).max
    return Case(
        layout=draw(st.sampled_from(layouts)),
        hidden=draw(hiddens),
        dtype=dtype,
        kind=draw(st.sampled_from(KINDS)),
        exponent=draw(st.one_of(st.just(0), st.integers(*exponents(dtype)))),
        weight_dtype=weight_dtype,
        weight_kind=draw(st.sampled_from(("normal", "normal", "wide", "extreme"))),
        weight_exponent=draw(st.integers(-8, 8)),
        eps=draw(st.one_of(st.sampled_from(EPS), st.floats(0, largest_eps))),
        weight_offset=0.0 if weight_dtype is None else draw(st.sampled_from((0.0, 1.0, -1.0, 0.1))),
        round_before_weight=draw(st.booleans()),
        seed=draw(seeds),
    )

"""Any tensor as rows of ``hidden`` elements: what a kernel needs to find row i, without a copy where strides allow."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from rmsnorm_ops.contracts import FLOATS
from rmsnorm_ops.plan import RowProblem

VECTOR_BYTES = 16  # of the widest load of a thread
_VECTOR = {dtype: VECTOR_BYTES // dtype.itemsize for dtype in FLOATS}  # elements


class Facts(NamedTuple):
    """Of a tensor's rows, what a kernel is compiled for."""

    align: int  # elements that strides are multiples of
    folded: bool  # two strides are needed to reach every row
    aligned_pointer: bool


class Rows(NamedTuple):
    """Row i starts at (i // inner_rows) · outer_stride + (i % inner_rows) · inner_stride, in units of ``facts.align``
    elements; where rows are not ``folded``, one stride reaches each and the outer one is not used."""

    tensor: Tensor | None
    n_rows: int
    strides: tuple[int, int, int]  # inner_rows, outer_stride, inner_stride
    facts: Facts


_FACTS = {fact: Facts(*fact) for fact in product((1, 2, 4, 8), (False, True), (False, True))}
ABSENT = Rows(None, 0, (1, 0, 0), _FACTS[1, False, True])


def rows_of(tensor: Tensor) -> Rows:
    """``tensor`` [..., hidden] as rows. Its last stride must be 1 and its leading dims must collapse to at most two strides:
    a dense tensor, a slice of a fused projection, transposed heads of one sequence, an expanded gradient.
    Anything else is copied once."""
    hidden = tensor.shape[-1]
    outer, outer_stride, inner_stride = 1, 0, hidden
    inner = tensor.numel() // hidden
    if not tensor.is_contiguous():
        leading = collapsed(tensor.shape[:-1], tensor.stride()[:-1])
        if len(leading) > 2 or (tensor.stride(-1) != 1 and hidden > 1):
            tensor = tensor.contiguous()
        else:
            inner, inner_stride = leading[-1]
            if len(leading) == 2:
                outer, outer_stride = leading[0]
    aligned_pointer = tensor.data_ptr() % VECTOR_BYTES == 0
    align = _VECTOR[tensor.dtype]
    # Nor may x promise more than y, whose rows lie hidden apart: the compiler would lay out, and sum, such a row otherwise.
    if not aligned_pointer or (outer_stride | inner_stride | hidden) & (align - 1):
        align = 1
    facts = _FACTS[align, outer > 1, aligned_pointer]
    return Rows(tensor, outer * inner, (inner, outer_stride // align, inner_stride // align), facts)


def collapsed(sizes: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
    """The leading dims as (size, stride) pairs, neighbours merged where one stride spans both. A dim of one row has none."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged or [(1, 0)]


def aligned(weight: Tensor | None) -> Tensor | None:
    """The weight with the alignment its loads are compiled for: that of weight and y fixes the order of a row's sum."""
    if weight is not None and (not weight.is_contiguous() or weight.data_ptr() % VECTOR_BYTES):
        return weight.clone(memory_format=torch.contiguous_format)
    return weight


def problem_of(x: Tensor, other: Tensor | None, loaded: int = 0, weight: int = 0) -> RowProblem:
    """The row of x, beside which a kernel moves ``other``."""
    tensors = (x,) if other is None else (x, other)
    itemsize = max(tensor.element_size() for tensor in tensors)
    return RowProblem(x.shape[-1], itemsize, any(tensor.dtype is torch.float64 for tensor in tensors), loaded, weight)


def dtype_of(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype

"""Any tensor as rows of ``hidden`` elements: what a kernel needs to find row i, without a copy where strides allow."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

VECTOR_BYTES = 16  # of the widest load of a thread


class Rows(NamedTuple):
    """Row i starts at (i // inner_rows) · outer_stride + (i % inner_rows) · inner_stride, strides in units of ``align`` elements.

    ``folded`` is False where one stride reaches every row; the outer one is then not used.
    """

    tensor: Tensor
    n_rows: int
    inner_rows: int
    outer_stride: int
    inner_stride: int
    align: int
    folded: bool
    aligned_pointer: bool


def rows_of(tensor: Tensor) -> Rows:
    """``tensor`` [..., hidden] as rows. Its last stride must be 1 and its leading dims must collapse to at most two strides:
    a dense tensor, a slice of a fused projection, transposed heads, an expanded gradient. Anything else is copied once."""
    hidden = tensor.shape[-1]
    if tensor.is_contiguous():
        leading = [(tensor.numel() // hidden, hidden)]
    else:
        leading = _collapsed(tensor.shape[:-1], tensor.stride()[:-1])
        if len(leading) > 2 or (tensor.stride(-1) != 1 and hidden > 1):
            tensor = tensor.contiguous()
            leading = [(tensor.numel() // hidden, hidden)]
    (outer, outer_stride), (inner, inner_stride) = leading if len(leading) == 2 else ((1, 0), leading[0])
    aligned_pointer = tensor.data_ptr() % VECTOR_BYTES == 0
    align = VECTOR_BYTES // tensor.element_size()
    # Nor may x promise more than y, whose rows lie hidden apart: the compiler would lay out, and sum, such a row otherwise.
    if not aligned_pointer or outer_stride % align or inner_stride % align or hidden % align:
        align = 1
    return Rows(tensor, outer * inner, inner, outer_stride // align, inner_stride // align, align, outer > 1, aligned_pointer)


def _collapsed(sizes: tuple[int, ...], strides: tuple[int, ...]) -> list[tuple[int, int]]:
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

"""The layouts that x comes in, as data: dense tensors, slices, transposes, expansions, of ``hidden`` columns each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

Fill = Callable[..., Tensor]  # fill(*shape): a dense tensor, 16-byte aligned


class Layout(NamedTuple):
    """``make(fill, hidden)`` gives x. ``copied``: its rows cannot be reached by two strides, so the launcher copies it."""

    name: str
    make: Callable[[Fill, int], Tensor]
    copied: bool = False

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


LAYOUTS = (
    Layout("dense", lambda fill, h: fill(3, 4, h)),
    Layout("one dimension", lambda fill, h: fill(h)),
    Layout("six dimensions", lambda fill, h: fill(2, 1, 2, 1, 3, h)),
    Layout("slice of a fused qkv", lambda fill, h: fill(2, 3, 3 * h)[..., h : 2 * h]),
    Layout("odd row stride", lambda fill, h: fill(5, h + 1)[:, :h]),
    Layout("unaligned slice", lambda fill, h: fill(5, h + 3)[:, 1 : h + 1]),
    Layout("unaligned start", lambda fill, h: fill(5 * h + 1)[1:].view(5, h)),
    Layout("every second row", lambda fill, h: fill(10, h)[::2]),
    Layout("one row of many", lambda fill, h: fill(7, h)[3:4]),
    Layout("transposed heads", lambda fill, h: fill(2, 5, 3, h).transpose(1, 2), copied=True),
    Layout("transposed heads of one sequence", lambda fill, h: fill(1, 5, 3, h).transpose(1, 2)),
    Layout("swapped rows", lambda fill, h: fill(3, 4, h).transpose(0, 1)),
    Layout("unaligned swapped rows", lambda fill, h: fill(3, 4, h + 1)[..., 1:].transpose(0, 1)),
    Layout("permuted", lambda fill, h: fill(4, 2, 3, h).permute(2, 1, 0, 3), copied=True),
    Layout("transposed matrix", lambda fill, h: fill(h, 5).t(), copied=True),
    Layout("permuted to the front", lambda fill, h: fill(2, h, 3).permute(2, 0, 1), copied=True),
    Layout("every second column", lambda fill, h: fill(5, 2 * h)[:, ::2], copied=True),
    Layout("expanded rows", lambda fill, h: fill(1, h).expand(5, h)),
    Layout("expanded batch", lambda fill, h: fill(1, 3, h).expand(4, 3, h)),
    Layout("expanded columns", lambda fill, h: fill(5, 1).expand(5, h), copied=True),
    Layout("overlapping windows", lambda fill, h: fill(h + 4).unfold(0, h, 1)),
    Layout("size-1 dim of an odd stride", lambda fill, h: fill(4, h).as_strided((4, 1, h), (h, 7 * h + 5, 1))),
    Layout("zero rows", lambda fill, h: fill(0, 3, h)),
    Layout("zero rows of a slice", lambda fill, h: fill(4, 2, 2 * h)[:0, :, :h]),
)
READ_IN_PLACE = tuple(layout for layout in LAYOUTS if not layout.copied)

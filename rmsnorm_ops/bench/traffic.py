"""Bytes that must move through memory, each operand once, and the arithmetic between. What an operation moves beyond them is
its own fault.

Counts are bytes, FLOPS apart. dtypes are those of x (y, dy and dx share it) and of weight, None where there is no weight: a
weight is read once a call, for it stays in cache from the first row on.
"""

from __future__ import annotations

import torch

OPERATIONS = ("forward", "add_forward", "backward", "forward+backward")
# Those whose y is quantised to a byte an element: what they are beside that, and the elements that share a scale (None: a row).
QUANTISED: dict[str, tuple[str, int | None]] = {
    "forward_quant": ("forward", None),
    "forward_quant_128": ("forward", 128),
    "add_forward_quant": ("add_forward", None),
}

# fp32 operations an element; those of which there is one a row are left out.
# forward: square and add, times rstd, times weight. add_forward: one addition more.
# backward: h = dy · weight (1); Σx² and Σh·x (4); dx = rstd · (h − x · c) (3); dweight += dy · (x · rstd) (3).
# quantised: amax (1), saturation (2), the quotient (10).
FLOPS = {"forward": 4, "add_forward": 5, "backward": 11, "forward+backward": 15}
FLOPS |= {name: FLOPS[base] + 13 for name, (base, _) in QUANTISED.items()}


def moved(operation: str, rows: int, hidden: int, x: torch.dtype, weight: torch.dtype | None = None) -> int:
    """Bytes of ``operation``, with a residual of x's dtype. Forward and backward are two passes: x is read in both."""
    if operation in QUANTISED:
        base, group = QUANTISED[operation]
        scales = rows * (1 if group is None else -(-hidden // group))
        return moved(base, rows, hidden, x, weight) - rows * hidden * (x.itemsize - 1) + 4 * scales
    if operation == "add_forward":
        return add_forward(rows, hidden, x, x, weight)
    total = forward(rows, hidden, x, weight) if operation.startswith("forward") else 0
    return total + (backward(rows, hidden, x, weight) if operation.endswith("backward") else 0)


def intensity(operation: str, moved_bytes: int, elements: int) -> float:
    """Arithmetic intensity of ``operation``, in FLOP a byte."""
    return FLOPS[operation] * elements / moved_bytes


def copy(elements: int, dtype: torch.dtype) -> int:
    """Bytes of ``y.copy_(x)``: read x, write y."""
    return 2 * elements * dtype.itemsize


def forward(rows: int, hidden: int, x: torch.dtype, weight: torch.dtype | None = None) -> int:
    """Bytes of a forward: read x and weight, write y."""
    return 2 * rows * hidden * x.itemsize + _row(hidden, weight)


def add_forward(rows: int, hidden: int, x: torch.dtype, residual: torch.dtype, weight: torch.dtype | None = None) -> int:
    """Bytes of a forward with a fused residual add: read x, residual and weight, write y and residual_out."""
    return 2 * rows * hidden * (x.itemsize + residual.itemsize) + _row(hidden, weight)


def backward(rows: int, hidden: int, x: torch.dtype, weight: torch.dtype | None = None, *, dweight: bool = True) -> int:
    """Bytes of a backward: read x, dy and weight, write dx and, where ``dweight`` and there is a weight, dweight."""
    return 3 * rows * hidden * x.itemsize + _row(hidden, weight) * (2 if dweight else 1)


def gigabytes_per_second(moved_bytes: float, microseconds: float) -> float:
    """Speed in GB/s, decimal: 10⁹ bytes a second."""
    return moved_bytes / microseconds / 1e3


def _row(hidden: int, dtype: torch.dtype | None) -> int:
    """Bytes of one vector of ``hidden`` elements, 0 where it is absent."""
    return 0 if dtype is None else hidden * dtype.itemsize

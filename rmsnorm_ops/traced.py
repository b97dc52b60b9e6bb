"""The launches as a compiler sees them: Triton kernels in the graph that it traces. Importing this module imports triton.

The launchers build the launch that an eager call makes (kernel, plan, constants, order of arguments) and pass it to ``launch``
here, which records it. What they ask of a tensor's address they ask here too: a traced tensor has none.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from rmsnorm_ops import executors, launch_backward, plan, rows
from rmsnorm_ops import launch as launch_forward
from rmsnorm_ops.kernels import backward, forward
from rmsnorm_ops.prepared import Prepared
from rmsnorm_ops.rows import VECTOR_BYTES, Facts, Rows

minimum = torch.sym_min


class Opaque(Exception):
    """This call is better left to the operator: the graph keeps one node of it."""


def rows_of(tensor: Tensor) -> Rows:
    """``rows.rows_of``, for rows that every compiler lays out alike: their strides promise what those of y do, no more.

    Inductor tells Triton what integers are divisible by, which an eager launch does not. Where hidden, and with it y, allows
    wide loads the strides must too; where not, x must be as dense as y.
    """
    hidden, align = tensor.shape[-1], VECTOR_BYTES // tensor.element_size()
    if not _multiple(tensor.storage_offset(), align):
        raise Opaque
    if tensor.is_contiguous():
        align = align if hidden % align == 0 else 1
        n_rows = tensor.numel() // hidden
        return Rows(tensor, n_rows, (n_rows, 0, hidden // align), Facts(align, False, True))
    leading = rows.collapsed(tensor.shape[:-1], tensor.stride()[:-1])
    strides = [stride for _, stride in leading]
    if len(leading) > 2 or not statically_known_true(tensor.stride(-1) == 1):
        raise Opaque
    if hidden % align or not all(_multiple(stride, align) for stride in strides):
        raise Opaque
    inner, inner_stride = leading[-1]
    outer, outer_stride = leading[0] if len(leading) == 2 else (1, 0)
    return Rows(
        tensor, outer * inner, (inner, outer_stride // align, inner_stride // align), Facts(align, len(leading) == 2, True)
    )


def aligned(weight: Tensor | None) -> Tensor | None:
    """A weight that is where its loads are compiled for."""
    if weight is not None and not (
        weight.is_contiguous() and _multiple(weight.storage_offset(), VECTOR_BYTES // weight.element_size())
    ):
        raise Opaque
    return weight


def launch(prepared: Prepared, x: Any, y: Any, arguments: tuple[Any, ...]) -> None:
    """Record the launch of ``x`` by ``y`` programs. Programs that wait for one another need a launch that cannot be."""
    # Nor can an option but the warps: that products and sums are fused must be the default, as it is up to triton 3.9.
    if prepared.plan.slices > 1 or not executors.HOLDS_COMPILED:
        raise Opaque
    options = {"num_warps": prepared.plan.warps}
    torch.library.wrap_triton(prepared.kernel)[(x, y)](*arguments, *prepared.constants, **options)


def constant_hidden(tensors: tuple[Any, ...]) -> list[Any]:
    """The tensors, with a last dimension that is a number to Python too."""
    found = []
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            if free_unbacked_symbols(tensor):
                raise Opaque
            hidden = tensor.shape[-1]
            if not isinstance(hidden, int):
                constant = hidden.node.maybe_as_int()
                if constant is None:
                    raise Opaque
                tensor = tensor.view(*tensor.shape[:-1], constant)
        found.append(tensor)
    return found


def _multiple(number: Any, of: int) -> bool:
    return bool(statically_known_true(number % of == 0))


# What launches are made of beside the kernels themselves: a graph that was compiled by another version of it is stale.
PLANS = tl.constexpr(
    hashlib.sha256("".join(map(inspect.getsource, (plan, rows, launch_forward, launch_backward))).encode()).hexdigest()
)


@triton.jit
def keyed_by_plans():  # type: ignore[no-untyped-def]
    """Never launched: Inductor keys its cache by the source of kernels and of the constants that they name."""
    tl.static_assert(PLANS != "")


_LAUNCHED = (
    forward.resident_forward,
    forward.streamed_forward,
    backward.resident_backward,
    backward.streamed_backward,
    backward.weight_gradient,
    backward.sum_partials,
)


def cache_key() -> Iterator[Any]:
    """The kernels that an operator may launch, its gradient's included, for the key of Inductor's cache."""
    for kernel in (*_LAUNCHED, keyed_by_plans):
        if isinstance(kernel, triton.JITFunction):  # not where they are interpreted
            yield kernel

"""Sharding rules for DTensor: tensor parallel, sequence parallel and whatever else is made of DTensors.

Rows are independent, so a tensor that is sharded over any dimension but the last is normed where it lies, without
communication; dweight is then each rank's part of a sum, a Partial that DTensor reduces where it is needed. A row is normed
whole: x that is sharded over hidden is gathered first. The weight is replicated. torch.distributed.tensor takes half a second
to import, so the rules are registered when the first DTensor comes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

# For each operator the roles of its tensors and of its results: "x" has x's shape, "w" is the weight or its gradient.
_ROLES = {
    "forward": ("xw", "x"),
    "add_forward": ("xxw", "xx"),
    "backward": ("xxw", "xw"),
    "backward_input": ("xxw", "x"),
    "add_backward": ("xxxw", "xxw"),
    "add_backward_input": ("xxxw", "xx"),
}


def register_if_loaded() -> None:
    """Register the rules where there may be a DTensor at all. Called for whatever is no plain tensor."""
    if "torch.distributed.tensor" in sys.modules:
        register_rules()


@cache
def register_rules() -> None:
    """Tell DTensor how the operators are sharded."""
    from torch.distributed.tensor.experimental import register_sharding

    for name, (arguments, results) in _ROLES.items():
        register_sharding(getattr(torch.ops.rmsnorm, name).default)(_rule(arguments, results))


def _rule(arguments: str, results: str) -> Callable[..., Any]:
    """What DTensor asks: for one dimension of a mesh, every (placements of results, placements of arguments) there is."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    def rule(*args: Any, dx_dtype: torch.dtype | None = None, **options: Any) -> list[tuple[list[Any], list[Any]]]:
        given = [arg is not None for arg in args[: len(arguments)]]
        x = args[arguments.rindex("x")]
        # dresidual is empty where dx serves both: it has no rows to shard.
        both = arguments == "xxxw" and dx_dtype in (None, x.tensor_meta.dtype)
        scalars = [None] * (len(args) - len(arguments))

        def case(rows: Any, sums: Any) -> tuple[list[Any], list[Any]]:
            placed = {"x": rows, "w": Replicate()}
            outputs = [rows if role == "x" else sums for role in results]
            if both:
                outputs[1] = Replicate()
            return outputs, [placed[role] if there else None for role, there in zip(arguments, given, strict=True)] + scalars

        return [case(Replicate(), Replicate()), *(case(Shard(dim), Partial()) for dim in range(x.ndim - 1))]

    return rule

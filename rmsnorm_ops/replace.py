"""Swap the norms of a model for this library's, after finding out by trial what each of them computes."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rmsnorm_ops import plain
from rmsnorm_ops.module import RMSNorm

_PROBE_ROWS = 64
# Of bf16 elements that must be equal. Another convention differs in a third of them or more; the same one, computed in
# another order, in one of thousands.
_PROBE_MATCH = 0.98


class Replacement(NamedTuple):
    """What ``replace_rms_norm`` did: module names to the norms now there, and to the reasons others were left alone."""

    replaced: dict[str, RMSNorm]
    left: dict[str, str]


def replace_rms_norm(model: torch.nn.Module) -> Replacement:
    """Replace every RMS norm inside ``model`` by a ``rmsnorm_ops.RMSNorm`` that shares its parameter, in place.

    Candidates are torch.nn.RMSNorm modules, and modules with ``weight`` and ``variance_epsilon`` or ``eps`` whose class name
    ends in RMSNorm, as in Hugging Face's transformers. What such a class computes is found by trial: its forward runs on a
    fixed bf16 input with a weight that tells the conventions apart (weight or 1 + weight; rounded before the weight or
    only after), and exactly one of them must reproduce the result. A norm that none or several do is left alone, as is one
    with hooks, or with parameters, buffers or submodules beside its weight.

    Args:
        model: changed in place; a module that is itself a norm has no parent to be replaced in and is left.

    Returns:
        Replacement(replaced, left): both by module name.
    """
    found = Replacement({}, {})
    made: dict[torch.nn.Module, RMSNorm | str] = {}
    for parent_name, parent in list(model.named_modules(remove_duplicate=False)):
        for child_name, child in list(parent.named_children()):
            name = f"{parent_name}.{child_name}" if parent_name else child_name
            if not _is_candidate(child):
                continue
            new = made[child] = made[child] if child in made else _equivalent(child)
            if isinstance(new, RMSNorm):
                setattr(parent, child_name, new)
                found.replaced[name] = new
            else:
                found.left[name] = new
    if _is_candidate(model):
        found.left[""] = "it is the model itself: there is no parent to replace it in"
    return found


def _is_candidate(module: torch.nn.Module) -> bool:
    if isinstance(module, RMSNorm):
        return False
    named = type(module).__name__.endswith("RMSNorm") and hasattr(module, "weight") and _eps(module) is not None
    return isinstance(module, torch.nn.RMSNorm) or named


def _eps(module: torch.nn.Module) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _equivalent(module: torch.nn.Module) -> RMSNorm | str:
    """The norm that computes what ``module`` does, or why there is none."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return "it has hooks"
    own = [name for name, _ in module.named_parameters()] + [name for name, _ in module.named_buffers()]
    if own not in ([], ["weight"]) or list(module.children()):
        return f"it holds more than a weight: {', '.join(own + [name for name, _ in module.named_children()])}"
    if type(module) is torch.nn.RMSNorm:
        return _sharing(module, module.normalized_shape, module.eps, 0.0, False)
    weight = module.weight
    if not isinstance(weight, torch.nn.Parameter) or weight.dim() != 1:
        return "its weight is not a parameter of one dimension"
    if _eps(module) is None:
        return "its eps is None, whose meaning is its own"
    return _matching(module, weight)


def _matching(module: torch.nn.Module, weight: torch.nn.Parameter) -> RMSNorm | str:
    """``module``'s convention, found by running it."""
    hidden, eps = weight.shape[0], float(_eps(module))
    x, probe = _probe(hidden, eps)
    twin = copy.deepcopy(module)
    twin.weight = torch.nn.Parameter(probe.clone(), requires_grad=False)
    try:
        with torch.no_grad():
            result = twin(x.clone())
    except Exception as error:
        return f"its forward did not run on one tensor ({type(error).__name__}: {error})"
    if not isinstance(result, Tensor) or result.shape != x.shape or result.dtype is not x.dtype:
        return "its forward does not return one tensor of its input's shape and dtype"
    matches = [
        (offset, rounded)
        for offset in (0.0, 1.0)
        for rounded in (False, True)
        if _share_equal(result, plain.forward(x, probe, eps, weight_offset=offset, round_before_weight=rounded)) >= _PROBE_MATCH
    ]
    if len(matches) != 1:
        return f"{'no' if not matches else 'more than one'} convention reproduces what it computes"
    return _sharing(module, (hidden,), eps, *matches[0])


def _probe(hidden: int, eps: float) -> tuple[Tensor, Tensor]:
    """bf16 rows, half of them so small that eps decides their scale, and a weight far from 0, 1 and −1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_PROBE_ROWS, hidden, generator=generator)
    x[_PROBE_ROWS // 2 :] *= max(eps, 1e-12) ** 0.5
    weight = 0.25 + torch.rand(hidden, generator=generator)
    return x.bfloat16(), weight.bfloat16()


def _share_equal(result: Tensor, expected: Tensor) -> float:
    return (result == expected).float().mean().item()


def _sharing(
    module: torch.nn.Module, shape: tuple[int, ...], eps: float | None, weight_offset: float, round_before_weight: bool
) -> RMSNorm:
    """A norm with ``module``'s parameter, not a copy of it."""
    weight = module.weight
    norm = RMSNorm(
        list(shape), eps, weight is not None, device="meta", weight_offset=weight_offset,
        round_before_weight=round_before_weight,
    )  # fmt: skip
    if weight is not None:
        norm.weight = weight  # type: ignore[assignment]
    return norm.train(module.training)

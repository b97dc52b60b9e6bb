"""Swap the norms of a model for this library's, after finding out by trial what each of them computes."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rmsnorm_ops import plain
from rmsnorm_ops.contracts import FLOATS
from rmsnorm_ops.module import RMSNorm

# (weight_offset, round_before_weight) of the norms that there are.
_CONVENTIONS = ((0.0, False), (0.0, True), (1.0, False), (1.0, True))
# A probe has at least this many elements, so that few of a small hidden do not decide by chance, and some rows in any case.
_PROBE_ELEMENTS, _PROBE_ROWS = 4096, 2
# The share of the probe's bf16 elements that must be equal. Over hidden 1 … 16384 and eps 0 … 1 the right convention, with
# rsqrt, sqrt or pow, agreed in 0.998 of them or more, and the next closest in at most 0.78 (at hidden 1 with eps = 0, where
# x · rstd is ±1 and there is nothing to round, in all).
_PROBE_MATCH = 0.97
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


class Replacement(NamedTuple):
    """What ``replace_rms_norm`` did: module names to the norms now there, and to the reasons others were left alone."""

    replaced: dict[str, RMSNorm]
    left: dict[str, str]


def replace_rms_norm(model: torch.nn.Module) -> Replacement:
    """Replace every RMS norm inside ``model`` by a ``rmsnorm_ops.RMSNorm`` that shares its parameter, in place.

    Candidates are torch.nn.RMSNorm modules, and modules whose class name ends in RMSNorm, as in Hugging Face's transformers.
    Of the latter those with ``weight`` and ``variance_epsilon`` or ``eps`` can be replaced. What such a class computes is
    found by trial: a copy of it runs on the CPU, on a fixed bf16 input with a bf16 weight that tells the conventions apart
    (weight or 1 + weight; rounded before the weight or only after), and exactly one of them must reproduce the result. A norm
    that none or several do is left alone, as is one with hooks, with a forward that takes more than one tensor, or with
    parameters, buffers or submodules beside its weight. Nothing runs on the model's own device, and meta weights will do.

    The new norm returns x's dtype whatever the weight's. Of the old ones, those that round before the weight mostly return
    the wider of the two: with an fp32 weight and bf16 x (a q norm under autocast) fp32, where the new one rounds once more.

    An optimizer, a tied parameter, ``requires_grad`` and ``training`` stay as they are. A norm that is registered twice gets
    one new norm in both places. Of a block that stands in two places only the first name is reported, as in
    ``model.named_modules()``. A second call replaces nothing.

    Args:
        model: changed in place; a module that is itself a norm has no parent to be replaced in and is left.

    Returns:
        Replacement(replaced, left): both by module name.
    """
    found = Replacement({}, {})
    if _is_candidate(model):
        found.left[""] = "it is the model itself: there is no parent to replace it in"
    made: dict[torch.nn.Module, RMSNorm | str] = {}
    for parent_name, parent in list(model.named_modules()):
        # Not named_children(), which names a child that the parent has twice only once.
        for child_name, child in list(parent._modules.items()):
            if child is None or not _is_candidate(child):
                continue
            new = made[child] = made.get(child) or _equivalent(child)
            name = f"{parent_name}.{child_name}" if parent_name else child_name
            if isinstance(new, RMSNorm):
                setattr(parent, child_name, new)
                found.replaced[name] = new
            else:
                found.left[name] = new
    return found


def _is_candidate(module: torch.nn.Module) -> bool:
    named = type(module).__name__.endswith("RMSNorm")
    return not isinstance(module, RMSNorm) and (named or isinstance(module, torch.nn.RMSNorm))


def _equivalent(module: Any) -> RMSNorm | str:
    """The norm that computes what ``module`` does, or why there is none."""
    reason = _obstacle(module)
    if reason:
        return reason
    if type(module).forward is torch.nn.RMSNorm.forward:
        return _sharing(module, module.normalized_shape, module.eps, 0.0, False)
    hidden, eps = module.weight.shape[0], float(_eps(module))
    x, probe = _probe(hidden, eps)
    conventions = set(_CONVENTIONS)
    for training in (True, False):
        try:
            result = _run(module, x, probe, training)
        except Exception as error:  # it is not ours, so it may raise anything
            return f"its forward failed on a [batch, rows, hidden] tensor ({type(error).__name__}: {error})"
        if not isinstance(result, Tensor) or result.shape != x.shape or result.dtype is not x.dtype:
            return "its forward does not return one tensor of its input's shape and dtype"
        conventions = {one for one in conventions if _reproduces(result, x, probe, eps, *one)}
    if len(conventions) != 1:
        return f"{'more than one' if conventions else 'no'} convention reproduces what it computes"
    return _sharing(module, (hidden,), eps, *conventions.pop())


def _obstacle(module: Any) -> str | None:
    """Why ``module`` cannot be replaced whatever it computes, or None."""
    if any(getattr(module, hooks, None) for hooks in _HOOKS):
        return "it has hooks"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    own = [name for name, _ in module.named_parameters()] + [name for name, _ in module.named_buffers()]
    own += [name for name, _ in module.named_children()]
    if own not in ([], ["weight"]):
        return f"it holds more than a weight: {', '.join(own)}"
    weight = getattr(module, "weight", None)
    if weight is not None and (not isinstance(weight, torch.nn.Parameter) or weight.dtype not in FLOATS):
        return "its weight is not a parameter of dtype float16, bfloat16, float32 or float64"
    if type(module).forward is torch.nn.RMSNorm.forward:
        return None
    if weight is None:
        return "it has no weight, which would say over how many elements it norms"
    if weight.dim() != 1 or weight.shape[0] == 0:
        return f"its weight must have one dimension and an element, and has shape {tuple(weight.shape)}"
    eps = _eps(module)
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < math.inf:
        return f"its variance_epsilon or eps must be a finite number that is not negative, and is {eps}"
    parameters = list(inspect.signature(module.forward).parameters.values())
    if len(parameters) != 1 or parameters[0].kind not in (parameters[0].POSITIONAL_ONLY, parameters[0].POSITIONAL_OR_KEYWORD):
        return f"its forward must take one argument, and takes {', '.join(one.name for one in parameters) or 'none'}"
    return None


def _eps(module: torch.nn.Module) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _probe(hidden: int, eps: float) -> tuple[Tensor, Tensor]:
    """bf16 x [2, rows, hidden], half of its rows so small that eps decides their scale, and a weight far from 0 and ±1.

    Three dimensions, so that a norm over any but the last gives something else.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    rows = max(_PROBE_ROWS, _PROBE_ELEMENTS // (2 * hidden)) + 1  # one more, for rows not to be hidden
    x = torch.randn(2, rows, hidden, generator=generator, dtype=torch.float32, device="cpu")
    x[1] *= max(eps, 1e-12) ** 0.5
    weight = 0.3 + 1.4 * torch.rand(hidden, generator=generator, dtype=torch.float32, device="cpu")
    # Both signs, for a norm that takes |weight|.
    weight[1::2] *= -1
    # With its last bit set, 1 + weight has no exact bf16 for a positive one: a norm that adds in bf16 shows.
    return x.bfloat16(), (weight.bfloat16().view(torch.int16) | 1).view(torch.bfloat16)


@torch.no_grad()
def _run(module: Any, x: Tensor, weight: Tensor, training: bool) -> Any:
    """What a copy of ``module`` with another weight makes of ``x``. Its own weight is not copied, nor read."""
    probe = torch.nn.Parameter(weight.clone(), requires_grad=False)
    twin = copy.deepcopy(module, {id(module.weight): probe})
    return twin.train(training)(x.clone())


def _reproduces(result: Tensor, x: Tensor, weight: Tensor, eps: float, weight_offset: float, round_before_weight: bool) -> bool:
    """Whether that convention gives ``result``: to the bit nearly everywhere, and within two roundings in each element."""
    expected = plain.forward(x, weight, eps, weight_offset=weight_offset, round_before_weight=round_before_weight)
    share = (result == expected).float().mean().item()
    return share >= _PROBE_MATCH and torch.allclose(result, expected, rtol=2 * torch.finfo(x.dtype).eps, atol=0.0)


def _sharing(module: Any, shape: tuple[int, ...], eps: float | None, weight_offset: float, round_before_weight: bool) -> RMSNorm:
    """A norm with ``module``'s parameter, not a copy of it."""
    weight = module.weight
    norm = RMSNorm(
        list(shape), eps, weight is not None, device="meta", weight_offset=weight_offset,
        round_before_weight=round_before_weight,
    )  # fmt: skip
    if weight is not None:
        norm.weight = weight
    return norm.train(module.training)

"""Is an answer right enough to be worth timing? A loose look at every element, in fp64 on the device, at the size that is timed:
what an implementation does may depend on it. How accurate the operators are is check's business.

The formula is the one of reference.py, which in extended precision on the CPU would take minutes at these sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rmsnorm_ops.bench import traffic
from rmsnorm_ops.bench.problem import Inputs, Problem

OUTPUTS = {
    "forward": ("y",),
    "add_forward": ("y", "residual_out"),
    "backward": ("dx", "dweight"),
    "forward+backward": ("y", "dx", "dweight"),
}
# Of the largest value in the row (of dweight: at all), in units of the dtype's spacing at 1: room for implementations that round
# before the weight, or whose fp32 sums are simple.
ALLOWED_ULP = {torch.float16: 4, torch.bfloat16: 4, torch.float32: 64, torch.float64: 64}
# A code of e4m3 is off by up to 2⁻⁵ of the largest, which is the last code but one's distance from it, by half; twice that.
QUANTISED_ALLOWED = 2.0**-4
CHUNK = 2**22  # elements: fp64 copies of the whole would not fit


def wrong(problem: Problem, inputs: Inputs, results: object) -> str:
    """What is wrong with the ``results`` of ``problem``, in one sentence; empty where nothing is."""
    quantised = problem.operation in traffic.QUANTISED
    operation, group = traffic.QUANTISED.get(problem.operation, (problem.operation, None))
    if quantised:
        results = _dequantised(results, group or problem.case.hidden, problem.dtype)
    outputs = results if isinstance(results, tuple) else (results,)
    names = [name for name in OUTPUTS[operation] if name != "dweight" or inputs.weight is not None]
    if len(outputs) != len(names):
        return f"{', '.join(names)} must be {len(names)} tensors, got {len(outputs)}"
    for name, output in zip(names, outputs, strict=True):
        like = inputs.weight if name == "dweight" else inputs.x
        if like is None or not isinstance(output, Tensor) or output.shape != like.shape or output.dtype != like.dtype:
            return f"{name} has another shape or dtype than {'weight' if name == 'dweight' else 'x'}"
    largest = _largest_errors(problem, inputs, dict(zip(names, outputs, strict=True)))
    for name, error in largest.items():
        allowed = ALLOWED_ULP[problem.dtype] * torch.finfo(problem.dtype).eps
        if quantised and name == "y":
            allowed = QUANTISED_ALLOWED
        if not error <= allowed:
            return f"{name} is off by {error:.2g} of the largest value of its row, {allowed:.2g} are allowed"
    return ""


def _dequantised(results: object, group: int, dtype: torch.dtype) -> object:
    """(y, …) of (q, scale, …), or of anything else what it is."""
    if not isinstance(results, tuple) or len(results) < 2 or not all(isinstance(output, Tensor) for output in results):
        return results
    q, scale, *others = results
    y = torch.empty(q.shape, dtype=dtype, device=q.device)
    for index in range(scale.shape[-1]):
        columns = slice(index * group, (index + 1) * group)
        y[..., columns] = q[..., columns].float() * scale[..., index : index + 1]
    return (y, *others)


def _largest_errors(problem: Problem, inputs: Inputs, outputs: dict[str, Tensor]) -> dict[str, float]:
    """The largest error of each output, as a fraction of the largest value of its row."""
    errors: dict[str, float] = {}
    dweight = torch.zeros(problem.case.hidden, dtype=torch.float64, device=problem.device)
    for rows, exact in _exact(problem, inputs):
        dweight += exact.pop("dweight", 0)
        for name, value in exact.items():
            if name in outputs:
                got = _rows(outputs[name])[rows].double()
                errors[name] = max(errors.get(name, 0.0), _error(got, value))
    if "dweight" in outputs:
        errors["dweight"] = _error(outputs["dweight"].double(), dweight)
    return errors


def _error(got: Tensor, exact: Tensor) -> float:
    """The largest error by the largest value of the last dimension; infinite where anything is NaN."""
    scale = exact.abs().amax(-1, keepdim=True).clamp_min(1e-300)
    return float(((got - exact).abs() / scale).nan_to_num(nan=torch.inf).max())


def _exact(problem: Problem, inputs: Inputs) -> Iterator[tuple[slice, dict[str, Tensor]]]:
    """The exact outputs of some rows at a time, with those rows' part of dweight."""
    step = max(1, CHUNK // problem.case.hidden)
    tensors = [None if tensor is None else _rows(tensor) for tensor in (inputs.x, inputs.residual, inputs.dy)]
    for start in range(0, problem.rows, step):
        rows = slice(start, start + step)
        yield rows, _exact_rows(problem, [None if tensor is None else tensor[rows] for tensor in tensors], inputs.weight)


def _exact_rows(problem: Problem, rows: Sequence[Tensor | None], weight: Tensor | None) -> dict[str, Tensor]:
    x, residual, dy = rows
    assert x is not None
    stored = x if residual is None else (x.double() + residual.double()).to(residual.dtype)  # which the norm takes
    wide = stored.double()
    # Scaled, for magnitudes whose squares leave the range of fp64.
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(1e-300)
    rstd = ((wide / scale).square().mean(-1, keepdim=True) + problem.case.eps / scale / scale).rsqrt() / scale
    normalised = wide * rstd
    factor = 1.0 if weight is None else weight.double() + problem.case.weight_offset
    exact = {"y": normalised * factor, "residual_out": wide}
    if dy is not None:
        h = dy.double() * factor
        exact["dx"] = rstd * (h - normalised * (h * normalised).mean(-1, keepdim=True))
        exact["dweight"] = (dy.double() * normalised).sum(0)
    return exact


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])

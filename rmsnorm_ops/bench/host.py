"""What an eager call costs the host: µs until it returns, whatever the GPU then does.

Samples of a few dozen calls, by the host's clock, interleaved between providers. The GPU's queue is drained between samples and
never full, so no call waits for it. On the CPU there is no such difference: the work is in the time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rmsnorm_ops.bench import problem as problems
from rmsnorm_ops.bench import timing, verify
from rmsnorm_ops.bench.cases import Case
from rmsnorm_ops.bench.measure import Status
from rmsnorm_ops.bench.problem import Inputs, Problem
from rmsnorm_ops.bench.providers import Call, Provider
from rmsnorm_ops.bench.timing import Timing, one_line

CASE = Case("host 4 × 1024", "so small that the host is what takes time", 4, 1024, few=True)
MODES = ("no grad", "grad", "forward+backward")
# A GPU queues about a thousand launches before the host must wait; no call here makes more than ten.
CALLS, ROUNDS = 40, 51


@dataclass(frozen=True)
class HostTime:
    """µs of one provider's eager call in one of MODES, or the reason why there is none."""

    provider: str
    mode: str
    dtype: torch.dtype
    device: torch.device
    status: Status
    time: Timing | None
    reason: str = ""


def measure(
    providers: Sequence[Provider], dtype: torch.dtype, device: torch.device, *, rounds: int = ROUNDS, calls: int = CALLS
) -> list[HostTime]:
    """Time the eager calls of ``providers`` against each other, mode by mode."""
    for provider in providers:
        provider.reset()
    results = []
    for mode in MODES:
        with torch.set_grad_enabled(mode != "no grad"):
            prepared = {provider.name: _prepared(provider, mode, dtype, device) for provider in providers}
            ready = {name: call for name, (_, _, call) in prepared.items() if call is not None}
            times = _interleaved(ready, device, rounds, calls)
        for name, (status, reason, _) in prepared.items():
            results.append(HostTime(name, mode, dtype, device, status, times.get(name), reason))
    return results


def _prepared(provider: Provider, mode: str, dtype: torch.dtype, device: torch.device) -> tuple[Status, str, Call | None]:
    """A call that has run once and given the right answer."""
    operation = mode if mode == "forward+backward" else "forward"
    problem = Problem(operation, CASE, dtype, device, CASE.rows)
    refusal = provider.refuses(problem)
    if refusal:
        return "unsupported", refusal, None
    try:
        inputs = problems.operands(problem, seed=0)
        call = _call(provider, mode, inputs)
        results = call()
        with torch.no_grad():
            wrong = verify.wrong(problem, inputs, results)
    except Exception as error:  # whatever it is, the others are still compared
        return "failed", one_line(error), None
    return ("wrong", wrong, None) if wrong else ("timed", "", call)


def _call(provider: Provider, mode: str, inputs: Inputs) -> Call:
    """The eager call as a user writes it, in the caller's grad mode."""
    leaves = [tensor.detach().requires_grad_(mode != "no grad") for tensor in inputs[:2] if tensor is not None]
    x, weight = leaves
    if mode != "forward+backward":
        return lambda: provider.norm(x, weight, CASE)
    assert inputs.dy is not None
    dy = inputs.dy.clone() if provider.overwrites_dy else inputs.dy

    def call() -> tuple[torch.Tensor, ...]:
        y = provider.norm(x, weight, CASE)
        return (y, *torch.autograd.grad(y, leaves, dy))

    return call


def _interleaved(calls: dict[str, Call], device: torch.device, rounds: int, repeats: int) -> dict[str, Timing]:
    drain = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    samples: dict[str, list[float]] = {name: [] for name in calls}
    collecting = gc.isenabled()
    gc.disable()  # it would strike some samples and not others
    try:
        for number in range(rounds + 1):
            for name in list(calls) if number % 2 else reversed(calls):
                drain()
                samples[name].append(_sample(calls[name], repeats))
            drain()
    finally:
        if collecting:
            gc.enable()
    return {name: timing.summary(values[1:]) for name, values in samples.items()}  # the first round warms up


def _sample(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) * 1e6 / repeats

"""A problem put to several providers in one run, with a copy: each answer looked at first, then all timed together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from rmsnorm_ops.bench import problem as problems
from rmsnorm_ops.bench import timing, traffic, verify
from rmsnorm_ops.bench.problem import Inputs, Problem
from rmsnorm_ops.bench.providers import Call, Provider
from rmsnorm_ops.bench.timing import Timing, one_line

ROUNDS = {"cuda": 9, "cpu": 5}
Status = Literal["timed", "unsupported", "failed", "wrong"]


@dataclass(frozen=True)
class Measurement:
    """The time of one provider on a problem, and of a copy of x in the same run; or the reason why there is none."""

    problem: Problem
    provider: str
    status: Status
    time: Timing | None
    copy: Timing  # the faster of a memcpy and an elementwise kernel
    reason: str = ""

    @property
    def spread(self) -> float:
        """Half the distance between the bounds of the middle three fifths of the samples, by their median."""
        return 0.0 if self.time is None else (self.time.high_us - self.time.low_us) / self.time.median_us / 2

    @property
    def gb_s(self) -> float | None:
        """Of the bytes that must move, in 10⁹ a second."""
        if self.time is None:
            return None
        return traffic.gigabytes_per_second(self.problem.moved_bytes, self.time.median_us)

    @property
    def copy_gb_s(self) -> float:
        return traffic.gigabytes_per_second(self.problem.copy_bytes, self.copy.median_us)

    @property
    def fraction(self) -> float | None:
        """Of the copy's speed, each by the bytes that it had to move."""
        return None if self.gb_s is None else self.gb_s / self.copy_gb_s


def measure(problem: Problem, providers: Sequence[Provider], *, rounds: int | None = None) -> list[Measurement]:
    """Put ``problem`` to ``providers``. What one of them raises is its result, not an end of the run."""
    inputs = [problems.operands(problem, seed) for seed in range(problem.sets)]
    verdicts: dict[str, tuple[Status, str]] = {}
    calls: dict[str, list[Call]] = {}
    for provider in providers:
        provider.reset()
        status, reason, bound = _prepared(problem, provider, inputs)
        verdicts[provider.name] = (status, reason)
        if status == "timed":
            calls[provider.name] = bound
    failed: dict[str, str] = {}
    times, copy = time_with_copy(calls, inputs, problem.device, rounds=rounds, failed=failed)
    for name, reason in failed.items():
        verdicts[name] = ("failed", reason)
    return [Measurement(problem, p.name, verdicts[p.name][0], times.get(p.name), copy, verdicts[p.name][1]) for p in providers]


def time_with_copy(
    calls: dict[str, list[Call]],
    inputs: Sequence[Inputs],
    device: torch.device,
    *,
    rounds: int | None = None,
    failed: dict[str, str] | None = None,
) -> tuple[dict[str, Timing], Timing]:
    """The times of ``calls``, and of a copy of x, in one run."""
    # A copy's speed is that of the faster way to move its bytes. In a graph copy_ is a memcpy node, which on an H200 may reach
    # two thirds of what an elementwise kernel does.
    copies: dict[str, list[Call]] = {
        "memcpy": [partial(torch.empty_like(one.x).copy_, one.x) for one in inputs],
        "kernel": [partial(torch.neg, one.x) for one in inputs],
    }
    rounds = ROUNDS[device.type] if rounds is None else rounds
    times = timing.time_together(copies | calls, device, rounds=rounds, failed=failed)
    copy = min(times.pop("memcpy"), times.pop("kernel"), key=lambda time: time.median_us)
    return times, copy


def _prepared(problem: Problem, provider: Provider, inputs: Sequence[Inputs]) -> tuple[Status, str, list[Call]]:
    """The provider's calls, one a set of operands, where it takes the problem and its answer is right."""
    refusal = provider.refuses(problem)
    if refusal:
        return "unsupported", refusal, []
    try:
        with torch.no_grad():
            calls = [provider.bind(problem, one) for one in inputs]
            wrong = verify.wrong(problem, inputs[0], calls[0]())
    except Exception as error:  # whatever it is, the others are still compared
        return "failed", one_line(error), []
    return ("wrong", wrong, []) if wrong else ("timed", "", calls)

"""The project's one way of timing: everything that is compared is timed in one run, alternately.

On a GPU a sample is the replay of a CUDA graph that holds many calls, between two events: no host time is in it. On the CPU
it is a loop under ``perf_counter``, long enough for the clock.

Caches. The caller gives one call per *buffer set* (operands of its own), and the calls rotate through the sets, so that
with ``buffer_sets`` many of them no call finds its operands in a cache. Outputs that a call allocates rotate as well: as many
as there are sets are kept alive during capture, so each call gets memory that the last calls did not write, and the graph's
pool holds sets + 1 outputs however many calls the graph has. A copy is timed like anything else: in a graph, ``y.copy_(x)``
is a memcpy node.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

# Several times the largest cache: 60 MB of L2 on an H200, 126 MB on a B200, 256 MB behind the L2 of an MI300X.
COLD_BYTES = 2**30
# Bounds a graph's nodes. Only problems too small to fill a cache 512 times over then stay in one, as they do in a model,
# where the operation before has just written their x.
MAX_SETS = 512
# In one graph, so that its start (a few µs) is spread thin.
MIN_GRAPH_CALLS = 20
MIN_CLOCK_SECONDS = 2e-3
ROUNDS = 21

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Microseconds a call over the rounds: their median, and the bounds that a fifth of them lies below and above."""

    median_us: float
    low_us: float
    high_us: float


def buffer_sets(bytes_per_set: int) -> int:
    """How many sets of operands to rotate through so that no call finds its own in a cache."""
    return min(MAX_SETS, max(1, -(-COLD_BYTES // max(1, bytes_per_set))))


def time_together(
    calls: Mapping[str, Sequence[Call]], device: torch.device, *, rounds: int = ROUNDS, failed: dict[str, str] | None = None
) -> dict[str, Timing]:
    """Time what ``calls`` names against each other on ``device``, each as one call per buffer set.

    A round takes one sample of each; every other round goes in reverse order, so that none always follows the same one.
    The calls must do all their work on ``device``, on the current stream, and be capturable in a CUDA graph there. What
    raises when it is first called or captured ends the run, or, given ``failed``, is left out and its reason put there.
    """
    sampler = _graph_sampler if device.type == "cuda" else _clock_sampler
    with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        samplers: dict[str, Callable[[], float]] = {}
        for name, sets in calls.items():
            try:
                samplers[name] = sampler(sets)
            except Exception as error:  # whatever it is, the others can be timed
                if failed is None:
                    raise
                failed[name] = one_line(error)
        samples: dict[str, list[float]] = {name: [] for name in samplers}
        for sample in samplers.values():
            sample()
        for number in range(rounds):
            for name in list(samplers) if number % 2 else reversed(samplers):
                samples[name].append(samplers[name]())
    return {name: summary(values) for name, values in samples.items()}


def one_line(error: Exception) -> str:
    """Why something failed, in one line. Not the exception itself, which would keep alive the tensors of its frames."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def summary(samples: Sequence[float]) -> Timing:
    fifths = statistics.quantiles(samples, n=5, method="inclusive")
    return Timing(statistics.median(samples), fifths[0], fifths[-1])


def _clock_sampler(calls: Sequence[Call]) -> Callable[[], float]:
    """A function that returns µs a call on the CPU, over enough passes through the sets for the clock."""

    def seconds(passes: int) -> float:
        start = time.perf_counter()
        for _ in range(passes):
            for call in calls:
                call()
        return time.perf_counter() - start

    seconds(1)  # first calls load, compile and allocate
    passes = 1
    while seconds(passes) < MIN_CLOCK_SECONDS:
        passes *= 2
    return lambda: seconds(passes) * 1e6 / (passes * len(calls))


def _graph_sampler(calls: Sequence[Call]) -> Callable[[], float]:
    """A function that returns µs a call on the current GPU, from the replay of a graph of many calls."""
    passes = -(-MIN_GRAPH_CALLS // len(calls))
    graph = _captured(calls, passes)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def sample() -> float:
        graph.replay()  # keeps the GPU busy while the host enqueues what is timed, and leaves the caches as each replay does
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / (passes * len(calls))

    return sample


def _captured(calls: Sequence[Call], passes: int) -> torch.cuda.CUDAGraph:
    """A graph of ``passes`` passes over the calls, captured on a side stream after each call ran there once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # outside capture: first calls compile, load and allocate
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    current = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, stream=stream):
            _rotate(calls, passes)
    finally:
        torch.cuda.set_stream(current)  # which torch.cuda.graph does not where a call made the capture invalid
    return graph


def _rotate(calls: Sequence[Call], passes: int) -> None:
    """Make all calls, in turn, with the outputs of the last ``len(calls)`` kept alive: no call writes where those wrote."""
    outputs: deque[object] = deque(maxlen=len(calls))
    for _ in range(passes):
        for call in calls:
            outputs.append(call())

"""How a kernel is launched: a pure function of the row and the device, never of the number of rows.

The same hidden size always gets the same kernel, so a row's bits do not depend on how many rows stand beside it.
Thresholds carry what was measured; docs/performance.md has the tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DeviceLimits:
    """What a plan must know of a device."""

    warp_size: int  # threads of a warp (NVIDIA, RDNA: 32) or wavefront (CDNA: 64)
    max_threads: int  # of one program
    processors: int  # streaming multiprocessors, compute units
    shared_memory: int  # bytes a program may have


@dataclass(frozen=True)
class RowProblem:
    """One row as the kernel sees it."""

    hidden: int
    itemsize: int  # bytes of an element of the widest tensor of the row's shape
    fp64: bool = False  # the compute type is fp64
    loaded: int = 0  # backward: bytes loaded an element, of all tensors together


@dataclass(frozen=True)
class LaunchPlan:
    """resident: ``rows`` rows a tile, each held as ``head`` (+ ``tail``) elements. streamed: one row in blocks of ``head``."""

    strategy: Literal["resident", "streamed"]
    rows: int
    head: int
    tail: int
    warps: int
    persistent: int = 0  # programs at most, each taking tile after tile; 0: a program a tile
    stages: int = 1  # tiles whose loads are in flight in a persistent program

    def programs(self, n_rows: int) -> int:
        """Programs that cover ``n_rows`` rows once."""
        tiles = -(-n_rows // self.rows)
        return min(tiles, self.persistent) if self.persistent else tiles


def forward_plan(problem: RowProblem, limits: DeviceLimits) -> LaunchPlan:
    """The launch of a forward over rows of ``problem.hidden`` elements."""
    width = _next_power_of_two(problem.hidden)
    # 32 elements a thread are what a program's registers hold: 16384 with the 512 threads that run best, half in fp64.
    max_threads = min(512, limits.max_threads)
    if width > max_threads * (16 if problem.fp64 else 32):
        return _streamed(problem, limits)
    split = _two_blocks(problem, max_threads)
    if split is not None:
        head, tail, threads = split
        return LaunchPlan("resident", 1, head, tail, _warps(threads, limits))
    # Tiles of 2048 elements, 16 a thread, kept hidden 64 … 2048 at a copy's speed. A row that fills its block only in part
    # wants twice as many: its threads have as much to do, and fewer of them idle.
    rows = max(1, 2048 // width)
    per_thread = 16 if problem.hidden == width or problem.itemsize > 2 else 32
    threads = min(max_threads, rows * width // per_thread)
    return LaunchPlan("resident", rows, width, 0, _warps(threads, limits))


def backward_plan(problem: RowProblem, limits: DeviceLimits) -> LaunchPlan:
    """The launch of a backward: persistent programs that keep a row, its gradient and their part of dweight in registers,
    and load the next tiles into shared memory meanwhile. The best of four to six shapes a hidden size (H200, bf16)."""
    width = _next_power_of_two(problem.hidden)
    max_threads = min(512, limits.max_threads)
    if width > max_threads * (16 if problem.fp64 else 32):
        return _streamed(problem, limits)
    split = _two_blocks(problem, max_threads)
    if split is not None:
        head, tail, threads = split
        per_processor = 2 if head + tail <= 4096 else 1
        return _persistent(problem, limits, (1, head, tail, threads, per_processor, 4))
    if width <= 128:  # short rows: the partial dweight of a large tile is summed once, at the end
        rows, threads, per_processor = 8192 // width, 512, 1
    elif width <= 2048:  # three small programs hide each other's reductions: 0.98, where one of four times the size got 0.77
        rows, threads, per_processor = 2048 // width, 128, 3
    else:
        rows, threads, per_processor = max(1, 8192 // width), 256 if width <= 8192 else 512, 1
    return _persistent(problem, limits, (rows, width, 0, min(threads, max_threads), per_processor, 3))


def _persistent(problem: RowProblem, limits: DeviceLimits, shape: tuple[int, int, int, int, int, int]) -> LaunchPlan:
    """As many stages, of those asked for, as shared memory has buffers for: one fewer than stages, of a tile each."""
    rows, head, tail, threads, per_processor, stages = shape
    buffers = (limits.shared_memory - 1024) // (rows * (head + tail) * problem.loaded)
    return LaunchPlan(
        "resident", rows, head, tail, _warps(threads, limits), per_processor * limits.processors, max(1, min(stages, buffers + 1))
    )


def weight_gradient_plan(hidden: int, limits: DeviceLimits) -> LaunchPlan:
    """``head`` columns a program, tiles of ``rows`` rows, about four programs a processor."""
    block = min(1024, _next_power_of_two(hidden))
    return LaunchPlan("streamed", 8, block, 0, _warps(256, limits), max(1, 4 * limits.processors * block // hidden))


def partial_sum_plan(hidden: int) -> LaunchPlan:
    """``head`` columns a program, ``rows`` partial sums at a time."""
    return LaunchPlan("resident", 64, min(32, _next_power_of_two(hidden)), 0, 4)


def _streamed(problem: RowProblem, limits: DeviceLimits) -> LaunchPlan:
    block = 8192 if problem.fp64 else 16384
    return LaunchPlan("streamed", 1, block, 0, _warps(limits.max_threads, limits))


def _two_blocks(problem: RowProblem, max_threads: int) -> tuple[int, int, int] | None:
    """A row as two power-of-two blocks and their threads (5120 = 4096 + 1024), where a quarter of one would be padding.

    The tail gives each thread one 16-byte load, so that folding the head onto it moves nothing between threads. Forward, 5120
    gains 4 % by it and 10240 12 %; 1536, 2880 and 12288, nearer to the next power of two, are the same either way.
    """
    width = _next_power_of_two(problem.hidden)
    head = width // 2
    tail = _next_power_of_two(problem.hidden - head)
    threads = tail * problem.itemsize // 16
    if tail >= head or not 64 <= threads <= max_threads or head + tail > 40 * threads:
        return None
    return head, tail, threads


def _warps(threads: int, limits: DeviceLimits) -> int:
    return max(1, min(threads, limits.max_threads) // limits.warp_size)


def _next_power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()

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


@dataclass(frozen=True)
class RowProblem:
    """One row as the kernel sees it."""

    hidden: int
    itemsize: int  # bytes of an element of x, or of the wider of x and residual
    fp64: bool = False  # the compute type is fp64


@dataclass(frozen=True)
class LaunchPlan:
    """resident: ``rows`` rows a program, each held as ``head`` (+ ``tail``) elements. streamed: one row in blocks of ``head``."""

    strategy: Literal["resident", "streamed"]
    rows: int
    head: int
    tail: int
    warps: int

    def programs(self, n_rows: int) -> int:
        """Programs that cover ``n_rows`` rows once."""
        return -(-n_rows // self.rows)


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


def _streamed(problem: RowProblem, limits: DeviceLimits) -> LaunchPlan:
    block = 8192 if problem.fp64 else 16384
    return LaunchPlan("streamed", 1, block, 0, _warps(limits.max_threads, limits))


def _two_blocks(problem: RowProblem, max_threads: int) -> tuple[int, int, int] | None:
    """A row as two power-of-two blocks and their threads (5120 = 4096 + 1024), where one block would be over 30% padding.

    The tail gives each thread one 16-byte load, so that folding the head onto it moves nothing between threads.
    """
    width = _next_power_of_two(problem.hidden)
    head = width // 2
    tail = _next_power_of_two(problem.hidden - head)
    threads = tail * problem.itemsize // 16
    if tail >= head or problem.hidden > 0.7 * width or not 64 <= threads <= max_threads:
        return None
    return head, tail, threads


def _warps(threads: int, limits: DeviceLimits) -> int:
    return max(1, min(threads, limits.max_threads) // limits.warp_size)


def _next_power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()

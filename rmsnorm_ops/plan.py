"""How a kernel is launched: a pure function of the row and the device, never of the number of rows.

The same hidden size always gets the same kernel, so a row's bits do not depend on how many rows stand beside it.
Thresholds carry what was measured; docs/performance.md has the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

REGISTERS = 65536  # of 32 bits, of a streaming multiprocessor


@dataclass(frozen=True)
class DeviceLimits:
    """What a plan must know of a device."""

    warp_size: int  # threads of a warp (NVIDIA, RDNA: 32) or wavefront (CDNA: 64)
    max_threads: int  # of one program
    processors: int  # streaming multiprocessors, compute units
    shared_memory: int  # bytes a program may have
    cooperative: bool = False  # programs that wait for one another may be launched
    # Triton's conversion of fp32 to e4m3fn and e5m2 is one instruction that rounds once: NVIDIA's from sm_90 on. Elsewhere some
    # of them do not compile and others go through fp16; its interpreter loses a carry.
    converts_to_fp8: bool = False
    # Where Triton keeps the loads of the tiles ahead: its AMD backend, in registers.
    ahead: Literal["shared memory", "registers"] = "shared memory"


@dataclass(frozen=True)
class RowProblem:
    """One row as the kernel sees it."""

    hidden: int
    itemsize: int  # bytes of an element of the widest tensor of the row's shape
    fp64: bool = False  # the compute type is fp64
    loaded: int = 0  # bytes loaded an element, of all tensors of the row's shape together
    weight: int = 0  # backward: bytes of an element of the weight


@dataclass(frozen=True)
class LaunchPlan:
    """resident: ``rows`` rows a tile, each held as ``head`` (+ ``tail``) elements. streamed: one row in blocks of ``head``.
    shared: one row by ``slices`` programs, each holding ``head`` elements."""

    strategy: Literal["resident", "streamed", "shared"]
    rows: int
    head: int
    tail: int
    warps: int
    persistent: int = 0  # programs at most, each taking tile after tile; 0: a program a tile
    stages: int = 1  # tiles whose loads are in flight in a persistent program
    slices: int = 1  # programs a row
    max_registers: int = 0  # a thread, so that all programs of the grid run at once; 0: no limit
    reload_weight: bool = False  # backward: the weight is read with each row

    def programs(self, n_rows: int, minimum: Callable[[int, int], int] = min) -> int:
        """Programs that cover ``n_rows`` rows once: ``slices`` for each group that works on rows of its own. ``minimum`` is
        another where n_rows is not yet a number."""
        groups = -(-n_rows // self.rows)
        return minimum(groups, self.persistent // self.slices) * self.slices if self.persistent else groups

    @property
    def slots(self) -> int:
        """For the programs of a row to publish a sum in: as many, rounded up to a power of two."""
        return _next_power_of_two(self.slices)


def forward_plan(problem: RowProblem, limits: DeviceLimits) -> LaunchPlan:
    """The launch of a forward over rows of ``problem.hidden`` elements."""
    width = _next_power_of_two(problem.hidden)
    head = max(16384 // problem.itemsize, width // 32)
    if problem.hidden * problem.itemsize > 65536 and head <= 16384 and _may_share(problem, head, limits):
        # 65536 went from 0.78 of a copy's speed, streamed, to 0.89, 131072 from 0.66 to 0.88, 262144 from 0.61 to 0.89.
        return _shared(problem, limits, head, _Shape(1, max(256, head // 32), 2 if head <= 8192 else 1, 4))
    # 32 elements a thread are what a program's registers hold: 16384 with the 512 threads that run best, half in fp64.
    max_threads = min(512, limits.max_threads)
    if width > max_threads * (16 if problem.fp64 else 32):
        return _streamed(problem, limits)
    odd = problem.itemsize == 2 and problem.hidden % 2 == 1 and width >= 1024
    split = None if odd else _two_blocks(problem, max_threads)
    if split is not None:
        head, tail, threads = split
        return LaunchPlan("resident", 1, head, tail, _warps(threads, limits))
    # Tiles of 2048 elements, 16 a thread, kept hidden 64 … 2048 at a copy's speed. A row that fills its block only in part
    # wants twice as many: its threads have as much to do, and fewer of them idle.
    rows = max(1, 2048 // width)
    per_thread = 16 if problem.hidden == width or problem.itemsize > 2 else 32
    if odd:
        # Rows that start at odd addresses are read two bytes at a time: what helps is more of these in flight (4095: 0.63 of a
        # copy's speed with one row of 32 elements a thread, 0.78 with two and 64; 5125: 0.57 and 0.75; 1001: 0.79 and 0.86).
        rows, per_thread = max(2, 4096 // width), 64
    threads = min(max_threads, rows * width // per_thread)
    return LaunchPlan("resident", rows, width, 0, _warps(threads, limits))


class _Shape(NamedTuple):
    """A persistent program: rows a tile, threads, programs a processor, stages."""

    rows: int
    threads: int
    per_processor: int
    stages: int


# By the power of two that holds a row: for a row that fills it, and for one that does not. The best of five to seven shapes
# each (H200, bf16, hidden = width, and 96, 768, 1536, 3584, 7168). Short rows want one large tile, whose partial dweight is
# summed once, at the end; from 512 on, small programs that hide each other's reductions (512: 0.98 of a copy's speed with six
# of 64 threads, 0.66 with three of 128); from 4096 on a row fills a program.
_BACKWARD = {
    256: (_Shape(32, 512, 1, 3), _Shape(32, 512, 1, 4)),
    512: (_Shape(2, 64, 6, 3), _Shape(2, 64, 6, 3)),
    1024: (_Shape(2, 128, 3, 3), _Shape(1, 32, 8, 3)),
    2048: (_Shape(1, 128, 3, 3), _Shape(1, 128, 3, 4)),
    4096: (_Shape(2, 256, 1, 3), _Shape(1, 128, 2, 3)),
    8192: (_Shape(1, 256, 1, 3), _Shape(1, 256, 1, 3)),
    16384: (_Shape(1, 512, 1, 3), _Shape(1, 512, 1, 3)),
}


def backward_plan(problem: RowProblem, limits: DeviceLimits) -> LaunchPlan:
    """The launch of a backward: persistent programs that keep a row, its gradient and their part of dweight in registers,
    and load the next tiles into shared memory meanwhile."""
    width = _next_power_of_two(problem.hidden)
    max_threads = min(512, limits.max_threads)
    resident = width <= max_threads * (16 if problem.fp64 else 32)
    split = _two_blocks(problem, max_threads) if resident and width > 2048 else None
    if width > 8192 and split is None and _may_share(problem, 1024, limits):
        # The smaller the programs, the better they hide each other's waits: 32768 came to 0.74 of a copy's speed with slices of
        # 8192, 0.80 with 2048, 0.81 with 1024, and 0.36 streamed; 16384 to 0.81, and 0.76 resident.
        return _shared(problem, limits, 1024, _Shape(1, 32, 8, 4))
    if not resident:
        return _streamed(problem, limits)
    if split is not None:
        head, tail, threads = split
        per_processor = 2 if head + tail <= 4096 else 1
        return _persistent(problem, limits, head, tail, _Shape(1, threads, per_processor, 4 if head + tail <= 8192 else 3))
    shape = _BACKWARD[max(256, width)][width > problem.hidden]
    if width < 256:  # as many elements a tile
        shape = shape._replace(rows=shape.rows * 256 // width)
    return _persistent(problem, limits, width, 0, shape)


def _persistent(problem: RowProblem, limits: DeviceLimits, head: int, tail: int, shape: _Shape) -> LaunchPlan:
    """Persistent programs of that shape, with as many stages as fit."""
    # With a row this wide the weight no longer fits into the registers. Read anew it costs a pass through L2 (12288: 0.94 of a
    # copy's speed, 0.73 where it was kept and other values spilled).
    reload_weight = head + tail > 8192
    loaded = problem.loaded + (problem.weight if reload_weight else 0)
    tile = shape.rows * (head + tail)
    if limits.ahead == "registers":
        elements = tile // max(shape.threads, limits.warp_size)
        stages = min(shape.stages, _stages_in_registers(problem, elements, loaded))
    else:
        stages = _stages(shape.stages, tile * loaded, limits.shared_memory // shape.per_processor)
    return LaunchPlan(
        "resident",
        shape.rows,
        head,
        tail,
        _warps(shape.threads, limits),
        persistent=shape.per_processor * limits.processors,
        stages=stages,
        reload_weight=reload_weight,
    )


def _stages_in_registers(problem: RowProblem, elements: int, loaded: int) -> int:
    """2 where a thread of ``elements`` has room for those of the next tile, else 1.

    gfx942 and gfx1100 take 6.5 registers an element besides: with one tile ahead they stay within the 256 that every AMD thread
    has. Rows of 16384 spilled from the second on, and each repeats the loop's code.
    """
    taken = elements * ((13 if problem.fp64 else 6.5) + loaded / 4)
    # Rows that are read element by element have addresses to keep besides.
    return 2 if taken <= 240 and problem.hidden * problem.itemsize % 16 == 0 else 1


def _may_share(problem: RowProblem, head: int, limits: DeviceLimits) -> bool:
    """Whether programs may share a row in slices of ``head``: in fp32, where it can be read by 16 bytes (other rows spill), and
    where all programs of one can run at once."""
    wide_loads = problem.hidden * problem.itemsize % 16 == 0
    return limits.cooperative and not problem.fp64 and wide_loads and problem.hidden <= head * min(256, 2 * limits.processors)


def _shared(problem: RowProblem, limits: DeviceLimits, head: int, shape: _Shape) -> LaunchPlan:
    """Persistent groups of programs with a slice of ``head`` columns each."""
    slices = -(-problem.hidden // head)
    return LaunchPlan(
        "shared",
        1,
        head,
        0,
        _warps(shape.threads, limits),
        persistent=shape.per_processor * limits.processors,
        stages=_stages(shape.stages, head * problem.loaded, limits.shared_memory // shape.per_processor),
        slices=slices,
        max_registers=min(255, REGISTERS // (shape.threads * shape.per_processor)),
    )


def _stages(wanted: int, tile_bytes: int, shared_memory: int) -> int:
    """As many stages, of those wanted, as shared memory has buffers for: one fewer than stages, of a tile each."""
    return max(1, min(wanted, (shared_memory - 1024) // tile_bytes + 1))


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

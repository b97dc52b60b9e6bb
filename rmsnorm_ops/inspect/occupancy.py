"""How many programs a processor holds at once, and what keeps it from holding more."""

from __future__ import annotations

from typing import NamedTuple

from rmsnorm_ops.inspect.targets import Target

SIMDS = 4  # of a processor, on every target


class Occupancy(NamedTuple):
    """``programs`` fill ``share`` of a processor's warps; more do not fit for want of ``limit``. 0 programs do not launch."""

    programs: int
    share: float
    limit: str


def occupancy(target: Target, *, warps: int, registers: int, shared: int) -> Occupancy:
    """Of programs of ``warps`` warps, with ``registers`` a thread and ``shared`` bytes each."""
    per_simd = target.registers // _rounded(max(1, registers), target.register_granule)
    most = {
        "warps": SIMDS * target.warps // warps,
        "programs": target.programs,
        "registers": SIMDS * min(per_simd, target.warps) // warps,
        "shared memory": target.shared_memory // max(1, shared + target.reserved_memory),
    }
    # Of equal limits the first: a processor full of warps lacks nothing.
    limit = min(most, key=lambda name: most[name])
    return Occupancy(most[limit], most[limit] * warps / (SIMDS * target.warps), limit)


def _rounded(value: int, granule: int) -> int:
    return -(-value // granule) * granule

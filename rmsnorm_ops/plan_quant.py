"""How a quantising forward is launched: as plan.py, a pure function of the row and the device.

A row is one block: groups are found in it by reshaping. Programs never share a row, whose scale they would have to agree on.
"""

from __future__ import annotations

from rmsnorm_ops.plan import DeviceLimits, LaunchPlan, RowProblem


def forward_quant_plan(problem: RowProblem, limits: DeviceLimits) -> LaunchPlan:
    """The launch of a quantising forward over rows of ``problem.hidden`` elements."""
    width = 1 << (problem.hidden - 1).bit_length()
    max_threads = min(512, limits.max_threads)
    if width > max_threads * 32:
        return LaunchPlan("streamed", 1, 16384, 0, limits.max_threads // limits.warp_size)
    rows = max(1, 2048 // width)
    threads = min(max_threads, rows * width // 16)
    return LaunchPlan("resident", rows, width, 0, threads // limits.warp_size)

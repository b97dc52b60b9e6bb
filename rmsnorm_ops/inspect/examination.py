"""One kernel of one operator on one target: its plan, what the compiler made of it, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rmsnorm_ops.inspect import gcn, operations, ptx, ptxas, ttgir, verdict
from rmsnorm_ops.inspect.machine import Instructions, Resources
from rmsnorm_ops.inspect.occupancy import Occupancy, occupancy
from rmsnorm_ops.inspect.recorded import Launch, compiled, record
from rmsnorm_ops.inspect.targets import TARGETS, Target
from rmsnorm_ops.plan import LaunchPlan


@dataclass(frozen=True)
class Examined:
    """Everything known of a kernel without running it."""

    target: Target
    operation: str
    hidden: int
    dtype: str
    kernel: str
    plan: LaunchPlan
    bytes_a_thread: float  # of x, in one tile
    instructions: Instructions
    resources: Resources
    shared: int  # bytes a program
    occupancy: Occupancy
    ordinary: ttgir.Ordinary
    narrow_arithmetic: tuple[str, ...]
    assembly: str = field(repr=False)

    @property
    def threads(self) -> int:
        return self.plan.warps * self.target.limits.warp_size

    @property
    def itemsize(self) -> int:
        return operations.DTYPES[self.dtype].itemsize

    @property
    def aligned(self) -> bool:
        """Whether every row starts at a multiple of 16 bytes."""
        return self.hidden * self.itemsize % 16 == 0

    @property
    def faults(self) -> tuple[verdict.Fault, ...]:
        """What the kernel falls short of; empty where it does all that the library promises."""
        return verdict.faults(self)


def examine(target: str, operation: str, hidden: int = 4096, dtype: str = "bf16") -> tuple[Examined, ...]:
    """Compile the kernels of one call of ``operation`` for ``target``, in the order of their launches, and read them.

    Rows are dense, and every tensor is of ``dtype``. Names are those of ``TARGETS``, ``OPERATIONS`` and ``DTYPES``.
    """
    chosen = TARGETS[target]
    launches = record(chosen, lambda: operations.call(operation, hidden, dtype))
    return tuple(examined(launch, chosen, operation, hidden, dtype) for launch in launches)


def examined(launch: Launch, target: Target, operation: str, hidden: int, dtype: str) -> Examined:
    """Compile and read one recorded launch."""
    kernel = compiled(launch, target)
    assembly = kernel.asm["amdgcn" if target.amd else "ptx"]
    instructions, resources = read(assembly, target)
    plan = launch.plan
    tile = plan.rows * (plan.head + plan.tail)
    shared = kernel.metadata.shared
    return Examined(
        target, operation, hidden, dtype, launch.kernel, plan,
        tile * operations.DTYPES[dtype].itemsize / (plan.warps * target.limits.warp_size),
        instructions, resources, shared,
        occupancy(target, warps=plan.warps, registers=resources.registers, shared=shared),
        ttgir.ordinary(kernel.asm["ttgir"]), tuple(ttgir.narrow_arithmetic(kernel.asm["ttir"])), assembly,
    )  # fmt: skip


def read(assembly: str, target: Target) -> tuple[Instructions, Resources]:
    """Instructions and resources, by the target's own formats."""
    if target.amd:
        return gcn.instructions(assembly), gcn.resources(assembly)
    return ptx.instructions(assembly), ptxas.resources(ptxas.report(assembly))


def row(examined: Examined) -> dict[str, Any]:
    """All of it as JSON types, the assembly apart."""
    found, used, plan = examined.instructions, examined.resources, examined.plan
    return {
        "target": examined.target.name, "part": examined.target.part, "op": examined.operation, "hidden": examined.hidden,
        "dtype": examined.dtype, "kernel": examined.kernel, "strategy": plan.strategy, "rows": plan.rows,
        "blocks": [plan.head, plan.tail] if plan.tail else [plan.head], "warps": plan.warps, "threads": examined.threads,
        "persistent_programs": plan.persistent, "stages": plan.stages, "bytes_a_thread": examined.bytes_a_thread,
        "loads": {str(width): count for width, count in found.loads.by_width.items()},
        "stores": {str(width): count for width, count in found.stores.by_width.items()},
        "wide_load_share": round(found.loads.wide_share, 4), "wide_store_share": round(found.stores.wide_share, 4),
        "shuffles": found.shuffles, "barriers": found.barriers, "rsqrts": found.rsqrts, "divides": found.divides,
        "roots": found.roots, "ordinary_rsqrts": examined.ordinary.rsqrts, "ordinary_slow": list(examined.ordinary.slow),
        "registers": used.registers, "accumulation_registers": used.accumulation, "spilled_bytes": used.spilled,
        "scratch_bytes": used.scratch, "shared_bytes": examined.shared, "resident_programs": examined.occupancy.programs,
        "occupancy": examined.occupancy.share, "occupancy_limit": examined.occupancy.limit,
        "faults": [{"rule": fault.rule, "finding": fault.finding} for fault in examined.faults],
    }  # fmt: skip

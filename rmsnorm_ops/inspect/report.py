"""What the inspection prints and what it writes: tables for people, one JSON document for programs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import triton
from rich import box
from rich.table import Table
from rich.text import Text

from rmsnorm_ops.inspect import verdict
from rmsnorm_ops.inspect.examination import Examined, row
from rmsnorm_ops.inspect.machine import Accesses
from rmsnorm_ops.inspect.targets import TARGETS
from rmsnorm_ops.version import __version__

# Column, and whether it holds numbers.
COLUMNS = (
    ("kernel", False), ("plan", False), ("warps", True), ("B/thr", True), ("loads", True), ("stores", True), ("shfl", True),
    ("bar", True), ("rsqrt", True), ("÷", True), ("√", True), ("regs", True), ("spill", True), ("shmem", True),
    ("occupancy", False), ("verdict", False),
)  # fmt: skip
LIMITS = {"warps": "", "registers": " regs", "shared memory": " shmem", "programs": " progs"}
LEGEND = (
    "plan: rows × block (+ block) of a tile; p: persistent programs a processor, s: stages of their loads. B/thr: bytes of x a",
    "thread. loads, stores: of global memory, n % where only so much of their bytes is moved 16 or more at a time. occupancy:",
    "programs a processor holds, how full that is, and what it would need for more. Bytes: spill a thread, shmem a program.",
)


def heading() -> str:
    versions = f"rmsnorm_ops {__version__} · torch {torch.__version__} · triton {triton.__version__}"
    return "\n".join((versions, " ".join(LEGEND)))


def groups(found: Sequence[Examined]) -> list[list[Examined]]:
    """A table each: one target and dtype."""
    ordered = sorted(found, key=_group)
    return [list(group) for _, group in groupby(ordered, key=_group)]


def _group(examined: Examined) -> tuple[int, str]:
    return list(TARGETS).index(examined.target.name), examined.dtype


def table(group: Sequence[Examined]) -> tuple[Text, Table]:
    """The kernels of one target and dtype under a title: a line a kernel, a rule between operators' calls."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for name, numbers in COLUMNS:
        table.add_column(name, justify="right" if numbers else "left", no_wrap=numbers or name == "kernel", overflow="fold")
    call = None
    for examined in group:
        if (examined.operation, examined.hidden) != call:
            call = (examined.operation, examined.hidden)
            table.add_row(Text(f"{examined.operation} {examined.hidden}", style="bold"))
        table.add_row(*_cells(examined))
    target = group[0].target
    limits = target.limits
    processor = "SMs" if not target.amd else "CUs" if limits.warp_size == 64 else "WGPs"
    memory = "LDS" if target.amd else "shared memory"
    title = (
        f"\n{target.name}, {group[0].dtype} ({target.part}: {limits.processors} {processor}, "
        f"{target.shared_memory // 1024} KiB of {memory} each, warps of {limits.warp_size})"
    )
    return Text(title, style="bold"), table


def _cells(examined: Examined) -> list[Text | str]:
    found, used, occupancy = examined.instructions, examined.resources, examined.occupancy
    faults = ", ".join(fault.rule for fault in examined.faults)
    return [
        f" {examined.kernel}", plan_text(examined), str(examined.plan.warps), f"{examined.bytes_a_thread:g}",
        _accesses(found.loads), _accesses(found.stores), str(found.shuffles), str(found.barriers), str(found.rsqrts),
        str(found.divides), str(found.roots), str(used.registers), str(used.spilled), str(examined.shared),
        f"{occupancy.programs} {occupancy.share:.0%}{LIMITS[occupancy.limit]}",
        Text(faults, style="bold red") if faults else Text("ok", style="green"),
    ]  # fmt: skip


def plan_text(examined: Examined) -> str:
    """2×4096 p1 s3"""
    plan = examined.plan
    blocks = f"{plan.head}+{plan.tail}" if plan.tail else str(plan.head)
    persistent = f" p{plan.persistent // examined.target.limits.processors} s{plan.stages}" if plan.persistent else ""
    return f"{plan.rows}×{blocks}{persistent}"


def _accesses(accesses: Accesses) -> str:
    share = accesses.wide_share
    return str(accesses.count) if share == 1 else f"{accesses.count} {share:.0%}"


def document(found: Sequence[Examined], failures: Sequence[str]) -> dict[str, Any]:
    """Everything, as JSON types. ``failures``: a sentence for each operator that does not compile."""
    return {
        "versions": {"rmsnorm_ops": __version__, "torch": torch.__version__, "triton": triton.__version__},
        "ok": not failures and not any(examined.faults for examined in found),
        "failures": list(failures),
        "rules": {rule.name: rule.technique for rule in verdict.RULES},
        "kernels": [row(examined) for examined in found],
    }

"""``inspect``: what the library promises of its kernels holds in the machine code of every target."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("needs Triton, which is for Linux", allow_module_level=True)

from rmsnorm_ops.inspect.operations import OPERATIONS
from rmsnorm_ops.inspect.targets import TARGETS
from tests.machine_code import compile_all

Row = dict[str, Any]
Case = tuple[str, str, int, str]

GRID_TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950", "gfx1100")
GRID_HIDDEN = (128, 1000, 1001, 2880, 4096, 8192, 16384, 65536)
GRID: list[Case] = list(product(GRID_TARGETS, OPERATIONS, GRID_HIDDEN, ("bf16", "fp32")))
# Each target with each dtype, each operator and each hidden size twice or more, each other target once.
FEW: list[Case] = [
    ("sm_80", "forward", 128, "bf16"),
    ("sm_80", "add_backward_input", 2880, "fp32"),
    ("sm_90", "backward", 4096, "bf16"),
    ("sm_90", "forward", 65536, "fp32"),
    ("sm_100", "add_forward", 8192, "fp32"),
    ("sm_100", "backward_input", 1000, "bf16"),
    ("gfx942", "add_backward", 16384, "bf16"),
    ("gfx942", "backward", 65536, "fp32"),
    ("gfx950", "backward_input", 16384, "fp32"),
    ("gfx950", "add_backward", 128, "bf16"),
    ("gfx1100", "add_backward_input", 1000, "bf16"),
    ("gfx1100", "add_forward", 4096, "fp32"),
    # Rows that do not start at multiples of 16 bytes: Triton 3.6 for AMD did not compile their backward.
    ("gfx942", "backward", 1025, "bf16"),
    ("gfx1100", "backward", 1001, "fp32"),
    ("sm_100", "backward", 1001, "bf16"),
    ("sm_89", "add_backward", 2880, "bf16"),
    ("sm_120", "backward", 8192, "bf16"),
    ("gfx90a", "add_forward", 4096, "bf16"),
    ("gfx1201", "backward", 4096, "bf16"),
]


def label(case: Case) -> str:
    return "-".join(map(str, case))


def may_spill(row: Row) -> bool:
    """Known to fall short, and reported as such: some kernels on NVIDIA (docs/inspect.md has them)."""
    backward = "backward" in row["kernel"] and row["dtype"] == "fp32" and row["hidden"] in (128, 1001)
    return row["target"].startswith("sm_") and (backward or row["kernel"].startswith("shared_"))


def check(row: Row) -> None:
    """The promises, from the numbers themselves, besides the rules of the package."""
    target = TARGETS[row["target"]]
    faults = {fault["rule"]: fault["finding"] for fault in row["faults"]}
    if may_spill(row):
        faults.pop("spills", None)
    assert faults == {}, row
    assert row["threads"] <= 1024
    assert row["shared_bytes"] <= target.limits.shared_memory
    assert row["registers"] <= target.max_registers
    assert row["resident_programs"] >= 1
    assert row["divides"] == 0
    norm = row["kernel"].endswith(("_forward", "_backward"))
    assert row["ordinary_rsqrts"] == norm
    assert row["rsqrts"] >= 2 * norm, "one a row, and one in the rescue branch"
    assert row["shuffles"] > 0 or not norm
    if row["compilers_occupancy"] is not None:
        granules = -(-row["registers"] // target.register_granule) * target.register_granule
        assert min(target.warps, target.registers // granules) == row["compilers_occupancy"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Row]]:
    return by_case(compile_all("cases", FEW, str(tmp_path_factory.mktemp("triton"))))


def by_case(rows: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(label((row["target"], row["op"], row["hidden"], row["dtype"])), []).append(row)
    return found


@pytest.mark.parametrize("case", FEW, ids=label)
def test_the_promises_hold(case: Case, compiled: dict[str, list[Row]]) -> None:
    for row in compiled[label(case)]:
        check(row)


@pytest.mark.slow
@pytest.mark.parametrize("target", GRID_TARGETS)
def test_the_promises_hold_on_the_whole_grid(target: str, tmp_path: Path) -> None:
    cases = [case for case in GRID if case[0] == target]
    found = by_case(compile_all("cases", cases, str(tmp_path)))
    assert list(found) == [label(case) for case in cases]
    for rows in found.values():
        for row in rows:
            check(row)


def test_a_backward_reports_each_of_its_kernels(compiled: dict[str, list[Row]]) -> None:
    kernels = {name: [row["kernel"] for row in rows] for name, rows in compiled.items()}
    assert kernels["sm_90-backward-4096-bf16"] == ["resident_backward", "sum_partials"]
    assert kernels["gfx942-backward-65536-fp32"] == ["streamed_backward", "weight_gradient", "sum_partials"]
    assert kernels["gfx950-backward_input-16384-fp32"] == ["resident_backward"]


def test_every_operator_can_be_inspected() -> None:
    names = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("rmsnorm::")}
    quantised = {name for name in names if "quant" in name}  # their promises are others: test_quant_machine_code.py
    assert names - quantised == set(OPERATIONS)


def test_the_targets_are_told_apart_by_what_the_compiler_needs() -> None:
    for name, target in TARGETS.items():
        assert target.name == name
        assert target.limits.warp_size == (64 if name.startswith("gfx9") else 32)
        assert target.limits.max_threads == 1024
        assert target.limits.shared_memory <= target.shared_memory
        assert target.limits.ahead == ("registers" if target.amd else "shared memory")

"""torch.compile for an NVIDIA GPU holds the launches that eager calls make, where it can; no GPU is needed to see that."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import ROOT, run_python

pytest.importorskip("triton")
OPAQUE = ("shared", "fp64", "unaligned slice", "odd stride", "three strides", "transposed")


def run_module(name: str, *arguments: str) -> Any:
    code = f"import runpy; runpy.run_module('tests.{name}', run_name='__main__')"
    return json.loads(run_python(code, *arguments, TRITON_INTERPRET=None).splitlines()[-1])


@pytest.fixture(scope="module")
def graphs() -> dict[str, Any]:
    return run_module("traces", "graphs")


def test_the_graph_holds_the_launches_of_an_eager_call(graphs: dict[str, Any]) -> None:
    """Kernel, warps, grid, constants and the order of arguments; and each kernel writes its outputs and nothing else, or
    Inductor would copy its inputs."""
    outputs = {"y_ptr", "residual_out_ptr", "dx_ptr", "dresidual_ptr", "partial_ptr", "row_scales_ptr", "dweight_ptr"}
    seen = set()
    for name, case in graphs.items():
        if name in OPAQUE:
            continue
        assert not case["opaque"], name
        assert [{key: one[key] for key in ("kernel", "warps", "grid", "named")} for one in case["launches"]] == case["eager"], (
            name
        )
        for one in case["launches"]:
            seen.add(one["kernel"])
            read = {"partial_ptr"} if one["kernel"] == "sum_partials" else set()
            read |= {"row_scales_ptr"} if one["kernel"] == "weight_gradient" else set()
            assert set(one["writes"]) <= outputs - read, name
            assert one["writes"], name
    assert seen == {
        "resident_forward", "streamed_forward", "resident_backward", "streamed_backward", "weight_gradient", "sum_partials",
    }  # fmt: skip


@pytest.mark.parametrize("name", OPAQUE)
def test_what_stays_an_operator(name: str, graphs: dict[str, Any]) -> None:
    case = graphs[name]
    assert case["opaque"] == ["rmsnorm.forward.default", "rmsnorm.backward.default"]
    assert not case["launches"]
    assert not [target for target in case["others"] if "empty" in target or "full" in target], "left by a launch given up"


@pytest.fixture(scope="module")
def others() -> dict[str, Any]:
    return run_module("traces", "dynamic")


def test_rows_may_be_unknown_and_export_keeps_the_operator(others: dict[str, Any]) -> None:
    """mark_dynamic raises where a size is specialised on. The gradient of two norms of one x is that of two launches."""
    found = others
    for name in ("dense", "slice"):
        assert not found[name]["opaque"], name
        kernels = found[name]["launches"]
        assert sorted(kernels) == sorted(["resident_forward", "resident_backward", "sum_partials"] * 2), name
        # A number, or the rows, would mean a guard on whether there are as many rows as programs.
        assert all(re.search("min", grid, re.IGNORECASE) for grid in found[name]["grids"]), found[name]["grids"]
    assert found["hidden"]["opaque"] == found["exported"]["opaque"] == ["rmsnorm.forward.default"]


def test_a_checkpoint_policy_still_names_the_operator(others: dict[str, Any]) -> None:
    assert others["saved"]["launches"] == ["resident_backward", "sum_partials"]
    assert others["recomputed"]["launches"] == ["resident_forward", "resident_backward", "sum_partials"]


def test_inductor_compiles_the_same_arithmetic() -> None:
    """It compiles a kernel itself, from a file it writes, and tells Triton more of the arguments than an eager launch does. That
    must not change the layout of a reduction, and with it the order of a sum."""
    for name, (ours, inductors) in run_module("compiled_twice").items():
        assert len(ours) >= 3, name
        assert ours == inductors, name


def test_an_environment_variable_opens_operators() -> None:
    code = "from rmsnorm_ops import visible; print(len(visible.DEVICES))"
    assert run_python(code, RMSNORM_OPS_VISIBLE=None).strip() == "0"
    assert run_python(code, RMSNORM_OPS_VISIBLE="1").strip() == ("0" if torch.version.hip else "1")


CHANGES = (
    ("kernels/rowmath.py", "CHAIN = tl.constexpr(4)", "CHAIN = tl.constexpr(8)"),
    ("kernels/tile.py", "other=0.0)\n", "other=0.0 )\n"),
    ("kernels/backward.py", "start * ROWS", "ROWS * start"),
    ("plan.py", "2048 // width", "4096 // width"),
    ("launch.py", "def forward(", "def  forward("),
)
# Prints the key of each copy of the package.
KEYS = """
import hashlib, os, sys
import torch, triton
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheDetails
from torch._inductor.codegen import wrapper
for path in sys.argv[1:]:
    if os.fork() == 0:
        sys.path.insert(0, path)
        import rmsnorm_ops
        assert rmsnorm_ops.__file__.startswith(path)
        graph = torch.fx.symbolic_trace(lambda x: torch.ops.rmsnorm.forward.default(x, None, 1e-6))
        details = AOTAutogradCacheDetails.__new__(AOTAutogradCacheDetails)
        sources = details.get_triton_source_codes_from_gm(graph)
        print(len(sources), hashlib.sha256("".join(sources).encode()).hexdigest(), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_a_changed_kernel_or_plan_changes_the_key_of_inductors_cache(tmp_path: Path) -> None:
    """Of the gradient too, which is not in the graph that is looked up; and a copy of the same has the same key."""
    for index, change in enumerate((*CHANGES, None, None)):
        copy = tmp_path / str(index) / "rmsnorm_ops"
        shutil.copytree(ROOT / "rmsnorm_ops", copy, ignore=shutil.ignore_patterns("__pycache__"))
        if change is not None:
            file, old, new = change
            text = (copy / file).read_text()
            assert old in text
            (copy / file).write_text(text.replace(old, new))
    copies = [str(tmp_path / str(index)) for index in range(len(CHANGES) + 2)]
    *changed, same, again = run_python(KEYS, *copies, TRITON_INTERPRET=None).splitlines()
    assert same == again
    assert same.startswith("7 ")
    assert len({same, *changed}) == len(CHANGES) + 1


def test_nothing_of_it_is_imported_with_the_package() -> None:
    code = """
import sys, torch, rmsnorm_ops
rmsnorm_ops.rms_norm(torch.ones(2, 8, requires_grad=True)).sum().backward()
print([name for name in ("triton", "rmsnorm_ops.traced", "torch.distributed.tensor") if name in sys.modules])
"""
    assert run_python(code).strip() == "[]"

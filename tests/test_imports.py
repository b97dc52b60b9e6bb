"""Who imports whom, what `import rmsnorm_ops` costs, and that it may happen twice, in a fork, or in a spawned worker."""

from __future__ import annotations

import ast
import importlib
import json
import multiprocessing
import sys
import warnings
from pathlib import Path

import pytest
import torch

import rmsnorm_ops
from tests.processes import run_python

PACKAGE = Path(rmsnorm_ops.__file__).parent
MOST_LINES = 280  # about 250
# layer: the top-level packages, and the modules of ours, that it may import.
LAYERS = {
    "kernels": ({"triton"}, {"kernels"}),
    "plan": (set(), set()),
    "version": (set(), set()),
    "rows": ({"torch"}, {"plan", "contracts"}),
    "contracts": ({"torch"}, set()),
    "device": ({"torch"}, {"plan"}),
    "reference": ({"torch", "numpy"}, {"contracts"}),
    "accuracy": ({"torch", "numpy"}, {"contracts", "reference"}),
    "plain": ({"torch"}, {"contracts"}),
    "cpu": ({"torch"}, {"contracts"}),
    "cpu_add": ({"torch"}, {"contracts", "cpu"}),
    "cpu_backward": ({"torch"}, {"contracts", "cpu", "plain"}),
    "decompose": ({"torch"}, {"contracts"}),
    "distributed": ({"torch"}, set()),
    "autograd": ({"torch"}, {"distributed"}),
    "plan_quant": (set(), {"plan"}),
    "contracts_quant": ({"torch"}, {"contracts"}),
    "quantise": ({"torch"}, {"contracts_quant"}),
    "plain_quant": ({"torch"}, {"contracts_quant", "plain", "quantise"}),
    "cpu_quant": ({"torch"}, {"contracts_quant", "cpu", "quantise"}),
}
LAUNCHING = {
    "launch",
    "launch_quant",
    "ops_quant",
    "functional_quant",
    "prepared",
    "executors",
    "kernels",
    "ops",
    "functional",
}  # what a specification must not know of


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Every module that the file imports, at any depth of it, type checking apart."""
    tree = ast.parse(path.read_text())
    skipped = {id(inner) for node in ast.walk(tree) if is_type_checking(node) for inner in ast.walk(node)}
    names = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative imports hide the layer"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def foreign_and_ours(path: Path) -> tuple[set[str], set[str]]:
    names = imported(path)
    ours = {name.split(".")[1] for name in names if name.startswith("rmsnorm_ops.")}
    foreign = {name.split(".")[0] for name in names} - {"rmsnorm_ops"} - set(sys.stdlib_module_names)
    return foreign, ours


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_what_is_below_it(layer: str) -> None:
    paths = sorted((PACKAGE / layer).glob("*.py")) or [PACKAGE / f"{layer}.py"]
    may_foreign, may_ours = LAYERS[layer]
    for path in paths:
        foreign, ours = foreign_and_ours(path)
        assert foreign <= may_foreign, path.name
        assert ours <= may_ours, path.name


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_triton_is_imported_by_its_own_layer_alone(path: Path) -> None:
    foreign, _ = foreign_and_ours(path)
    layer = path.relative_to(PACKAGE).parts[0]
    allowed = {"kernels", "executors.py", "traced.py", "inspect", "bench", "check"}
    assert layer in allowed or "triton" not in foreign


def test_the_specification_knows_nothing_of_launching() -> None:
    for layer in (
        "reference",
        "contracts",
        "cpu",
        "plain",
        "rows",
        "plan",
        "contracts_quant",
        "quantise",
        "cpu_quant",
        "plain_quant",
    ):
        assert not foreign_and_ours(PACKAGE / f"{layer}.py")[1] & LAUNCHING


def test_nothing_of_the_package_imports_numpy_on_the_way_to_the_operators() -> None:
    """numpy is for the oracle, which is for tests and the bench."""
    seen, pending = set(), {"functional", "functional_quant"}
    while pending:
        layer = pending.pop()
        seen.add(layer)
        path = PACKAGE / f"{layer}.py"
        foreign, ours = foreign_and_ours(path) if path.exists() else (set(), set())
        assert "numpy" not in foreign, layer
        pending |= ours - seen
    assert {"ops", "ops_quant"} <= seen
    assert not seen & {"reference", "accuracy", "bench", "check", "inspect"}


def test_no_file_is_too_long() -> None:
    roots = [PACKAGE, Path(__file__).parent, PACKAGE.parent / "examples"]
    long = {
        path.name: lines for root in roots for path in root.rglob("*.py") if (lines := path.read_text().count("\n")) > MOST_LINES
    }
    assert not long


def test_import_loads_neither_triton_nor_cuda() -> None:
    code = """
import json, sys
import torch
before = set(sys.modules)
import rmsnorm_ops
torch.ops.rmsnorm.forward(torch.ones(2, 8), None, 1e-6)
torch.ops.rmsnorm.forward(torch.ones(2, 8, device="meta"), None, 1e-6)
new = sorted({name.split(".")[0] for name in set(sys.modules) - before})
print(json.dumps({"cuda": torch.cuda.is_initialized(), "new": new}))
"""
    found = json.loads(run_python(code))
    assert not found["cuda"]
    assert set(found["new"]) - set(sys.stdlib_module_names) == {"rmsnorm_ops"}


def test_import_works_where_triton_is_missing() -> None:
    """triton is a dependency on Linux alone."""
    code = """
import sys
sys.modules["triton"] = None
import torch, rmsnorm_ops
print(rmsnorm_ops.rms_norm(torch.ones(2, 8)).sum().item())
"""
    assert float(run_python(code)) == pytest.approx(16, rel=1e-5)


def test_reload_is_idempotent() -> None:
    code = """
import importlib, torch, rmsnorm_ops
first = rmsnorm_ops.rms_norm(torch.arange(8.0))
importlib.reload(rmsnorm_ops)
assert torch.equal(rmsnorm_ops.rms_norm(torch.arange(8.0)), first)
assert torch.equal(torch.ops.rmsnorm.forward(torch.arange(8.0), None, torch.finfo(torch.float32).eps), first)
"""
    run_python(code)
    importlib.reload(rmsnorm_ops)
    assert rmsnorm_ops.rms_norm(torch.ones(2, 8)).shape == (2, 8)


def _in_a_worker(seed: int) -> list[float]:
    import rmsnorm_ops as package

    return package.rms_norm(torch.arange(8.0) + seed).tolist()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_in_a_worker_process(method: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads, from Python 3.12 on
        with multiprocessing.get_context(method).Pool(1) as pool:
            results = pool.map_async(_in_a_worker, [0, 1]).get(timeout=120)
    assert results == [_in_a_worker(0), _in_a_worker(1)]

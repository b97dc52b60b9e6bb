"""torch.export, saved and loaded, and AOTInductor packages: the operator is one node, and runs at any number of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rmsnorm_ops
from tests.hardware import needs_a_compiler
from tests.implementations import DEVICES, assert_same_bits, random
from tests.processes import run_python

HIDDEN = 16
ROW_COUNTS = (2, 5, 33)
ROWS = {"x": {0: torch.export.Dim("rows", min=2, max=4096)}}


class Residual(nn.Module):
    """Both operators between other ones."""

    def __init__(self, trained: bool = True) -> None:
        super().__init__()
        self.norm = rmsnorm_ops.RMSNorm(HIDDEN, 1e-6)
        self.last = rmsnorm_ops.RMSNorm(HIDDEN, 1e-6, weight_offset=1.0)
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.requires_grad_(trained)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(self.norm(x)).relu()
        return tuple(rmsnorm_ops.add_rms_norm(y, x, self.last.weight, 1e-6, weight_offset=1.0))


class Aten(nn.Module):
    """The control: what AOTInductor makes of torch's own norm."""

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (F.rms_norm(x * 2, (HIDDEN,), None, 1e-6) + 1,)


def operator_nodes(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if "rmsnorm" in str(node.target)]


def assert_runs(run: Any, model: nn.Module, device: str, *, bitwise: bool = True) -> None:
    for rows in ROW_COUNTS:
        x = random(rows, HIDDEN, device=device)
        for actual, expected in zip(run(x), model(x), strict=True):
            if bitwise:
                assert_same_bits(actual.detach(), expected.detach())
            else:
                torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_a_program_is_exported_lowered_saved_and_loaded(device: str, strict: bool, trained: bool, tmp_path: Path) -> None:
    model = Residual(trained).to(device)
    program = torch.export.export(model, (random(4, HIDDEN, device=device),), dynamic_shapes=ROWS, strict=strict)
    both = ["rmsnorm.forward.default", "rmsnorm.add_forward.default"]
    assert operator_nodes(program.graph) == both
    lowered = program.run_decompositions()
    assert operator_nodes(lowered.graph) == both
    torch.export.save(lowered, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2")
    for each in (program, lowered, loaded):
        assert_runs(each.module(), model, device)


OPTIONS = ({}, {"weight_offset": 1.0}, {"round_before_weight": True})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_decomposition_table_opens_the_operators(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """For a consumer that knows torch's operators alone."""

    class Both(nn.Module):
        def forward(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            y, residual_out = rmsnorm_ops.add_rms_norm(x, residual, weight, 1e-6, **options)
            return y, residual_out, rmsnorm_ops.rms_norm(x.transpose(0, 1), weight, 1e-6, **options)

    inputs = random(4, 3, HIDDEN, dtype=dtype), random(4, 3, HIDDEN, seed=1), random(HIDDEN, seed=2)
    program = torch.export.export(Both(), inputs)
    table = {**torch.export.default_decompositions(), **rmsnorm_ops.decompositions()}
    opened = program.run_decompositions(table)
    assert len(operator_nodes(program.graph)) == 2
    assert not operator_nodes(opened.graph)
    for actual, expected in zip(opened.module()(*inputs), Both()(*inputs), strict=True):
        assert actual.dtype is expected.dtype
        assert actual.stride() == expected.stride()
        # bf16: a neighbour, two roundings away where there are two. fp32: another order of the sum.
        tolerance = (2 if dtype is torch.bfloat16 else 8) * torch.finfo(expected.dtype).eps
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=0)


RUN = """
import json, sys
import torch, rmsnorm_ops
run = torch._inductor.aoti_load_package(sys.argv[1])
generator = torch.Generator().manual_seed(0)
x = torch.randn(5, 16, generator=generator, dtype=torch.float64).float()
print(json.dumps([y.tolist() for y in run(x)]))
"""


@needs_a_compiler
@pytest.mark.parametrize("kind", [Aten, Residual])
@pytest.mark.parametrize("device", DEVICES)
def test_aotinductor_package(device: str, kind: type[nn.Module], tmp_path: Path) -> None:
    """The control first: without it, a fault of the toolchain would look like ours."""
    model = kind().to(device)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    with torch.no_grad():
        program = torch.export.export(model, (random(4, HIDDEN, device=device),), dynamic_shapes=ROWS)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        assert_runs(torch._inductor.aoti_load_package(path), model, device, bitwise=False)
    if device == "cpu" and kind is Residual:  # in a process that never traced it, which must know the schema
        printed = run_python(RUN, path)
        for actual, expected in zip(json.loads(printed), model(random(5, HIDDEN)), strict=True):
            torch.testing.assert_close(torch.tensor(actual), expected)

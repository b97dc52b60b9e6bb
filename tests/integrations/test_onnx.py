"""ONNX: the operators are decomposed before the exporter sees them, and refused by name where they are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import rmsnorm_ops
from tests.implementations import random

pytest.importorskip("onnxscript", reason="needs the extra 'integrations' (onnxscript)")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra 'integrations' (onnxruntime)")

HIDDEN = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = rmsnorm_ops.RMSNorm(HIDDEN, 1e-6, weight_offset=1.0)
        self.last = rmsnorm_ops.RMSNorm(HIDDEN, 1e-6, round_before_weight=True)
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        for seed, parameter in enumerate(self.parameters()):
            parameter.data = random(*parameter.shape, seed=seed)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(rmsnorm_ops.add_rms_norm(self.linear(self.norm(x)), x, self.last.weight, 1e-6))


def exported() -> torch.export.ExportedProgram:
    rows = {"x": {0: torch.export.Dim("rows", min=2, max=4096)}}
    return torch.export.export(Block(), (random(4, HIDDEN),), dynamic_shapes=rows)


@pytest.mark.parametrize("opset", [20, 23])
def test_onnx_runtime_computes_the_same(opset: int) -> None:
    table = {**torch.export.default_decompositions(), **rmsnorm_ops.decompositions()}
    program = torch.onnx.export(exported().run_decompositions(table), dynamo=True, opset_version=opset)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    model, name = Block(), session.get_inputs()[0].name
    for rows in (2, 5, 33):
        x = random(rows, HIDDEN, seed=rows)
        for actual, expected in zip(session.run(None, {name: x.numpy()}), model(x), strict=True):
            torch.testing.assert_close(torch.from_numpy(actual), expected.detach(), rtol=1e-5, atol=1e-5)


def test_an_operator_that_is_not_decomposed_is_named() -> None:
    with pytest.raises(torch.onnx.errors.OnnxExporterError) as raised:
        torch.onnx.export(exported(), dynamo=True)
    said, cause = "", raised.value
    while cause is not None:
        said, cause = said + str(cause), cause.__cause__
    assert "rmsnorm" in said

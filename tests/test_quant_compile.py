"""The quantising operators under torch.compile, autograd and torch.func, and as functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from rmsnorm_ops import add_rms_norm_quant, rms_norm_quant
from tests.implementations import DEVICES, assert_same_bits, random
from tests.quantised import OPERATORS, OPTIONS, arguments, assert_same, assert_same_codes

E4M3 = torch.float8_e4m3fn
each_options = pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "row")


@each_options
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_is_eager(device: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()

    def both(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        q, scale = rms_norm_quant(x, weight, 1e-6, dtype=E4M3, **options)
        return q, scale, *add_rms_norm_quant(x * 2, x, weight, 1e-6, dtype=torch.int8, **options)

    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        # Dynamo first offers a graph with eps as a tensor, and starts again where that is refused.
        run = torch._dynamo.lookup_backend("inductor")(graph, inputs)
        graphs.append(graph)
        return run

    compiled = torch.compile(both, fullgraph=True, dynamic=True, backend=backend)
    weight = random(96, device=device)
    for rows in (2, 3, 5, 33, 100):
        x = random(rows, 3, 96, dtype=torch.bfloat16, device=device).transpose(0, 1)
        actual, expected = compiled(x, weight), both(x, weight)
        assert_same(actual, expected)
        assert [tensor.stride() for tensor in actual] == [tensor.stride() for tensor in expected]
    assert len(graphs) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_with_a_given_scale(device: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda *tensors: rms_norm_quant(*tensors[:2], 1e-6, dtype=E4M3, scale=tensors[2]).q, fullgraph=True)
    x, weight, scale = random(5, 64, device=device), random(64, device=device), torch.tensor(0.1, device=device)
    assert_same_codes(compiled(x, weight, scale), torch.ops.rmsnorm.forward_quant_static(x, weight, scale, 1e-6, dtype=E4M3))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_gradient_is_refused(name: str, which: int, device: str) -> None:
    """By the operator and by the function, never a zero or a missing gradient without a word."""
    x, weight = random(3, 64, device=device), random(64, device=device)
    (x, weight)[which].requires_grad_()
    sentence = f"^{name} is not differentiable: call it under torch.no_grad\\(\\), or with tensors that do not require grad$"
    operator = getattr(torch.ops.rmsnorm, name).default
    function = add_rms_norm_quant if name.startswith("add") else rms_norm_quant
    tensors = arguments(name, x, weight)
    keywords = {"scale": tensors[-2]} if name.endswith("static") else {}
    of_function = tensors[:-2] if name.endswith("static") else tensors[:-1]
    for refused in (lambda: operator(*tensors, dtype=E4M3), lambda: function(*of_function, 1e-6, dtype=E4M3, **keywords)):
        with pytest.raises(NotImplementedError, match=sentence):
            refused()
        with torch.no_grad():
            refused()
        with torch.inference_mode():
            refused()


@pytest.mark.parametrize("name", OPERATORS)
def test_transforms(name: str) -> None:
    """A derivative is refused; vmap is right."""
    x, weight = random(4, 3, 64), random(64)

    def last(x: Tensor) -> Tensor:
        outputs = getattr(torch.ops.rmsnorm, name)(*arguments(name, x, weight), dtype=torch.int8)
        return outputs[0].float().sum() if isinstance(outputs, tuple) else outputs.float().sum()

    for transform in (
        lambda: torch.func.grad(last)(x),
        lambda: torch.func.jvp(last, (x,), (torch.ones_like(x),)),
        lambda: torch.func.jacfwd(last)(x),
        lambda: torch.func.vjp(last, x)[1](torch.ones(())),
    ):
        with pytest.raises(NotImplementedError, match=f"^{name} is not differentiable"):
            transform()
    torch.testing.assert_close(torch.vmap(last)(x), torch.stack([last(one) for one in x]))


def test_functions_name_their_results() -> None:
    x, weight, scale = random(3, 64), random(64), torch.tensor(0.25)
    result = rms_norm_quant(x, weight, dtype=E4M3, group_size=32)
    assert result._fields == ("q", "scale")
    assert_same(result, torch.ops.rmsnorm.forward_quant(x, weight, torch.finfo(torch.float32).eps, dtype=E4M3, group_size=32))
    assert rms_norm_quant(x, weight, dtype=E4M3, scale=scale).scale is scale
    added = add_rms_norm_quant(x, x, weight, dtype=E4M3, scale=scale, weight_offset=1.0)
    assert added._fields == ("q", "scale", "residual_out")
    assert added.scale is scale
    assert_same_bits(added.residual_out, x + x)


class Quantised(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(96), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, scale = rms_norm_quant(x * 2, self.weight, 1e-6, dtype=E4M3, group_size=64, column_major_scale=True)
        return q, scale.t()


@pytest.mark.parametrize("strict", [True, False])
def test_export_with_dynamic_rows(strict: bool) -> None:
    """One node, whose options survive; also for CUDA tensors that are fake, with no driver to ask."""
    shapes = {"x": {0: torch.export.Dim("rows", min=2, max=4096)}}
    program = torch.export.export(Quantised(), (random(4, 96),), dynamic_shapes=shapes, strict=strict)
    for graph in (program.graph, program.run_decompositions().graph):
        (node,) = (node for node in graph.nodes if "rmsnorm" in str(node.target))
        assert str(node.target) == "rmsnorm.forward_quant.default"
    for rows in (2, 5, 33):
        x = random(rows, 96)
        assert_same(program.module()(x), Quantised()(x))
    with FakeTensorMode():
        q, scale = rms_norm_quant(
            torch.empty(5, 96, device="cuda"), None, 1e-6, dtype=E4M3, group_size=64, column_major_scale=True
        )
    assert (q.device.type, q.shape, scale.shape, scale.stride()) == ("cuda", (5, 96), (5, 2), (1, 5))

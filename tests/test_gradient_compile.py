"""Compiled forward and backward: one graph for all row counts, the operators as opaque nodes, the gradients of eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from rmsnorm_ops import add_rms_norm, rms_norm
from tests.implementations import DEVICES, assert_same_bits, random

ROW_COUNTS = (2, 3, 4, 5, 7, 16, 17, 33, 100)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """aot_eager that keeps the operators of what it compiled."""

    def __init__(self) -> None:
        self.forward: list[list[str]] = []
        self.backward: list[list[str]] = []
        self.backend = aot_autograd(fw_compiler=self._keep(self.forward), bw_compiler=self._keep(self.backward))

    @staticmethod
    def _keep(graphs: list[list[str]]) -> Callable[..., Any]:
        def compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            names = [str(node.target) for node in graph.graph.nodes if "rmsnorm" in str(node.target)]
            graphs.append([name.removeprefix("rmsnorm.").removesuffix(".default") for name in names])
            return graph.forward

        return compiler


def alone(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, 1e-6)


def added(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    y, residual_out = add_rms_norm(x, residual, weight, 1e-6)
    return torch.cat((y, residual_out.to(y.dtype)), -1)


def only_the_sum(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return add_rms_norm(x, residual, weight, 1e-6).residual_out


def run(function: Any, rows: int, frozen: bool, device: str, dtype: torch.dtype = torch.bfloat16) -> list[Tensor | None]:
    x = random(rows, 16, dtype=dtype, device=device).requires_grad_()
    residual = random(rows, 16, device=device, seed=1).requires_grad_()
    weight = random(16, device=device, seed=2).requires_grad_(not frozen)
    y = function(x, residual, weight)
    y.backward(random(*y.shape, dtype=y.dtype, device=device, seed=3))
    return [y.detach(), x.grad, residual.grad, weight.grad]


def assert_equal(actual: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for got, right in zip(actual, expected, strict=True):
        assert (got is None) == (right is None)
        if got is not None:
            assert_same_bits(got, right)
            assert got.stride() == right.stride()


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("function", [alone, added], ids=lambda function: function.__name__)
@pytest.mark.parametrize("device", DEVICES)
def test_one_graph_for_all_row_counts(device: str, function: Any, frozen: bool) -> None:
    """And the gradients of eager to the bit: the operators are opaque, and there is nothing else to round."""
    graphs = Graphs()
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=graphs.backend)
    for rows in ROW_COUNTS:
        assert_equal(run(compiled, rows, frozen, device), run(function, rows, frozen, device))
    kind = "add_" if function is added else ""
    assert graphs.forward == [[f"{kind}forward"]]
    assert graphs.backward == [[f"{kind}backward_input" if frozen else f"{kind}backward"]]


def test_no_operator_where_only_the_sum_is_used() -> None:
    graphs = Graphs()
    compiled = torch.compile(only_the_sum, fullgraph=True, backend=graphs.backend)
    assert_equal(run(compiled, 4, True, "cpu"), run(only_the_sum, 4, True, "cpu"))
    assert graphs.backward in ([], [[]])


@pytest.mark.parametrize("device", DEVICES)
def test_inductor(device: str) -> None:
    """Fused with a producer and a consumer, which may round elsewhere than eager does; in fp32, where that is little."""

    def block(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return added(x.sin().t().contiguous().t(), residual * 2, weight).cos()

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="inductor")
    for rows in (2, 33):
        actual, expected = (run(f, rows, False, device, torch.float32) for f in (compiled, block))
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", [alone, added], ids=lambda function: function.__name__)
def test_autocast(function: Any) -> None:
    def under(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return function(x, residual, weight)

    compiled = torch.compile(under, fullgraph=True, backend="aot_eager")
    for dtype in (torch.float32, torch.bfloat16):
        actual = run(compiled, 4, False, "cpu", dtype)
        assert actual[0].dtype is dtype
        assert_equal(actual, run(under, 4, False, "cpu", dtype))


def test_the_gradient_of_a_compiled_sum() -> None:
    """It arrives expanded, as an AOT graph passes it on."""

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, 1e-6).sum()

    results = []
    for function in (torch.compile(loss, fullgraph=True, backend="aot_eager"), loss):
        x, weight = random(2, 5, 16, dtype=torch.bfloat16).requires_grad_(), random(16, seed=1).requires_grad_()
        function(x, weight).backward()
        results.append([x.grad, weight.grad])
    assert_equal(*results)

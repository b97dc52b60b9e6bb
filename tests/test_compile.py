"""torch.compile, make_fx and export see one opaque node, whatever the row count, and compiled results are the eager ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from rmsnorm_ops import rms_norm
from tests.implementations import DEVICES, DTYPES, assert_same_bits, random
from tests.layouts import LAYOUTS, Layout

forward = torch.ops.rmsnorm.forward.default
ROW_COUNTS = (2, 3, 4, 5, 7, 16, 17, 33, 100)
BACKENDS = ("aot_eager", "inductor")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class CountingBackend:
    """aot_eager that keeps the graphs it compiled."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        # Dynamo first offers a graph with eps as a tensor, and starts again where that is refused.
        compiled = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
        self.graphs.append(graph)
        return compiled


def of_rank(rank: int, rows: int, dtype: torch.dtype) -> Tensor:
    """x of ``rank`` dims, rows · hidden of them its own."""
    return random(*(1,) * max(0, rank - 3), *(3,) * (rank > 2), rows, 16, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [2, 3, 5])
def test_one_graph_for_all_row_counts(rank: int, dtype: torch.dtype) -> None:
    backend = CountingBackend()
    compiled = torch.compile(rms_norm, fullgraph=True, dynamic=True, backend=backend)
    weight = random(16, dtype=dtype)

    def run(rows: int, eps: float) -> None:
        x = of_rank(rank, rows, dtype)
        assert_same_bits(compiled(x, weight, eps), rms_norm(x, weight, eps))

    for rows in ROW_COUNTS:
        run(rows, 1e-6)
    assert len(backend.graphs) == 1
    for rows in (0, 1):
        run(rows, 1e-6)
    assert len(backend.graphs) <= 3, "0 and 1 may add one each"
    before = len(backend.graphs)
    for rows in ROW_COUNTS:
        run(rows, 1e-5)
    assert len(backend.graphs) <= before + 1, "another eps may add one"
    for graph in backend.graphs:
        assert [node.target for node in graph.graph.nodes if node.op == "call_function"].count(forward) <= 1


def test_a_dimension_marked_dynamic_stays_dynamic() -> None:
    """mark_dynamic raises where an operator's fake specialises the size."""
    backend = CountingBackend()
    compiled = torch.compile(rms_norm, fullgraph=True, backend=backend)
    for rows in ROW_COUNTS:
        x = random(rows, 16)
        torch._dynamo.mark_dynamic(x, 0)
        compiled(x)
    assert len(backend.graphs) == 1


def test_row_counts_without_a_hint_cost_two_graphs() -> None:
    """The first count as it is, then all."""
    backend = CountingBackend()
    compiled = torch.compile(rms_norm, fullgraph=True, backend=backend)
    for rows in ROW_COUNTS:
        compiled(random(rows, 16))
    assert len(backend.graphs) == 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{}, {"weight_offset": 1.0}, {"round_before_weight": True}], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_compiled_is_eager(layout: Layout, options: dict[str, Any], device: str) -> None:
    x = layout.make(lambda *shape: random(*shape, dtype=torch.bfloat16, device=device), 16)
    weight = random(16, device=device)
    compiled = torch.compile(rms_norm, fullgraph=True, backend="aot_eager")
    y, expected = compiled(x, weight, **options), rms_norm(x, weight, **options)
    assert_same_bits(y, expected)
    assert y.stride() == expected.stride()


def between_neighbours(x: Tensor, weight: Tensor) -> Tensor:
    """The norm of a transposed, fused producer, before a view that would be wrong for other strides."""
    produced = (x + 1).t().contiguous().t().abs()
    return rms_norm(produced, weight, 1e-6).view(-1).reshape(x.shape) * 2


@pytest.mark.parametrize("device", DEVICES)
def test_inductor_keeps_the_strides_it_was_shown(device: str) -> None:
    compiled = torch.compile(between_neighbours, fullgraph=True, dynamic=True, backend="inductor")
    weight = random(24, device=device)
    for rows in (2, 5, 33):
        x = random(rows, 24, device=device)
        assert_same_bits(compiled(x, weight), between_neighbours(x, weight))


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_leaves_dtypes_alone(backend: str) -> None:
    """y has x's dtype in fp32 and bf16 regions alike, compiled or not, as torch.nn.functional.rms_norm has."""

    def f(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return rms_norm(x, weight, 1e-6), rms_norm(x @ x.t(), weight[: x.shape[0]], 1e-6)

    x, weight = random(8, 16), random(16)
    expected = f(x, weight)
    assert [y.dtype for y in expected] == [torch.float32, torch.bfloat16]
    for y, other in zip(torch.compile(f, fullgraph=True, backend=backend)(x, weight), expected, strict=True):
        assert y.dtype is other.dtype
        assert_same_bits(y, other)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_an_error_inside_a_compiled_function_says_its_sentence(fullgraph: bool) -> None:
    compiled = torch.compile(rms_norm, fullgraph=fullgraph, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"weight must have shape \(64,\), got \(63,\)"):
        compiled(torch.ones(3, 64), torch.ones(63))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x * 2, self.weight, 1e-6) + 1


def operator_nodes(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if "rmsnorm" in str(node.target)]


@pytest.mark.parametrize("strict", [True, False])
def test_export_with_dynamic_rows(strict: bool) -> None:
    shapes = {"x": {0: torch.export.Dim("rows", min=2, max=4096)}}
    program = torch.export.export(Normed(), (random(4, 16),), dynamic_shapes=shapes, strict=strict)
    assert operator_nodes(program.graph) == ["rmsnorm.forward.default"]
    lowered = program.run_decompositions()
    assert operator_nodes(lowered.graph) == ["rmsnorm.forward.default"]
    for rows in (2, 5, 33):
        x = random(rows, 16)
        assert_same_bits(program.module()(x), Normed()(x))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_one_node(mode: str) -> None:
    """Of the public function, not of the operator alone: no Python of it may run a kernel while it is traced."""
    weight = random(16)
    traced = make_fx(lambda x, weight: rms_norm(x, weight, 1e-6, weight_offset=1.0), tracing_mode=mode)(random(4, 16), weight)
    assert operator_nodes(traced.graph) == ["rmsnorm.forward.default"]
    x = random(4, 16, seed=5)
    assert_same_bits(traced(x, weight), rms_norm(x, weight, 1e-6, weight_offset=1.0))


def test_the_traced_node_leaves_out_what_was_not_given() -> None:
    traced = make_fx(lambda x: forward(x, None, 1e-6))(random(4, 16))
    (node,) = (node for node in traced.graph.nodes if node.target is forward)
    assert node.args[1:] == (None, 1e-6)
    assert not node.kwargs

"""Compiled by Inductor on a GPU: the bits of eager, one graph for all rows, no operator dispatched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from rmsnorm_ops import RMSNorm, add_rms_norm, rms_norm, visible
from tests.hardware import two_gpus
from tests.implementations import GPU, assert_same_bits, random
from tests.layouts import LAYOUTS, Layout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a GPU")]
NVIDIA = torch.version.hip is None
EPS = 1e-6
# resident; resident in two blocks; streamed where its rows are odd; shared from 128 KiB on
HIDDENS = (16, 100, 1000, 1024, 4096, 5120, 8192, 70001, 131072)
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"weight_offset": 1.0}, {"round_before_weight": True})


@pytest.fixture(autouse=True)
def _fresh_dynamo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(visible, "DEVICES", frozenset(("cuda",)))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def alone(x: Tensor, residual: Tensor, weight: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
    return (rms_norm(x, weight, EPS, **options),)


def added(x: Tensor, residual: Tensor, weight: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
    return tuple(add_rms_norm(x, residual, weight, EPS, **options))


def inputs(rows: int, hidden: int, dtype: torch.dtype, residual_dtype: torch.dtype | None = None) -> list[Tensor]:
    x = random(rows, hidden, dtype=dtype, device="cuda")
    residual = random(rows, hidden, dtype=residual_dtype or dtype, device="cuda", seed=1)
    return [x, residual, random(hidden, device="cuda", seed=2)]


def train(function: Callable[..., Any], tensors: list[Tensor], **options: Any) -> list[Tensor | None]:
    """The outputs and the gradients of all that requires grad, from dense cotangents."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    outputs = function(*leaves, **options)
    cotangents = [random(*y.shape, dtype=y.dtype, device="cuda", seed=5 + index) for index, y in enumerate(outputs)]
    gradients = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
    return [*(y.detach().clone() for y in outputs), *(None if g is None else g.clone() for g in gradients)]


def assert_equal(actual: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for got, right in zip(actual, expected, strict=True):
        assert (got is None) == (right is None)
        if got is not None:
            assert_same_bits(got, right)
            assert got.stride() == right.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("hidden", HIDDENS)
@pytest.mark.parametrize("function", [alone, added], ids=lambda function: function.__name__)
def test_forward_and_backward_are_eagers_to_the_bit(function: Any, hidden: int, dtype: torch.dtype) -> None:
    tensors = inputs(70, hidden, dtype)
    assert_equal(train(torch.compile(function, fullgraph=True), tensors), train(function, tensors))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_and_a_residual_of_another_dtype(options: dict[str, Any]) -> None:
    tensors = inputs(33, 1024, torch.bfloat16, torch.float32)
    compiled = torch.compile(added, fullgraph=True)
    assert_equal(train(compiled, tensors, **options), train(added, tensors, **options))


@pytest.mark.parametrize("frozen", [False, True], ids=["no weight", "frozen weight"])
def test_no_gradient_of_a_weight(frozen: bool) -> None:
    x, residual, weight = inputs(33, 1024, torch.bfloat16)
    scale = weight if frozen else None

    def function(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        return tuple(add_rms_norm(x, residual, scale, EPS))

    assert_equal(train(torch.compile(function, fullgraph=True), [x, residual]), train(function, [x, residual]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", [24, 1024, 1001])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_layout(layout: Layout, hidden: int, dtype: torch.dtype) -> None:
    """As an input, and as a view of what is computed in the graph, which a kernel's argument must keep the strides of."""
    weight = random(hidden, device="cuda", seed=2)
    made: list[Tensor] = []

    def fill(*shape: int) -> Tensor:
        made.append(random(*shape, dtype=dtype, device="cuda"))
        return made[-1]

    x = layout.make(fill, hidden)
    compiled = torch.compile(lambda x: rms_norm(x, weight, EPS), fullgraph=True)
    assert_same_bits(compiled(x), rms_norm(x, weight, EPS))

    def of_an_intermediate(base: Tensor) -> Tensor:
        return rms_norm(layout.make(lambda *shape: -base, hidden), weight, EPS)

    torch._dynamo.reset()
    y, expected = torch.compile(of_an_intermediate, fullgraph=True)(made[0]), of_an_intermediate(made[0])
    assert_same_bits(y, expected)
    assert y.stride() == expected.stride()


def test_an_input_that_loses_its_alignment() -> None:
    """Compiled for an aligned one, then called with one that starts two bytes later."""
    weight = random(1024, device="cuda")
    compiled = torch.compile(lambda x: rms_norm(x, weight, EPS), fullgraph=True)
    buffer = random(8 * 1024 + 1, dtype=torch.bfloat16, device="cuda")
    for start in (0, 1):
        x = buffer[start : start + 8 * 1024].view(8, 1024)
        assert_same_bits(compiled(x), rms_norm(x, weight, EPS))


@pytest.mark.parametrize("hidden", [1024, 5120, 70001])
@pytest.mark.parametrize("function", [alone, added], ids=lambda function: function.__name__)
def test_one_graph_for_all_rows(function: Any, hidden: int) -> None:
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    weight = torch.nn.Parameter(random(hidden, device="cuda", seed=2))
    for rows in (2, 3, 5, 16, 33, 100, 1000, 4099):
        x, residual, _ = inputs(rows, hidden, torch.bfloat16)
        leaves = [[tensor.clone().requires_grad_() for tensor in (x, residual)] for _ in range(2)]
        results = []
        for run, (one, other) in zip((compiled, function), leaves, strict=True):
            outputs = run(one, other, weight)
            wanted = [one, weight] if function is alone else [one, other, weight]
            results.append([*outputs, *torch.autograd.grad(outputs, wanted, [torch.ones_like(y) for y in outputs])])
        assert_equal(*results)
    assert counter.frame_count == 1


def test_eps_is_not_stale() -> None:
    compiled = torch.compile(rms_norm, fullgraph=True)
    x, _, weight = inputs(8, 1024, torch.bfloat16)
    for eps in (1e-6, 1e-2, 1.0, 1e-6):
        assert_same_bits(compiled(x, weight, eps), rms_norm(x, weight, eps))


@pytest.mark.skipif(not NVIDIA, reason="needs an NVIDIA GPU: elsewhere the operator stays opaque")
@pytest.mark.parametrize(("hidden", "visible"), [(1024, True), (5120, True), (70001, True), (131072, False)])
def test_no_operator_is_dispatched(hidden: int, visible: bool) -> None:
    tensors = inputs(33, hidden, torch.bfloat16)
    _, codes = run_and_get_code(lambda: train(torch.compile(added, fullgraph=True), tensors))
    text = "\n".join(codes)
    assert len(codes) == 2
    assert ("torch.ops.rmsnorm" in text) == (not visible)
    if visible:
        assert "_forward" in text
        assert "_backward" in text
        assert "sum_partials" in text


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_modes(mode: str) -> None:
    """Norms between products, several calls, so that CUDA graphs are recorded and replayed; forward and backward."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(512, 512, bias=False, device="cuda", dtype=torch.bfloat16)
    norm = RMSNorm(512, EPS, device="cuda")

    def block(x: Tensor, residual: Tensor) -> Tensor:
        y, residual = add_rms_norm(linear(x), residual, norm.weight, EPS)
        return norm(linear(y) + residual)

    compiled = torch.compile(block, fullgraph=True, mode=mode)
    for seed in range(4):
        x, residual = (random(64, 512, dtype=torch.bfloat16, device="cuda", seed=10 * seed + index) for index in range(2))
        results = []
        for function in (compiled, block):
            x.requires_grad_()
            torch.compiler.cudagraph_mark_step_begin()
            y = function(x, residual)
            grads = torch.autograd.grad(y.float().sin().sum(), (x, norm.weight, linear.weight))
            results.append([y.detach().float().clone(), *(grad.float().clone() for grad in grads)])
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def test_reduce_overhead_of_a_norm_is_eagers_to_the_bit() -> None:
    compiled = torch.compile(added, fullgraph=True, mode="reduce-overhead")
    for seed in range(4):
        tensors = [random(64, 1024, dtype=torch.bfloat16, device="cuda", seed=seed + index) for index in range(2)]
        tensors.append(random(1024, device="cuda", seed=seed))
        torch.compiler.cudagraph_mark_step_begin()
        assert_equal(train(compiled, tensors), train(added, tensors))


def test_a_captured_graph_of_a_compiled_function() -> None:
    compiled = torch.compile(rms_norm, fullgraph=True)
    x, _, weight = inputs(8, 1024, torch.bfloat16)
    compiled(x, weight, EPS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = compiled(x, weight, EPS)
    x.copy_(random(8, 1024, device="cuda", seed=9))
    graph.replay()
    assert_same_bits(y, rms_norm(x, weight, EPS))


@two_gpus
def test_another_device_than_the_current() -> None:
    torch.cuda.set_device(0)
    for backend in ("inductor", "aot_eager"):
        torch._dynamo.reset()
        compiled = torch.compile(rms_norm, fullgraph=True, backend=backend)
        x, weight = random(8, 1024, dtype=torch.bfloat16, device="cuda:1"), random(1024, device="cuda:1")
        assert_same_bits(compiled(x, weight, EPS), rms_norm(x, weight, EPS))
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype) -> None:
    """The norm keeps x's dtype, whatever the region's and the weight's."""

    def block(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cuda", dtype=dtype):
            return rms_norm(x, weight, EPS), rms_norm(x @ x.t(), weight[: x.shape[0]], EPS)

    x, _, weight = inputs(64, 1024, torch.float32)
    expected, actual = block(x, weight), torch.compile(block, fullgraph=True)(x, weight)
    assert [y.dtype for y in expected] == [y.dtype for y in actual] == [torch.float32, dtype]
    assert_same_bits(actual[0], expected[0])

"""The quantising operators as torch sees them: schemas, fakes, compiled graphs, no gradient, any strides, the add, any batch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from rmsnorm_ops import add_rms_norm_quant, rms_norm_quant
from rmsnorm_ops.contracts_quant import FORMATS
from tests.hardware import needs_gpu
from tests.implementations import DEVICES, assert_same_bits, random
from tests.layouts import LAYOUTS, Layout
from tests.quantised import (
    CPU,
    TRITON,
    Quantiser,
    assert_right,
    assert_same_codes,
    bytes_of,
    each_implementation,
    each_operator,
)  # fmt: skip
from tests.strategies import Case, cases

EXAMPLES = settings.default.max_examples
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
E4M3 = torch.float8_e4m3fn
OPERATORS = ("forward_quant", "forward_quant_static", "add_forward_quant", "add_forward_quant_static")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"group_size": 64},
    {"group_size": 32, "column_major_scale": True},
    {"group_size": 32, "scale_dtype": torch.float8_e8m0fnu, "column_major_scale": True},
)
CASES = [(name, {}) if name.endswith("static") else (name, options) for name in OPERATORS for options in OPTIONS]
each_case = pytest.mark.parametrize(
    ("name", "options"),
    [case for index, case in enumerate(CASES) if case not in CASES[:index]],
    ids=lambda part: "-".join(part) if isinstance(part, dict) else part,
)
each_options = pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "row")


def arguments(name: str, x: Tensor, weight: Tensor | None) -> tuple[Any, ...]:
    residual = (x.detach().float() * 0.5,) if name.startswith("add") else ()
    scale = (torch.full((), 0.05, device=x.device),) if name.endswith("static") else ()
    return (x, *residual, weight, *scale, 1e-6)


def call(run: Quantiser, name: str, x: Tensor, weight: Tensor | None, **options: Any) -> tuple[Tensor, ...]:
    if name.endswith("static"):
        options = {key: value for key, value in options.items() if key in ("dtype", "weight_offset", "round_before_weight")}
    outputs = getattr(run.of, name)(*arguments(name, x, weight), **options)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(actual, expected, strict=True):
        if one.dtype.itemsize == 1:
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert torch.equal(bytes_of(one), bytes_of(other))
        else:
            assert_same_bits(one, other)


def test_the_schemas() -> None:
    assert_expected_inline(
        "\n".join(str(getattr(torch.ops.rmsnorm, name).default._schema) for name in OPERATORS).replace(", *, ", ",\n  *, "),
        """\
rmsnorm::forward_quant(Tensor x, Tensor? weight, float eps,
  *, ScalarType dtype, int? group_size=None, float? max_scale=None, bool power_of_two_scale=False, bool column_major_scale=False, ScalarType? scale_dtype=None, float weight_offset=0., bool round_before_weight=False) -> (Tensor q, Tensor scale)
rmsnorm::forward_quant_static(Tensor x, Tensor? weight, Tensor scale, float eps,
  *, ScalarType dtype, float weight_offset=0., bool round_before_weight=False) -> Tensor q
rmsnorm::add_forward_quant(Tensor x, Tensor residual, Tensor? weight, float eps,
  *, ScalarType dtype, int? group_size=None, float? max_scale=None, bool power_of_two_scale=False, bool column_major_scale=False, ScalarType? scale_dtype=None, float weight_offset=0., bool round_before_weight=False) -> (Tensor q, Tensor scale, Tensor residual_out)
rmsnorm::add_forward_quant_static(Tensor x, Tensor residual, Tensor? weight, Tensor scale, float eps,
  *, ScalarType dtype, float weight_offset=0., bool round_before_weight=False) -> (Tensor q, Tensor residual_out)""",  # noqa: E501
    )


@each_case
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(name: str, device: str, options: dict[str, Any]) -> None:
    for layout in (LAYOUTS[0], LAYOUTS[3], LAYOUTS[10], LAYOUTS[21], LAYOUTS[22]):
        x = layout.make(lambda *shape: random(*shape, device=device), 96)
        for weight in (None, random(96, device=device)):
            torch.library.opcheck(
                getattr(torch.ops.rmsnorm, name).default, arguments(name, x, weight), {"dtype": E4M3, **options},
                test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
            )  # fmt: skip


@each_case
@each_implementation
def test_the_fake_at_any_layout(run: Quantiser, name: str, options: dict[str, Any]) -> None:
    for layout in LAYOUTS:
        for hidden in (96,) if layout is not LAYOUTS[0] else (1, 96):
            x = layout.make(lambda *shape: run.random(*shape), hidden)
            real = call(run, name, x, None, dtype=E4M3, **options)
            operators = Quantiser("operators", run.device, torch.ops.rmsnorm, CPU.like)
            with FakeTensorMode() as mode:
                fake = call(operators, name, mode.from_tensor(x), None, dtype=E4M3, **options)
            meta = call(operators, name, x.to("meta"), None, dtype=E4M3, **options)
            for one, other in ((fake, real), (meta, real)):
                assert [facts(tensor) for tensor in one] == [facts(tensor) for tensor in other], layout


def facts(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


CALLS = (("forward_quant", {}), ("forward_quant", {"group_size": 64}), ("add_forward_quant", {"group_size": 64}))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@each_operator
def test_any_layout_is_its_dense_copy(run: Quantiser, layout: Layout) -> None:
    x = layout.make(lambda *shape: run.random(*shape, dtype=torch.float16), 200)
    dense, before = torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x), x.clone()
    weight = run.random(200, seed=9)
    for name, options in CALLS:
        expected = call(run, name, dense, weight, dtype=E4M3, **options)
        assert_same(call(run, name, x, weight, dtype=E4M3, **options), expected)
    assert_same_bits(x.contiguous(), before.contiguous())


@needs_gpu()
@pytest.mark.parametrize("hidden", [24, 128, 1000, 1001, 4096, 5120, 20000])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_dense_copy_at_sizes_that_are_laid_out_differently(layout: Layout, hidden: int) -> None:
    weight = random(hidden, device="cuda", seed=9)
    for dtype in FLOATS:
        fill = functools.partial(random, dtype=dtype, device="cuda")
        x = layout.make(fill, hidden)
        dense = torch.empty(x.shape, dtype=dtype, device="cuda").copy_(x)
        for options in OPTIONS:
            for name in OPERATORS:
                expected = call(TRITON, name, dense, weight, dtype=E4M3, **options)
                assert_same(call(TRITON, name, x, weight, dtype=E4M3, **options), expected)


@settings(max_examples=EXAMPLES)
@given(
    case=cases(dtypes=FLOATS), group_size=st.sampled_from([None, 32, 128]), dtype=st.sampled_from(list(FORMATS)), data=st.data()
)
@each_operator
def test_a_row_does_not_depend_on_its_batch(
    run: Quantiser, case: Case, group_size: int | None, dtype: torch.dtype, data: st.DataObject
) -> None:
    x, weight = case.tensors(run.like)
    x = x.reshape(-1, case.hidden)
    options = {"dtype": dtype, "group_size": group_size, **case.options}
    q, scale = run.of.forward_quant(x, weight, case.eps, **options)
    order = torch.tensor(data.draw(st.permutations(range(len(x))), label="order"), dtype=torch.int64, device=x.device)
    permuted = run.of.forward_quant(x[order], weight, case.eps, **options)
    assert_same(permuted, (q.view(torch.int8)[order].view(dtype), scale[order]))
    for row in range(min(3, len(x))):
        alone = run.of.forward_quant(x[row], weight, case.eps, column_major_scale=True, **options)
        assert_same(alone, (q[row], scale[row]))


@pytest.mark.parametrize("hidden", [64, 1000, 4096])
@each_operator
def test_many_rows_and_few(run: Quantiser, hidden: int) -> None:
    x = run.random(max(23, 4099 * 2 // hidden), hidden, dtype=torch.float16)
    for options in OPTIONS[:3]:
        q, scale = run.of.forward_quant(x, None, 1e-6, dtype=E4M3, **options)
        for part in (slice(0, 1), slice(1, None, 3)):
            some = run.of.forward_quant(x[part], None, 1e-6, dtype=E4M3, **options)
            assert_same(some, (q.view(torch.int8)[part].view(E4M3), scale[part]))


@pytest.mark.parametrize("residual_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@each_implementation
def test_the_add_quantises_the_stored_sum(run: Quantiser, dtype: torch.dtype, residual_dtype: torch.dtype) -> None:
    x, residual = run.random(5, 200, dtype=dtype), run.random(5, 200, dtype=residual_dtype, seed=1)
    weight, scale = run.random(200, seed=2), torch.tensor([0.02], device=run.device)
    for options in OPTIONS[:3]:
        q, found, total = run.of.add_forward_quant(x, residual, weight, 1e-6, dtype=torch.int8, **options)
        assert total.dtype is residual_dtype
        if not (run.like.interpreted and torch.bfloat16 in (dtype, residual_dtype)):
            assert_same_bits(total, (x.float() + residual.float()).to(residual_dtype))
        group = {key: value for key, value in options.items() if key == "group_size"}
        assert_right(run, q, found, total, weight, 1e-6, dtype=torch.int8, **group)
        if dtype is residual_dtype:
            assert_same((q, found), run.of.forward_quant(total, weight, 1e-6, dtype=torch.int8, **options))
    q, total = run.of.add_forward_quant_static(x, residual, weight, scale, 1e-6, dtype=torch.int8)
    if dtype is residual_dtype:
        assert_same((q,), (run.of.forward_quant_static(total, weight, scale, 1e-6, dtype=torch.int8),))


@each_operator
def test_outputs_are_fresh_and_inputs_left_alone(run: Quantiser) -> None:
    for name in OPERATORS:
        x, weight = run.random(4, 96), run.random(192)[::2]
        inputs = [tensor for tensor in arguments(name, x, weight) if isinstance(tensor, Tensor)]
        before = [tensor.clone() for tensor in inputs]
        outputs = getattr(run.of, name)(*inputs, 1e-6, dtype=E4M3)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        addresses = [tensor.untyped_storage().data_ptr() for tensor in (*inputs, *outputs)]
        assert len(set(addresses)) == len(addresses)
        for tensor, old in zip(inputs, before, strict=True):
            assert_same_bits(tensor, old)


@each_operator
def test_a_static_scale_at_any_address(run: Quantiser) -> None:
    x = run.random(3, 64)
    scales = torch.tensor([0.5, 0.03, 0.7], device=run.device)
    expected = run.of.forward_quant_static(x, None, torch.tensor(0.03, device=run.device), 1e-6, dtype=torch.int8)
    for scale in (scales[1], scales[1:2], scales[1:2].view(1, 1, 1)):
        assert_same_codes(run.of.forward_quant_static(x, None, scale, 1e-6, dtype=torch.int8), expected)


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

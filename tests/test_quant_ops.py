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

from rmsnorm_ops.contracts_quant import FORMATS
from tests.hardware import needs_gpu
from tests.implementations import DEVICES, assert_same_bits, random
from tests.layouts import LAYOUTS, Layout
from tests.quantised import (
    CPU,
    OPERATORS,
    OPTIONS,
    TRITON,
    Quantiser,
    arguments,
    assert_right,
    assert_same,
    assert_same_codes,
    call,
    each_implementation,
    each_operator,
)
from tests.strategies import Case, cases

EXAMPLES = settings.default.max_examples
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
E4M3 = torch.float8_e4m3fn
CASES = [(name, {}) if name.endswith("static") else (name, options) for name in OPERATORS for options in OPTIONS]
each_case = pytest.mark.parametrize(
    ("name", "options"),
    [case for index, case in enumerate(CASES) if case not in CASES[:index]],
    ids=lambda part: "-".join(part) if isinstance(part, dict) else part,
)


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
@pytest.mark.parametrize("hidden", [128, 1000, 1001, 4096, 20000])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_dense_copy_at_sizes_that_are_laid_out_differently(layout: Layout, hidden: int) -> None:
    weight = random(hidden, device="cuda", seed=9)
    x = layout.make(functools.partial(random, dtype=torch.float16, device="cuda"), hidden)
    dense = torch.empty(x.shape, dtype=x.dtype, device="cuda").copy_(x)
    for name, options in CALLS:
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

"""Whether an answer is right enough to be timed: every provider of this machine, and answers that are not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rmsnorm_ops import reference
from rmsnorm_ops.bench import cases, problem, traffic, verify
from rmsnorm_ops.bench.cases import CASES, Case
from rmsnorm_ops.bench.problem import Inputs, Problem
from rmsnorm_ops.bench.providers import ATEN, OURS, Provider, inductor
from tests.measurements import BF16, CPU, off_by_a_percent_of_a_row, provider

BY_NAME = {case.name: case for case in CASES}
SMALL = Case("small", "", 5, 96)
LAYOUTS = ["odd 1001", "odd 1000", "odd 769", "k of fused qkv", "q transposed", "Qwen3 8B fp32 weight", "column-major", "huge"]


def put(one: Provider, operation: str, case: Case, dtype: torch.dtype = BF16, rows: int = 5) -> tuple[Problem, Inputs, object]:
    asked = problem.sized(operation, case, dtype, CPU, elements=rows * case.hidden)
    inputs = problem.operands(asked, seed=0)
    with torch.no_grad():
        return asked, inputs, one.bind(asked, inputs)()


# aten has no backward to call directly on the CPU.
RUN = [(one, operation) for one in (OURS, ATEN) for operation in traffic.OPERATIONS if (one, operation) != (ATEN, "backward")]


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(("one", "operation"), RUN, ids=lambda value: getattr(value, "name", value))
def test_providers_are_right(one: Provider, operation: str, dtype: torch.dtype) -> None:
    assert verify.wrong(*put(one, operation, SMALL, dtype)) == ""


@pytest.mark.parametrize("operation", [*traffic.OPERATIONS, *traffic.QUANTISED])
@pytest.mark.parametrize("name", LAYOUTS)
def test_ours_is_right_with_every_layout_and_option(name: str, operation: str) -> None:
    assert verify.wrong(*put(OURS, operation, BY_NAME[name])) == ""


def test_inductor_is_right_and_compiles_anew_for_another_problem() -> None:
    one = inductor()
    for operation, hidden in (("forward", 48), ("backward", 96)):
        one.reset()
        assert verify.wrong(*put(one, operation, Case("small", "", 5, hidden))) == ""


@pytest.mark.parametrize("weight", ["as x", "none"])
def test_the_formula_is_the_oracle_s(weight: str) -> None:
    case = Case("small", "", 5, 96, weight=weight, weight_offset=0.5 if weight == "as x" else 0.0)  # type: ignore[arg-type]
    asked = Problem("backward", case, torch.float64, CPU, 5)
    inputs = problem.operands(asked, seed=0)
    ((_, exact),) = verify._exact(asked, inputs)
    assert inputs.dy is not None
    gradients = reference.backward(inputs.dy, inputs.x, inputs.weight, case.eps, weight_offset=case.weight_offset)
    y = reference.forward(inputs.x, inputs.weight, case.eps, weight_offset=case.weight_offset)
    for got, expected in ((exact["y"], y), (exact["dx"], gradients.dx), (exact["dweight"], gradients.dweight)):
        np.testing.assert_allclose(got.numpy(), expected.astype(float), rtol=1e-12, atol=1e-13)


def test_rows_are_looked_at_in_parts_and_dweight_is_the_sum_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, inputs, results = put(OURS, "backward", SMALL)
    monkeypatch.setattr(verify, "CHUNK", 2 * SMALL.hidden)
    assert [rows.start for rows, _ in verify._exact(asked, inputs)] == [0, 2, 4]
    assert verify.wrong(asked, inputs, results) == ""
    dx, dweight = results  # type: ignore[misc]
    assert verify.wrong(asked, inputs, (dx, dweight - inputs.dy[-1] * 0.2)).startswith("dweight is off by ")  # type: ignore[index]


def test_one_wrong_element_is_seen_wherever_it_is() -> None:
    wrong = provider("wrong", norm=off_by_a_percent_of_a_row)
    sentence = verify.wrong(*put(wrong, "forward", SMALL))
    assert sentence.startswith("y is off by 0.05")
    assert sentence.endswith(" of the largest value of its row, 0.031 are allowed")


@pytest.mark.parametrize("operation", ["add_forward", "backward", "forward+backward"])
def test_each_output_is_looked_at(operation: str) -> None:
    asked, inputs, results = put(OURS, operation, SMALL)
    assert isinstance(results, tuple)
    for index, name in enumerate(verify.OUTPUTS[operation]):
        changed = [output.clone() for output in results]
        changed[index][..., -1] += 0.2 * changed[index].abs().max()
        assert verify.wrong(asked, inputs, tuple(changed)).startswith(f"{name} is off by ")


@pytest.mark.parametrize("operation", traffic.QUANTISED)
def test_each_quantised_output_is_looked_at(operation: str) -> None:
    asked, inputs, results = put(OURS, operation, SMALL)
    q, scale, *others = results  # type: ignore[misc]
    assert verify.wrong(asked, inputs, (q, scale * 1.2, *others)).startswith("y is off by ")
    assert verify.wrong(asked, inputs, q).endswith("has another shape or dtype than x") or others
    assert ATEN.refuses(asked) == f"aten has no {operation}"
    if others:
        assert verify.wrong(asked, inputs, (q, scale, others[0] * 1.2)).startswith("residual_out is off by ")


def test_what_is_no_number_or_has_another_form_is_wrong() -> None:
    asked, inputs, y = put(OURS, "forward", SMALL)
    assert isinstance(y, torch.Tensor)
    for other in (y[1:], y.float(), None):
        assert verify.wrong(asked, inputs, other) == "y has another shape or dtype than x"
    y[2, 3] = torch.nan
    assert verify.wrong(asked, inputs, y).startswith("y is off by inf")
    assert verify.wrong(asked, inputs, (y, y)) == "y must be 1 tensors, got 2"


def test_without_a_weight_there_is_no_dweight() -> None:
    _, _, results = put(OURS, "backward", BY_NAME["odd 1001"])
    assert isinstance(results, torch.Tensor)
    _, _, both = put(OURS, "forward+backward", BY_NAME["odd 1001"])
    assert isinstance(both, tuple)
    assert len(both) == 2

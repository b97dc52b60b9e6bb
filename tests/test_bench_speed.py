"""The speed of the operators that a check reports."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rmsnorm_ops.bench.cases import CASES
from rmsnorm_ops.bench.command import device_of
from rmsnorm_ops.check import report, speed

CPU = torch.device("cpu")
BY_NAME = {case.name: case for case in CASES}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(("operation", "tensors", "weights"), [("forward", 2, 1), ("add_forward", 4, 1), ("backward", 3, 2)])
def test_speed_is_measured_and_written(operation: str, tensors: int, weights: int) -> None:
    measured = speed.measure(BY_NAME["Llama 3.2 1B"], CPU, operation, elements=2**16)
    assert (measured.problem.rows, measured.problem.copy_bytes) == (32, 2**18)
    assert measured.problem.moved_bytes == tensors * 2**17 + weights * 2048 * 2
    document = report.document({}, [], [measured])
    assert document["ok"] is True
    row = document["speeds"][0]
    assert row["operation"] == operation
    assert measured.time is not None
    assert row["us"] == measured.time.median_us > 0
    assert row["copy_us"] == measured.copy.median_us > 0
    assert row["fraction_of_copy"] == measured.fraction
    title, table = report.speed_table([measured], "some GPU")
    assert title.plain.startswith(f"\n{operation} on some GPU, bf16, 2^16 elements")
    assert table.row_count == 1


def test_an_operator_too_wrong_to_time_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dataclasses.replace(speed.OURS, norm=lambda x, weight, case: x.clone())
    monkeypatch.setattr(speed, "OURS", wrong)
    measured = speed.measure(BY_NAME["Llama 3.2 1B"], CPU, elements=2**14)
    assert measured.time is None
    assert report.document({}, [], [measured])["ok"] is False
    assert report.failures([], [measured])[0].startswith("forward, Llama 3.2 1B, not timed: y is off by ")
    assert report.speed_table([measured], "some GPU")[1].row_count == 1


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("operation", speed.OPERATIONS)
def test_an_operator_is_timed_on_a_gpu(operation: str) -> None:
    measured = speed.measure(BY_NAME["Llama 3.1 8B"], device_of("cuda"), operation, elements=2**26)
    assert measured.fraction is not None
    assert 0.3 < measured.fraction < 1.3
    assert measured.copy.low_us <= measured.copy.median_us <= measured.copy.high_us

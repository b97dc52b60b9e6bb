"""Problems put to several providers: what is timed, what is not and why; and what an eager call costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rmsnorm_ops.bench import devices, host, problem, timing, traffic
from rmsnorm_ops.bench.cases import CASES, SIZES, Case
from rmsnorm_ops.bench.command import device_of
from rmsnorm_ops.bench.measure import measure
from rmsnorm_ops.bench.problem import Problem
from rmsnorm_ops.bench.providers import ATEN, OURS, inductor
from tests.measurements import BF16, CPU, measurement, off_by_a_percent_of_a_row, provider, raising

SMALL = Case("small", "", 4, 64)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BY_NAME = {case.name: case for case in (*CASES, *SIZES)}


def asked(operation: str = "forward", case: Case = SMALL, dtype: torch.dtype = BF16, device: torch.device = CPU) -> Problem:
    return Problem(operation, case, dtype, device, case.rows)


# What is timed and what is not


def test_each_provider_has_one_measurement_in_order() -> None:
    calls: list[str] = []

    def counted(x: Any, weight: Any, case: Case) -> Any:
        calls.append("wrong")
        return off_by_a_percent_of_a_row(x, weight, case)

    wrong, broken = provider("wrong", norm=counted), provider("broken", norm=raising)
    picky = provider("picky", dtypes=(torch.float16,))
    measured = measure(asked(), [OURS, wrong, ATEN, broken, picky], rounds=2)
    assert [(one.provider, one.status) for one in measured] == [
        ("rmsnorm_ops", "timed"), ("wrong", "wrong"), ("aten", "timed"), ("broken", "failed"), ("picky", "unsupported"),
    ]  # fmt: skip
    assert [one.time is not None for one in measured] == [True, False, True, False, False]
    assert [one.fraction is not None for one in measured] == [True, False, True, False, False]
    assert measured[1].reason.startswith("y is off by 0.05")
    assert measured[3].reason == "RuntimeError: out of luck"
    assert measured[4].reason == "picky does not take bf16"
    assert calls == ["wrong"], "what is wrong was looked at once and not timed"
    assert len({one.copy for one in measured}) == 1
    assert measured[0].copy.median_us > 0


def test_what_fails_only_when_it_is_timed_is_left_out() -> None:
    made = 0

    def once(x: Any, weight: Any, case: Case) -> Any:
        nonlocal made
        made += 1
        if made > 1:
            raise RuntimeError("not while capturing")
        return ATEN.norm(x, weight, case)

    measured = measure(asked(), [provider("once", norm=once), OURS], rounds=2)
    assert [(one.status, one.reason) for one in measured] == [("failed", "RuntimeError: not while capturing"), ("timed", "")]


def test_the_timer_raises_where_nobody_asks_for_what_failed() -> None:
    def call() -> None:
        raise ValueError("first\nsecond")

    with pytest.raises(ValueError, match="first"):
        timing.time_together({"bad": [call]}, CPU, rounds=2)
    failed: dict[str, str] = {}
    timed = timing.time_together({"bad": [call], "good": [lambda: None]}, CPU, rounds=2, failed=failed)
    assert (set(timed), failed) == ({"good"}, {"bad": "ValueError: first"})


@pytest.mark.parametrize(
    ("changes", "problem", "sentence"),
    [
        ({"devices": ("cuda",)}, asked(), "one does not run on cpu"),
        ({"operations": ("forward",)}, asked("add_forward"), "one has no add_forward"),
        ({"backward": None}, asked("backward", device=torch.device("cuda")), "one has no backward to call directly"),
        ({}, asked("backward"), "one has no backward to call directly on the CPU"),
        ({"most_hidden": 32}, asked(), "one does not take rows of 64 bf16 elements"),
        ({"most_bytes": 127}, asked(), "one does not take rows of 64 bf16 elements"),
        ({}, asked(case=Case("c", "", 1, 8, weight_offset=1.0)), "one has no weight_offset"),
        ({}, asked(case=Case("c", "", 1, 8, round_before_weight=True)), "one has no round_before_weight"),
        ({"needs_weight": True}, asked(case=Case("c", "", 1, 8, weight="none")), "one needs a weight"),
        ({"most_bytes": 128, "most_hidden": 64}, asked(), ""),
    ],
)
def test_a_provider_says_what_it_does_not_take(changes: dict[str, Any], problem: Problem, sentence: str) -> None:
    assert provider("one", **changes).refuses(problem) == sentence


def test_dy_is_not_shared_with_who_overwrites_it() -> None:
    def backward(inputs: Any, case: Case) -> Any:
        return lambda: inputs.dy.fill_(torch.nan)

    inputs = problem.operands(asked("backward"), seed=0)
    provider("liger", backward=backward, overwrites_dy=True).bind(asked("backward"), inputs)()
    assert inputs.dy is not None
    assert bool(inputs.dy.isfinite().all())


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("operation", traffic.OPERATIONS)
def test_operations_are_captured_and_timed_on_a_gpu(operation: str) -> None:
    providers = [OURS, ATEN, inductor()]
    sized = problem.sized(operation, BY_NAME["Llama 3.1 8B"], BF16, device_of("cuda"), providers=3, elements=2**24)
    measured = measure(sized, providers, rounds=3)
    assert [(one.provider, one.reason) for one in measured] == [(one.name, "") for one in providers]
    assert all(one.fraction is not None and 0.05 < one.fraction < 1.5 for one in measured)


# Sizes and bytes


def test_few_rows_stay_few_and_others_fill_the_size_that_is_asked_for() -> None:
    few = problem.sized("forward", BY_NAME["few 16 × 4096"], BF16, CPU, elements=2**20)
    assert (few.rows, few.moved_bytes) == (16, 2 * 16 * 4096 * 2 + 4096 * 2)
    assert problem.sized("forward", BY_NAME["gpt-oss"], BF16, CPU, elements=2**20).rows == 2**20 // 2880
    assert problem.sized("forward", BY_NAME["hidden 262144"], BF16, CPU, elements=2**10).rows == 1


@pytest.mark.parametrize("case", [case for case in BY_NAME.values() if not case.few], ids=lambda case: case.name)
def test_the_rows_are_those_of_x(case: Case) -> None:
    sized = problem.sized("add_forward", case, BF16, CPU, elements=2**14)
    inputs = problem.operands(sized, seed=1)
    assert inputs.x.numel() == sized.elements
    assert inputs.residual is not None
    assert inputs.residual.shape == inputs.x.shape


def test_bytes_and_arithmetic_of_each_operation() -> None:
    moved = {operation: traffic.moved(operation, 3, 5, BF16, torch.float32) for operation in traffic.OPERATIONS}
    assert moved["forward"] == 15 * 4 + 20
    assert moved["add_forward"] == 15 * 8 + 20
    assert moved["backward"] == 15 * 6 + 40
    assert moved["forward+backward"] == moved["forward"] + moved["backward"]
    assert traffic.intensity("forward", 60, 15) == 1
    assert set(traffic.FLOPS) == {*traffic.OPERATIONS, *traffic.QUANTISED}
    assert traffic.moved("forward_quant", 3, 5, BF16, torch.float32) == 15 * 3 + 20 + 3 * 4
    assert traffic.moved("forward_quant_128", 3, 300, BF16) == 900 * 3 + 9 * 4
    assert traffic.moved("add_forward_quant", 3, 5, BF16) == 15 * 7 + 3 * 4


def test_another_seed_is_other_values_and_the_same_seed_the_same() -> None:
    first, again, other = (problem.operands(asked("backward"), seed) for seed in (0, 0, 1))
    assert first.dy is not None
    assert again.dy is not None
    assert other.dy is not None
    assert torch.equal(first.dy, again.dy)
    assert not torch.equal(first.dy, other.dy)
    assert not torch.equal(first.dy, first.x)


def test_ratios_are_of_bytes_by_time() -> None:
    case = Case("c", "", 10, 100, weight="none")
    one = measurement("one", 20, case=case, operation="add_forward", copy_us=5)
    assert (one.problem.moved_bytes, one.problem.copy_bytes) == (8000, 4000)
    assert (one.gb_s, one.copy_gb_s, one.fraction) == (0.4, 0.8, 0.5)
    assert one.spread == pytest.approx(0.02)
    none = measurement("none", None, case=case)
    assert (none.gb_s, none.fraction, none.spread) == (None, None, 0)


def test_peaks_are_of_whole_names() -> None:
    peak = devices.peak("NVIDIA H200")
    assert peak is not None
    assert (peak.gb_s, round(peak.ridge)) == (4800, 14)
    assert devices.peak("NVIDIA H200 MIG 1g.18gb") is None
    assert all(1 < peak.ridge < 110 for peak in devices.PEAKS.values())


# Eager calls


def test_host_times_of_each_mode() -> None:
    wrong, broken = provider("wrong", norm=off_by_a_percent_of_a_row), provider("broken", norm=raising)
    times = host.measure([OURS, ATEN, wrong, broken], BF16, CPU, rounds=3, calls=2)
    assert [one.mode for one in times[::4]] == list(host.MODES)
    for one in times:
        expected = {"wrong": "wrong", "broken": "failed"}.get(one.provider, "timed")
        # In grad mode its in-place addition is an error of autograd or a wrong answer, as the mode has it.
        assert one.status == expected or (one.provider == "wrong" and one.time is None)
        assert (one.time is not None) == (one.status == "timed")
    assert all(one.time.median_us > 1 for one in times if one.time)


def test_modes_are_what_they_say() -> None:
    seen: list[tuple[bool, bool]] = []

    def norm(x: torch.Tensor, weight: Any, case: Case) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), x.requires_grad))
        return ATEN.norm(x, weight, case)

    host.measure([provider("one", norm=norm)], BF16, CPU, rounds=2, calls=1)
    # One call to look at, one to warm up, two samples.
    assert seen == [(False, False)] * 4 + [(True, True)] * 8

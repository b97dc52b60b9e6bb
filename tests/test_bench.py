"""What benchmarks stand on: the cases, the bytes that must move, the timer."""

from __future__ import annotations

import time
import weakref

import pytest
import torch

from rmsnorm_ops.bench import cases, timing, traffic
from rmsnorm_ops.bench.cases import CASES, SIZES, Case
from rmsnorm_ops.rows import rows_of

CPU = torch.device("cpu")
ALL = (*CASES, *SIZES)
BY_NAME = {case.name: case for case in ALL}
FP16, BF16, FP32, FP64 = cases.DTYPES
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
every_case = pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)


# Cases


def test_names_are_unique_and_can_be_listed() -> None:
    assert len(BY_NAME) == len(ALL)
    assert not [case.name for case in ALL if "," in case.name or not case.source]


def test_the_sizes_of_models_and_the_odd_ones_are_there() -> None:
    sizes = {case.hidden for case in CASES}
    assert sizes >= {128, 2048, 2880, 4096, 5120, 7168, 8192, 16384}
    assert sizes >= {1, 7, 63, 769, 1000, 1001, 5125}


def test_the_tracked_sizes_are_dense_and_each_there_once() -> None:
    timed = [case for case in CASES if case.timed]
    assert [case.hidden for case in timed] == [128, 512, 1024, 2048, 2880, 4096, 5120, 7168, 8192, 16384]
    assert {case.layout for case in timed} == {"dense"}
    assert {case.weight for case in timed} == {"as x"}


def test_benchmarks_reach_the_other_sizes_and_few_rows() -> None:
    sizes = {case.hidden for case in ALL if case.layout == "dense" and not case.few}
    assert sizes >= {64, 576, 1001, 1536, 3584, 4095, 5125, 12288, 13824, 32768, 65536, 131072, 262144}
    few = {(case.rows, case.hidden) for case in ALL if case.few}
    assert few >= {(1, 4096), (16, 4096), (64, 4096), (256, 4096), (1, 7168), (64, 7168), (1, 16384)}
    assert few >= {(2048, 128), (1024, 8192), (4096, 4096)}
    assert {case.hidden for case in ALL if case.benched and not case.few} >= {128, 1024, 2880, 4096, 5120, 16384, 65536}


def test_the_options_are_covered() -> None:
    assert any(case.weight_offset == 1 for case in CASES)
    assert any(case.round_before_weight for case in CASES)
    assert {case.weight for case in CASES} == {"as x", "float32", "none"}
    assert {case.values for case in CASES} == {"normal", "huge", "tiny", "constant"}


@every_case
def test_operands_are_what_the_case_says(case: Case) -> None:
    rows = min(case.rows, 100)
    x, weight = cases.make(case, dtype=BF16, rows=rows)
    assert (x.dtype, x.shape[-1]) == (BF16, case.hidden)
    assert rows <= x.numel() // case.hidden < rows + 2 * case.heads
    assert bool(torch.isfinite(x).all())
    assert (weight is None) == (case.weight == "none")
    if weight is not None:
        assert weight.shape == (case.hidden,)
        assert weight.dtype is (FP32 if case.weight == "float32" else BF16)


@every_case
def test_the_seed_decides_the_values(case: Case) -> None:
    first, again, other = (cases.make(case, dtype=FP32, rows=3, seed=seed).x for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert torch.equal(first, other) == (case.values == "constant")


@pytest.mark.parametrize(
    ("name", "shape", "strides"),
    [
        ("head 128", (128, 128), (128, 1)),
        ("q of fused qkv", (2, 2, 32, 128), (2 * 6144, 6144, 128, 1)),
        ("k of fused qkv", (2, 8, 8, 128), (8 * 6144, 6144, 128, 1)),
        ("q transposed", (1, 8, 16, 256), (8 * 16 * 256, 256, 8 * 256, 1)),
        ("kv latent 512", (128, 512), (576, 1)),
        ("unaligned rows", (128, 1000), (1001, 1)),
        ("column-major", (128, 1000), (1, 128)),
    ],
)
def test_layouts(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    x, _ = cases.make(BY_NAME[name], dtype=BF16, rows=128)
    assert tuple(x.shape) == shape
    assert x.stride() == strides


def test_a_slice_starts_where_its_part_of_the_projection_does() -> None:
    x, _ = cases.make(BY_NAME["k of fused qkv"], dtype=BF16, rows=64)
    assert x.storage_offset() == 32 * 128


@every_case
def test_only_the_column_major_case_is_copied(case: Case) -> None:
    x, _ = cases.make(case, dtype=BF16, rows=64)
    assert (rows_of(x).tensor is x) == (case.layout != "columns")


@pytest.mark.parametrize("dtype", [BF16, FP32, FP64], ids=str)
def test_huge_and_tiny_leave_the_range_of_the_squares(dtype: torch.dtype) -> None:
    compute = FP64 if dtype is FP64 else FP32
    huge, _ = cases.make(BY_NAME["huge"], dtype=dtype)
    tiny, _ = cases.make(BY_NAME["tiny eps 0"], dtype=dtype)
    assert bool(huge.to(compute).square().sum(-1).isinf().all())
    assert bool((tiny.to(compute).square().sum(-1) == 0).all())
    # A subnormal x is beyond Triton's interpreter.
    assert float(tiny[tiny != 0].abs().min()) >= torch.finfo(dtype).smallest_normal


# Traffic


def test_copy_bytes() -> None:
    assert traffic.copy(10, BF16) == 10 * (2 + 2)


def test_forward_bytes() -> None:
    assert traffic.forward(3, 5, BF16) == 15 * (2 + 2)
    assert traffic.forward(3, 5, BF16, FP32) == 15 * (2 + 2) + 5 * 4


def test_add_forward_bytes() -> None:
    assert traffic.add_forward(3, 5, BF16, FP32) == 15 * (2 + 4 + 2 + 4)
    assert traffic.add_forward(3, 5, BF16, BF16, FP16) == 15 * (2 + 2 + 2 + 2) + 5 * 2


def test_backward_bytes() -> None:
    assert traffic.backward(3, 5, BF16) == 15 * (2 + 2 + 2)
    assert traffic.backward(3, 5, BF16, FP32) == 15 * (2 + 2 + 2) + 5 * (4 + 4)
    assert traffic.backward(3, 5, BF16, FP32, dweight=False) == 15 * (2 + 2 + 2) + 5 * 4


def test_gigabytes_are_decimal() -> None:
    assert traffic.gigabytes_per_second(2e9, 1e6) == 2
    assert traffic.gigabytes_per_second(4096, 1) == 4.096


# Timing


@pytest.mark.parametrize("size", [1, 100_000, 3 * 2**20, 2**29 + 1, 2**31])
def test_buffer_sets_exceed_the_caches_or_reach_the_cap(size: int) -> None:
    sets = timing.buffer_sets(size)
    assert sets * size >= timing.COLD_BYTES or sets == timing.MAX_SETS
    assert (sets - 1) * size < timing.COLD_BYTES, "more than it takes"
    assert sets <= timing.MAX_SETS


def test_a_sleep_takes_as_long_as_it_sleeps() -> None:
    timed = timing.time_together({"long": [lambda: time.sleep(4e-3)], "short": [lambda: time.sleep(1e-3)]}, CPU, rounds=5)
    assert list(timed) == ["long", "short"]
    assert 4000 <= timed["long"].low_us <= timed["long"].median_us <= timed["long"].high_us
    assert 1000 <= timed["short"].median_us < timed["long"].median_us


def test_microseconds_are_of_one_call_however_many_sets_there_are() -> None:
    timed = timing.time_together({"sets": [lambda: time.sleep(1e-3)] * 4}, CPU, rounds=3)
    assert 1000 <= timed["sets"].median_us < 3500


def test_short_calls_are_repeated_until_the_clock_can_tell() -> None:
    made = 0

    def call() -> None:
        nonlocal made
        made += 1

    timed = timing.time_together({"nothing": [call]}, CPU, rounds=3)
    assert 0 < timed["nothing"].median_us < 50
    assert made > 1000


def test_sets_are_used_in_turn_and_rounds_alternate() -> None:
    order: list[str] = []

    def call(name: str) -> None:
        order.append(name)
        time.sleep(timing.MIN_CLOCK_SECONDS)  # long enough for one pass a sample

    sets = {name: [lambda name=name, i=i: call(f"{name}{i}") for i in range(2)] for name in ("a", "b")}
    timing.time_together(sets, CPU, rounds=4)
    a, b = ["a0", "a1"], ["b0", "b1"]
    assert order[-16:] == [*b, *a, *a, *b, *b, *a, *a, *b]


def test_the_spread_is_between_the_outer_fifths() -> None:
    assert timing.summary([*map(float, range(100, -1, -1))]) == timing.Timing(median_us=50, low_us=20, high_us=80)


def test_outputs_rotate_and_stay_bounded() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    at_once: list[int] = []

    def call() -> torch.Tensor:
        at_once.append(sum(ref() is not None for ref in alive))
        output = torch.empty(1)
        alive.append(weakref.ref(output))
        return output

    timing._rotate([call] * 3, passes=4)
    # While a call runs, the outputs of the three before it are alive and no others.
    assert at_once == [0, 1, 2, *[3] * 9]


@needs_gpu
@pytest.mark.gpu
def test_a_graph_times_a_copy_near_the_speed_of_memory() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    small, large = (torch.empty(2, size, dtype=torch.uint8, device=device) for size in (2**26, 2**28))
    calls = {"small": [lambda: small[0].copy_(small[1])] * 16, "large": [lambda: large[0].copy_(large[1])] * 4}
    timed = timing.time_together(calls, device, rounds=5)
    assert timed["large"].median_us == pytest.approx(4 * timed["small"].median_us, rel=0.3)
    assert 50 < traffic.gigabytes_per_second(2**29, timed["large"].median_us) < 20000


@needs_gpu
@pytest.mark.gpu
def test_a_graph_holds_one_output_more_than_there_are_sets() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.empty(2**22, device=device)
    addresses: list[int] = []

    def call() -> torch.Tensor:
        y = x + 1
        addresses.append(y.data_ptr())
        return y

    timing.time_together({"add": [call] * 3}, device, rounds=2)
    captured = addresses[3:]  # the first pass warmed up
    assert len(captured) >= timing.MIN_GRAPH_CALLS
    assert len(set(captured)) == 4
    assert all(len(set(captured[i : i + 3])) == 3 for i in range(len(captured) - 2))


@needs_gpu
@pytest.mark.gpu
def test_what_cannot_be_captured_is_left_out() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x, stream = torch.ones(2**20, device=device), torch.cuda.current_stream()
    failed: dict[str, str] = {}
    calls = {"waits": [lambda: float(x.sum())], "good": [lambda: x + 1]}
    timed = timing.time_together(calls, device, rounds=2, failed=failed)
    assert (set(timed), set(failed)) == ({"good"}, {"waits"})
    assert torch.cuda.current_stream() == stream

"""Launch plans: pure functions of the row and the device. After a retune, EXPECTTEST_ACCEPT=1 rewrites the pinned tables."""

import dataclasses
import inspect
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from rmsnorm_ops.inspect.targets import TARGETS
from rmsnorm_ops.plan import REGISTERS, DeviceLimits, LaunchPlan, RowProblem, forward_plan

H200, AMD = TARGETS["sm_90"].limits, TARGETS["gfx942"].limits
NVIDIA = replace(H200, cooperative=False)
LARGEST_TILE = 2**20  # elements of a Triton tensor
PINNED_HIDDEN = (
    1, 64, 100, 128, 512, 1000, 1001, 1024, 1536, 2048, 2880, 4095, 4096, 5120, 5125, 7168, 8192, 16384, 16385, 32768,
    40960, 65536, 2**17, 2**20,
)  # fmt: skip

device_limits = st.sampled_from((*(target.limits for target in TARGETS.values()), NVIDIA, replace(NVIDIA, max_threads=512)))
any_hidden = st.one_of(st.integers(1, 70_000), st.integers(0, 20).map(lambda k: 2**k), st.integers(1, 20).map(lambda k: 2**k + 1))
element = st.sampled_from(((2, False), (4, False), (8, True)))
problems = st.builds(lambda hidden, element: RowProblem(hidden, *element, element[0]), any_hidden, element)


def is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


@settings(max_examples=1000)
@given(problem=problems, limits=device_limits)
def test_a_plan_fits_the_row_and_the_device(problem: RowProblem, limits: DeviceLimits) -> None:
    plan = forward_plan(problem, limits)
    assert is_power_of_two(plan.warps)
    assert plan.warps * limits.warp_size <= limits.max_threads
    assert is_power_of_two(plan.rows)
    assert is_power_of_two(plan.head)
    assert plan.tail == 0 or is_power_of_two(plan.tail)
    assert plan.rows * plan.head <= LARGEST_TILE
    if plan.strategy == "resident":
        assert plan.head + plan.tail >= problem.hidden, "columns beyond the blocks are never read"
        assert plan.head < 2 * problem.hidden, "a block twice as wide would do nothing"
        assert plan.head < problem.hidden or plan.tail == 0, "a tail wholly beyond the row would do nothing"
        registers = plan.rows * (plan.head + plan.tail) // (plan.warps * limits.warp_size) * (2 if problem.fp64 else 1)
        assert registers <= 96, "x alone; the weight takes as many of the 255, and from 132 on ptxas spilled"
    elif plan.strategy == "shared":
        assert_programs_share(plan, problem, limits)
    else:
        assert (plan.rows, plan.tail) == (1, 0), "what the streamed kernel assumes"


def assert_programs_share(plan: LaunchPlan, problem: RowProblem, limits: DeviceLimits) -> None:
    """Slices that cover the row, and programs that can all run at once: none may wait for one that does not."""
    assert (plan.rows, plan.tail) == (1, 0), "what the shared kernels assume"
    assert (plan.slices - 1) * plan.head < problem.hidden <= plan.slices * plan.head
    assert plan.slices <= plan.slots < 2 * plan.slices
    assert is_power_of_two(plan.slots)
    per_processor = plan.persistent // limits.processors
    assert plan.slices <= plan.persistent == per_processor * limits.processors
    threads = plan.warps * limits.warp_size
    assert threads * plan.max_registers * per_processor <= REGISTERS
    assert threads * per_processor <= 1536, "what a processor of an RTX 4090 runs at once; others 2048"
    assert (plan.stages - 1) * plan.head * problem.loaded * per_processor < limits.shared_memory


@given(problem=problems, limits=device_limits, n_rows=st.integers(0, 5000))
def test_the_programs_cover_each_row_once(problem: RowProblem, limits: DeviceLimits, n_rows: int) -> None:
    plan = forward_plan(problem, limits)
    if plan.strategy == "shared":
        groups = plan.programs(n_rows) // plan.slices
        assert sorted(row for group in range(groups) for row in range(group, n_rows, groups)) == list(range(n_rows))
        return
    assert plan.persistent == 0, "the other forward kernels take one tile a program"
    covered = [program * plan.rows + row for program in range(plan.programs(n_rows)) for row in range(plan.rows)]
    assert [row for row in covered if row < n_rows] == list(range(n_rows))
    assert len(covered) < n_rows + plan.rows, "a program without a row"


def test_a_plan_cannot_depend_on_the_number_of_rows() -> None:
    """The same row must get the same kernel, and so the same bits, in any batch: no argument says how many rows there are."""
    assert list(inspect.signature(forward_plan).parameters) == ["problem", "limits"]
    names = [field.name for record in (RowProblem, DeviceLimits) for field in dataclasses.fields(record)]
    assert not [name for name in names if "rows" in name or "batch" in name]


@given(n_rows=st.integers(0, 2**40), rows=st.sampled_from((1, 2, 16, 2048)))
def test_programs_is_a_rounded_up_quotient(n_rows: int, rows: int) -> None:
    plan = LaunchPlan("resident", rows=rows, head=64, tail=0, warps=4)
    assert (plan.programs(n_rows) - 1) * rows < n_rows <= plan.programs(n_rows) * rows


def table(limits: DeviceLimits) -> str:
    lines = []
    for hidden in PINNED_HIDDEN:
        cells = []
        for itemsize, fp64 in ((2, False), (4, False), (8, True)):
            plan = forward_plan(RowProblem(hidden, itemsize, fp64, itemsize), limits)
            blocks = f"{plan.head}+{plan.tail}" if plan.tail else str(plan.head)
            blocks += f"/{plan.slices}" if plan.slices > 1 else ""
            cells.append(f"{plan.strategy} {plan.rows}x{blocks} w{plan.warps}".ljust(24))
        lines.append(f"{hidden:7} | {' | '.join(cells)}".rstrip())
    return "\n".join([f"{'hidden':>7} | {'16-bit':24} | {'fp32':24} | fp64", *lines])


def test_the_plans_of_an_h200() -> None:
    assert_expected_inline(
        table(H200),
        """\
 hidden | 16-bit                   | fp32                     | fp64
      1 | resident 2048x1 w4       | resident 2048x1 w4       | resident 2048x1 w4
     64 | resident 32x64 w4        | resident 32x64 w4        | resident 32x64 w4
    100 | resident 16x128 w2       | resident 16x128 w4       | resident 16x128 w4
    128 | resident 16x128 w4       | resident 16x128 w4       | resident 16x128 w4
    512 | resident 4x512 w4        | resident 4x512 w4        | resident 4x512 w4
   1000 | resident 2x1024 w2       | resident 2x1024 w4       | resident 2x1024 w4
   1001 | resident 4x1024 w2       | resident 2x1024 w4       | resident 2x1024 w4
   1024 | resident 2x1024 w4       | resident 2x1024 w4       | resident 2x1024 w4
   1536 | resident 1x1024+512 w2   | resident 1x1024+512 w4   | resident 1x1024+512 w8
   2048 | resident 1x2048 w4       | resident 1x2048 w4       | resident 1x2048 w4
   2880 | resident 1x2048+1024 w4  | resident 1x2048+1024 w8  | resident 1x2048+1024 w16
   4095 | resident 2x4096 w4       | resident 1x4096 w8       | resident 1x4096 w8
   4096 | resident 1x4096 w8       | resident 1x4096 w8       | resident 1x4096 w8
   5120 | resident 1x4096+1024 w4  | resident 1x4096+1024 w8  | resident 1x4096+1024 w16
   5125 | resident 2x8192 w8       | resident 1x4096+2048 w16 | resident 1x8192 w16
   7168 | resident 1x8192 w8       | resident 1x8192 w16      | resident 1x8192 w16
   8192 | resident 1x8192 w16      | resident 1x8192 w16      | resident 1x8192 w16
  16384 | resident 1x16384 w16     | resident 1x16384 w16     | streamed 1x8192 w32
  16385 | streamed 1x16384 w32     | streamed 1x16384 w32     | streamed 1x8192 w32
  32768 | streamed 1x16384 w32     | shared 1x4096/8 w8       | streamed 1x8192 w32
  40960 | shared 1x8192/5 w8       | shared 1x4096/10 w8      | streamed 1x8192 w32
  65536 | shared 1x8192/8 w8       | shared 1x4096/16 w8      | streamed 1x8192 w32
 131072 | shared 1x8192/16 w8      | shared 1x4096/32 w8      | streamed 1x8192 w32
1048576 | streamed 1x16384 w32     | streamed 1x16384 w32     | streamed 1x8192 w32""",
    )


def test_the_plans_of_an_amd_gpu() -> None:
    assert_expected_inline(
        table(AMD),
        """\
 hidden | 16-bit                   | fp32                     | fp64
      1 | resident 2048x1 w2       | resident 2048x1 w2       | resident 2048x1 w2
     64 | resident 32x64 w2        | resident 32x64 w2        | resident 32x64 w2
    100 | resident 16x128 w1       | resident 16x128 w2       | resident 16x128 w2
    128 | resident 16x128 w2       | resident 16x128 w2       | resident 16x128 w2
    512 | resident 4x512 w2        | resident 4x512 w2        | resident 4x512 w2
   1000 | resident 2x1024 w1       | resident 2x1024 w2       | resident 2x1024 w2
   1001 | resident 4x1024 w1       | resident 2x1024 w2       | resident 2x1024 w2
   1024 | resident 2x1024 w2       | resident 2x1024 w2       | resident 2x1024 w2
   1536 | resident 1x1024+512 w1   | resident 1x1024+512 w2   | resident 1x1024+512 w4
   2048 | resident 1x2048 w2       | resident 1x2048 w2       | resident 1x2048 w2
   2880 | resident 1x2048+1024 w2  | resident 1x2048+1024 w4  | resident 1x2048+1024 w8
   4095 | resident 2x4096 w2       | resident 1x4096 w4       | resident 1x4096 w4
   4096 | resident 1x4096 w4       | resident 1x4096 w4       | resident 1x4096 w4
   5120 | resident 1x4096+1024 w2  | resident 1x4096+1024 w4  | resident 1x4096+1024 w8
   5125 | resident 2x8192 w4       | resident 1x4096+2048 w8  | resident 1x8192 w8
   7168 | resident 1x8192 w4       | resident 1x8192 w8       | resident 1x8192 w8
   8192 | resident 1x8192 w8       | resident 1x8192 w8       | resident 1x8192 w8
  16384 | resident 1x16384 w8      | resident 1x16384 w8      | streamed 1x8192 w16
  16385 | streamed 1x16384 w16     | streamed 1x16384 w16     | streamed 1x8192 w16
  32768 | streamed 1x16384 w16     | streamed 1x16384 w16     | streamed 1x8192 w16
  40960 | streamed 1x16384 w16     | streamed 1x16384 w16     | streamed 1x8192 w16
  65536 | streamed 1x16384 w16     | streamed 1x16384 w16     | streamed 1x8192 w16
 131072 | streamed 1x16384 w16     | streamed 1x16384 w16     | streamed 1x8192 w16
1048576 | streamed 1x16384 w16     | streamed 1x16384 w16     | streamed 1x8192 w16""",
    )


def test_a_forward_is_planned_for_the_width_of_a_warp_alone() -> None:
    """Where programs do not share rows: so the tables of NVIDIA and of AMD stand for every target."""
    for limits in (replace(target.limits, cooperative=False) for target in TARGETS.values()):
        like = AMD if limits.warp_size == 64 else NVIDIA
        for hidden in PINNED_HIDDEN:
            assert forward_plan(RowProblem(hidden, 2), limits) == forward_plan(RowProblem(hidden, 2), like)


@pytest.mark.parametrize("warp_size", [32, 64])
def test_a_thousand_threads_at_most(warp_size: int) -> None:
    """16 wavefronts of 64: more do not launch on CDNA."""
    limits = replace(NVIDIA, warp_size=warp_size)
    widest = max(forward_plan(RowProblem(hidden, 2), limits).warps for hidden in range(1, 70_000, 7))
    assert widest * warp_size <= 1024

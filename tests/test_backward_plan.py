"""The backward's launch plans. After a retune, EXPECTTEST_ACCEPT=1 rewrites the pinned table."""

from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from rmsnorm_ops.plan import DeviceLimits, RowProblem, backward_plan, partial_sum_plan, weight_gradient_plan
from tests.test_plan import assert_programs_share, is_power_of_two

H200 = DeviceLimits(warp_size=32, max_threads=1024, processors=132, shared_memory=227 * 1024, cooperative=True)
MI300X = DeviceLimits(warp_size=64, max_threads=1024, processors=304, shared_memory=64 * 1024)
PINNED_HIDDEN = (
    1, 64, 96, 128, 256, 512, 768, 1024, 1536, 2048, 2880, 3584, 4096, 5120, 7168, 8192, 12288, 16384, 16385, 20480,
    32768, 65536, 2**17, 2**20)  # fmt: skip

device_limits = st.sampled_from((H200, MI300X))
hidden_sizes = st.one_of(st.integers(1, 70_000), st.integers(0, 20).map(lambda k: 2**k))
problems = st.builds(
    lambda hidden, itemsize, dsum: RowProblem(hidden, itemsize, itemsize == 8, itemsize * (3 if dsum else 2)),
    hidden_sizes,
    st.sampled_from((2, 4, 8)),
    st.booleans(),
)


@settings(max_examples=1000)
@given(problem=problems, limits=device_limits)
def test_a_plan_fits_the_row_and_the_device(problem: RowProblem, limits: DeviceLimits) -> None:
    plan = backward_plan(problem, limits)
    assert is_power_of_two(plan.warps)
    assert plan.warps * limits.warp_size <= limits.max_threads
    if plan.strategy == "streamed":
        assert (plan.rows, plan.tail, plan.persistent, plan.stages) == (1, 0, 0, 1), "what the streamed kernel assumes"
        return
    if plan.strategy == "shared":
        assert_programs_share(plan, problem, limits)
        return
    assert plan.head + plan.tail >= problem.hidden, "columns beyond the blocks are never read"
    assert plan.head < 2 * problem.hidden, "a block twice as wide would do nothing"
    assert plan.persistent > 0, "partial sums of dweight as many as programs"
    buffers = (plan.stages - 1) * plan.rows * (plan.head + plan.tail) * problem.loaded
    assert buffers < limits.shared_memory, "tiles in flight do not fit shared memory"


@given(problem=problems, limits=device_limits, n_rows=st.integers(1, 10_000))
def test_persistent_programs_cover_each_row_once(problem: RowProblem, limits: DeviceLimits, n_rows: int) -> None:
    """As the kernel walks: program, or group of programs, p takes tiles p, p + groups, …"""
    plan = backward_plan(problem, limits)
    groups, tiles = plan.programs(n_rows) // plan.slices, -(-n_rows // plan.rows)
    walked = sorted(tile for group in range(groups) for tile in range(group, tiles, groups))
    assert walked == list(range(tiles))
    assert groups <= tiles, "a program without a tile would leave its part of dweight unwritten"
    assert plan.programs(n_rows) == groups * plan.slices


@given(hidden=hidden_sizes, limits=device_limits)
def test_the_small_kernels_cover_every_column(hidden: int, limits: DeviceLimits) -> None:
    for plan in (weight_gradient_plan(hidden, limits), partial_sum_plan(hidden)):
        assert is_power_of_two(plan.rows)
        assert is_power_of_two(plan.head)
        assert plan.warps * limits.warp_size <= limits.max_threads
    assert weight_gradient_plan(hidden, limits).persistent > 0


def test_pinned_plans() -> None:
    lines = [f"{'hidden':>7} | {'H200, bf16':34} | MI300X, fp32"]
    for hidden in PINNED_HIDDEN:
        cells = []
        for limits, itemsize in ((H200, 2), (MI300X, 4)):
            plan = backward_plan(RowProblem(hidden, itemsize, False, 2 * itemsize), limits)
            blocks = f"{plan.head}+{plan.tail}" if plan.tail else str(plan.head)
            blocks += f"/{plan.slices}" if plan.slices > 1 else ""
            loop = f"x{plan.persistent // limits.processors} s{plan.stages}" if plan.persistent else ""
            cells.append(f"{plan.strategy} {plan.rows}x{blocks} w{plan.warps} {loop}".ljust(34))
        lines.append(f"{hidden:7} | {' | '.join(cells)}".rstrip())
    assert_expected_inline(
        "\n".join(lines),
        """\
 hidden | H200, bf16                         | MI300X, fp32
      1 | resident 8192x1 w16 x1 s3          | resident 8192x1 w8 x1 s1
     64 | resident 128x64 w16 x1 s3          | resident 128x64 w8 x1 s1
     96 | resident 64x128 w16 x1 s4          | resident 64x128 w8 x1 s1
    128 | resident 64x128 w16 x1 s3          | resident 64x128 w8 x1 s1
    256 | resident 32x256 w16 x1 s3          | resident 32x256 w8 x1 s1
    512 | resident 2x512 w2 x6 s3            | resident 2x512 w1 x6 s3
    768 | resident 1x1024 w1 x8 s3           | resident 1x1024 w1 x8 s3
   1024 | resident 2x1024 w4 x3 s3           | resident 2x1024 w2 x3 s3
   1536 | resident 1x2048 w4 x3 s4           | resident 1x2048 w2 x3 s4
   2048 | resident 1x2048 w4 x3 s3           | resident 1x2048 w2 x3 s3
   2880 | resident 1x2048+1024 w4 x2 s4      | resident 1x2048+1024 w4 x2 s3
   3584 | resident 1x4096 w4 x2 s3           | resident 1x4096 w2 x2 s2
   4096 | resident 2x4096 w8 x1 s3           | resident 2x4096 w4 x1 s1
   5120 | resident 1x4096+1024 w4 x1 s4      | resident 1x4096+1024 w4 x1 s2
   7168 | resident 1x8192 w8 x1 s3           | resident 1x8192 w4 x1 s1
   8192 | resident 1x8192 w8 x1 s3           | resident 1x8192 w4 x1 s1
  12288 | resident 1x8192+4096 w16 x1 s3     | resident 1x16384 w8 x1 s1
  16384 | shared 1x1024/16 w1 x8 s4          | resident 1x16384 w8 x1 s1
  16385 | streamed 1x16384 w32               | streamed 1x16384 w16
  20480 | shared 1x1024/20 w1 x8 s4          | streamed 1x16384 w16
  32768 | shared 1x1024/32 w1 x8 s4          | streamed 1x16384 w16
  65536 | shared 1x1024/64 w1 x8 s4          | streamed 1x16384 w16
 131072 | shared 1x4096/32 w4 x2 s4          | streamed 1x16384 w16
1048576 | streamed 1x16384 w32               | streamed 1x16384 w16""",
    )

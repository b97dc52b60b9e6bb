"""The backward's launch plans. After a retune, EXPECTTEST_ACCEPT=1 rewrites the pinned table."""

from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from rmsnorm_ops.inspect.targets import TARGETS
from rmsnorm_ops.plan import DeviceLimits, LaunchPlan, RowProblem, backward_plan, partial_sum_plan, weight_gradient_plan
from tests.test_plan import assert_programs_share, is_power_of_two

H200, MI300X = TARGETS["sm_90"].limits, TARGETS["gfx942"].limits
PINNED_HIDDEN = (
    1, 64, 96, 128, 256, 512, 768, 1024, 1536, 2048, 2880, 3584, 4096, 5120, 7168, 8192, 12288, 16384, 16385, 20480,
    32768, 65536, 2**17, 2**20)  # fmt: skip

device_limits = st.sampled_from([target.limits for target in TARGETS.values()])
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
    tile = plan.rows * (plan.head + plan.tail)
    if limits.ahead == "registers":
        assert plan.stages <= 2
        ahead = (plan.stages - 1) * tile * problem.loaded // 4 // (plan.warps * limits.warp_size)
        assert ahead <= 64, "half of a tile's registers"
    else:
        programs = plan.persistent // limits.processors
        buffers = (plan.stages - 1) * tile * problem.loaded
        assert programs * buffers < limits.shared_memory, "tiles in flight do not fit the processor's shared memory"


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


def described(plan: LaunchPlan, limits: DeviceLimits) -> str:
    blocks = f"{plan.head}+{plan.tail}" if plan.tail else str(plan.head)
    blocks += f"/{plan.slices}" if plan.slices > 1 else ""
    loop = f" x{plan.persistent // limits.processors} s{plan.stages}" if plan.persistent else ""
    return f"{plan.strategy} {plan.rows}x{blocks} w{plan.warps}{loop}"


def test_pinned_plans() -> None:
    lines = [f"{'hidden':>7} | {'H200, bf16':34} | MI300X, fp32"]
    for hidden in PINNED_HIDDEN:
        cells = []
        for limits, itemsize in ((H200, 2), (MI300X, 4)):
            plan = backward_plan(RowProblem(hidden, itemsize, False, 2 * itemsize), limits)
            cells.append(described(plan, limits).ljust(34))
        lines.append(f"{hidden:7} | {' | '.join(cells)}".rstrip())
    assert_expected_inline(
        "\n".join(lines),
        """\
 hidden | H200, bf16                         | MI300X, fp32
      1 | resident 8192x1 w16 x1 s3          | resident 8192x1 w8 x1 s1
     64 | resident 128x64 w16 x1 s3          | resident 128x64 w8 x1 s2
     96 | resident 64x128 w16 x1 s4          | resident 64x128 w8 x1 s2
    128 | resident 64x128 w16 x1 s3          | resident 64x128 w8 x1 s2
    256 | resident 32x256 w16 x1 s3          | resident 32x256 w8 x1 s2
    512 | resident 2x512 w2 x6 s3            | resident 2x512 w1 x6 s2
    768 | resident 1x1024 w1 x8 s3           | resident 1x1024 w1 x8 s2
   1024 | resident 2x1024 w4 x3 s3           | resident 2x1024 w2 x3 s2
   1536 | resident 1x2048 w4 x3 s4           | resident 1x2048 w2 x3 s2
   2048 | resident 1x2048 w4 x3 s3           | resident 1x2048 w2 x3 s2
   2880 | resident 1x2048+1024 w4 x2 s4      | resident 1x2048+1024 w4 x2 s2
   3584 | resident 1x4096 w4 x2 s3           | resident 1x4096 w2 x2 s1
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
 131072 | shared 1x1024/128 w1 x8 s4         | streamed 1x16384 w16
1048576 | streamed 1x16384 w32               | streamed 1x16384 w16""",
    )


def test_how_far_ahead_each_part_loads() -> None:
    """Rows, warps and programs are those of the table above, for the width of a warp; stages are what a part has room for."""
    parts = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
    lines = [" ".join(["hidden fp32 dsum", *(part.rjust(7) for part in parts)])]
    for hidden in (128, 512, 1024, 1536, 2048, 2880, 4096, 5120, 8192, 16384):
        for itemsize, dsum in ((2, 0), (2, 1), (4, 0), (4, 1)):
            problem = RowProblem(hidden, itemsize, False, itemsize * (2 + dsum))
            stages = [str(backward_plan(problem, TARGETS[part].limits).stages).rjust(7) for part in parts]
            lines.append(" ".join([f"{hidden:6} {itemsize == 4!s:>4.1} {bool(dsum)!s:>4.1}", *stages]))
    assert_expected_inline(
        "\n".join(lines),
        """\
hidden fp32 dsum   sm_80   sm_89   sm_90  sm_100  sm_120  gfx90a  gfx942  gfx950 gfx1100 gfx1201
   128    F    F       3       3       3       3       3       2       2       2       2       2
   128    F    T       3       3       3       3       3       2       2       2       2       2
   128    T    F       3       2       3       3       2       2       2       2       2       2
   128    T    T       2       2       3       3       2       2       2       2       2       2
   512    F    F       3       3       3       3       3       2       2       2       2       2
   512    F    T       3       3       3       3       3       2       2       2       2       2
   512    T    F       3       2       3       3       2       2       2       2       2       2
   512    T    T       3       2       3       3       2       2       2       2       2       2
  1024    F    F       3       3       3       3       3       2       2       2       2       2
  1024    F    T       3       3       3       3       3       2       2       2       2       2
  1024    T    F       3       3       3       3       3       2       2       2       2       2
  1024    T    T       3       2       3       3       2       2       2       2       2       2
  1536    F    F       4       4       4       4       4       2       2       2       2       2
  1536    F    T       4       3       4       4       3       2       2       2       2       2
  1536    T    F       4       3       4       4       3       2       2       2       2       2
  1536    T    T       3       2       4       4       2       2       2       2       2       2
  2048    F    F       3       3       3       3       3       2       2       2       2       2
  2048    F    T       3       3       3       3       3       2       2       2       2       2
  2048    T    F       3       3       3       3       3       2       2       2       2       2
  2048    T    T       3       2       3       3       2       2       2       2       2       2
  2880    F    F       4       4       4       4       4       2       2       2       2       2
  2880    F    T       4       3       4       4       3       2       2       2       2       2
  2880    T    F       4       3       4       4       3       2       2       2       2       2
  2880    T    T       3       2       4       4       2       2       2       2       2       2
  4096    F    F       3       3       3       3       3       2       2       2       2       2
  4096    F    T       3       3       3       3       3       1       1       1       1       1
  4096    T    F       3       2       3       3       2       1       1       1       1       1
  4096    T    T       2       2       3       3       2       1       1       1       1       1
  5120    F    F       4       4       4       4       4       1       1       1       1       1
  5120    F    T       4       4       4       4       4       1       1       1       1       1
  5120    T    F       4       3       4       4       3       2       2       2       2       2
  5120    T    T       3       2       4       4       2       2       2       2       2       2
  8192    F    F       3       3       3       3       3       2       2       2       2       2
  8192    F    T       3       3       3       3       3       1       1       1       1       1
  8192    T    F       3       2       3       3       2       1       1       1       1       1
  8192    T    T       2       2       3       3       2       1       1       1       1       1
 16384    F    F       4       3       4       4       3       2       2       2       2       2
 16384    F    T       4       2       4       4       2       1       1       1       1       1
 16384    T    F       3       2       4       4       2       1       1       1       1       1
 16384    T    T       2       1       3       3       1       1       1       1       1       1""",
    )

"""How quantising forwards are launched: one power-of-two block a row, which registers hold, or a row in blocks of one size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline

from rmsnorm_ops import device
from rmsnorm_ops.plan import RowProblem
from rmsnorm_ops.plan_quant import forward_quant_plan

H200 = device.limits(torch.device("cpu"))
CDNA = replace(H200, warp_size=64, cooperative=False)


@pytest.mark.parametrize("limits", [H200, CDNA], ids=["warps of 32", "wavefronts of 64"])
def test_a_row_fits(limits: device.DeviceLimits) -> None:
    for hidden in [*range(1, 300), *range(300, 40000, 97), 16384, 16385, 2**20]:
        plan = forward_quant_plan(RowProblem(hidden, 2), limits)
        threads = plan.warps * limits.warp_size
        assert limits.warp_size <= threads <= limits.max_threads
        assert plan.head.bit_count() == 1
        assert (plan.tail, plan.slices, plan.persistent) == (0, 1, 0)
        assert plan.rows * plan.head <= 32 * threads
        assert plan.strategy == "streamed" or plan.head >= hidden
        assert plan == forward_quant_plan(RowProblem(hidden, 4), limits), "fp32 and half types, with or without a residual"


def test_the_table() -> None:
    plans = {hidden: forward_quant_plan(RowProblem(hidden, 2), H200) for hidden in (1, 64, 128, 1000, 4096, 5120, 16384, 16385)}
    assert_expected_inline(
        "\n".join(f"{hidden:6} {plan.strategy} {plan.rows}×{plan.head}, {plan.warps} warps" for hidden, plan in plans.items()),
        """\
     1 resident 2048×1, 4 warps
    64 resident 32×64, 4 warps
   128 resident 16×128, 4 warps
  1000 resident 2×1024, 4 warps
  4096 resident 1×4096, 8 warps
  5120 resident 1×8192, 16 warps
 16384 resident 1×16384, 16 warps
 16385 streamed 1×16384, 32 warps""",
    )

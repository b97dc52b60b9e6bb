"""What the compiler makes of the kernels that quantise: wide loads and stores, no spills, no division an element, and sums that
are laid out alike however x is aligned."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from rmsnorm_ops.contracts_quant import FORMATS
from tests.machine_code import compile_all

if sys.platform != "linux":
    pytest.skip("needs Triton, which is for Linux", allow_module_level=True)

Facts = dict[str, Any]
ALL = 0  # one scale, which is given
VARIANTS = ("aligned", "unaligned pointer", "odd stride", "two strides")
SIZES = tuple(
    {"target": target, "hidden": hidden, "weight": "bf16", "codes": "e4m3fn", "group": group}
    for target, hiddens in (("sm_90", (128, 1024, 4096, 16384, 20000)), ("gfx942", (128, 4096)))
    for hidden in hiddens
    for group in (None, 128, ALL)
)
EVERY_FORMAT = tuple(
    {"target": target, "hidden": 4096, "codes": form.name, "group": None}
    for target in ("sm_80", "sm_89", "sm_90", "gfx942", "gfx950")
    for form in FORMATS.values()
)
LAID_OUT = tuple(
    {"target": "sm_90", "hidden": hidden, "dtype": dtype, "weight": "fp32", "codes": "int8", "group": group, "variant": variant}
    for hidden, dtype, group in ((128, "bf16", None), (1000, "bf16", 64), (4096, "fp32", 128), (20000, "bf16", None))
    for variant in VARIANTS
)  # fmt: skip


def label(kernel: Facts) -> str:
    return "-".join(str(value).replace(" ", "-") for value in kernel.values())


def narrow(accesses: dict[str, int]) -> int:
    """Those of fewer than 16 bytes."""
    return sum(count for width, count in accesses.items() if int(width) < 16)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    """All of them, by one process that does not interpret."""
    requests = [*SIZES, *EVERY_FORMAT, *LAID_OUT]
    found = compile_all("forward_quant", requests, str(tmp_path_factory.mktemp("triton")))
    return {label(request): facts for request, facts in zip(requests, found, strict=True)}


@pytest.mark.parametrize("request_", SIZES, ids=label)
def test_memory_traffic(request_: Facts, compiled: dict[str, Facts]) -> None:
    facts = compiled[label(request_)]
    scalar = request_["group"] == ALL  # the scale itself
    assert narrow(facts["stores"]) == (not scalar), "q by 16 bytes; scales, one store"
    assert facts["spilled_bytes"] == 0
    assert facts["narrow_arithmetic"] == []
    assert facts["ordinary_slow"] == [], "an element is not divided: a group is"
    if not scalar:
        assert narrow(facts["loads"]) == 0, "x and weight, by 16 bytes"
        assert facts["moved"] < 2048, "y stays in the registers it is in"


@pytest.mark.parametrize("request_", EVERY_FORMAT, ids=label)
def test_every_format_on_every_target(request_: Facts, compiled: dict[str, Facts]) -> None:
    """By one instruction that rounds once where the target has it; elsewhere in integers."""
    facts = compiled[label(request_)]
    assert facts["spilled_bytes"] == 0
    conversion = f"cvt.rn.satfinite.{request_['codes'].removesuffix('fn')}x2.f32"
    by_hardware = request_["target"] == "sm_90" and request_["codes"] in ("e4m3fn", "e5m2")
    assert facts.get("conversions", []) == [conversion] * by_hardware


@pytest.mark.parametrize("first", LAID_OUT[:: len(VARIANTS)], ids=label)
def test_a_row_is_summed_alike_however_x_is_aligned(first: Facts, compiled: dict[str, Facts]) -> None:
    layouts = [compiled[label({**first, "variant": variant})]["reductions"] for variant in VARIANTS]
    assert layouts[0]
    assert layouts.count(layouts[0]) == len(VARIANTS)

"""What the compiler makes of the forward kernels, read without a GPU: wide loads, one pass, one rsqrt, no spills, and reductions
that are laid out alike however x is aligned."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from rmsnorm_ops import prepared

if sys.platform != "linux":
    pytest.skip("needs Triton, which is for Linux", allow_module_level=True)

from tests.machine_code import VARIANTS, compile_all

Facts = dict[str, Any]
KERNELS = (
    *({"target": "sm_90", "hidden": hidden} for hidden in (128, 2880, 4096, 5120, 16384, 65536)),
    *({"target": "gfx942", "hidden": hidden} for hidden in (128, 4096, 5120, 65536)),
    {"target": "sm_80", "hidden": 4096},
    {"target": "sm_90", "hidden": 4096, "dtype": "fp32"},
    {"target": "sm_90", "hidden": 4096, "dtype": "fp64"},
    {"target": "sm_90", "hidden": 4096, "weight": "bf16"},
    # Just above a power of two, where one of two blocks is small.
    {"target": "sm_90", "hidden": 8448, "dtype": "fp32", "weight": "fp32"},
    {"target": "sm_90", "hidden": 4200, "dtype": "fp64", "weight": "fp64"},
)
LAID_OUT = (128, 1001, 4096, 5120, 65536)
ELEMENT_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}


def label(kernel: Facts) -> str:
    return "-".join(str(value).replace(" ", "-") for value in kernel.values())


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    """All of them, by one process."""
    requests = [*KERNELS, *({"target": "sm_90", "hidden": hidden, "variant": v} for hidden in LAID_OUT for v in VARIANTS)]
    found = compile_all("forward", requests, str(tmp_path_factory.mktemp("triton")))
    return {label(request): facts for request, facts in zip(requests, found, strict=True)}


@pytest.fixture(params=KERNELS, ids=label)
def facts(request: pytest.FixtureRequest, compiled: dict[str, Facts]) -> Facts:
    return compiled[label(request.param)]


def is_resident(facts: Facts) -> bool:
    return facts["strategy"] == "resident"


def is_shared(facts: Facts) -> bool:
    """Programs that share a row load it ahead, through shared memory, and read each other's parts of its sums."""
    return facts["strategy"] == "shared"


def test_the_library_s_own_rules_find_nothing(facts: Facts) -> None:
    assert facts["faults"] == []


def test_every_load_and_store_of_x_and_y_is_16_bytes_wide(facts: Facts) -> None:
    if facts["weight"] is None and not is_shared(facts):
        assert list(facts["loads"]) == ["16"]
    assert "16" in facts["loads"]
    assert list(facts["stores"]) == ["16"]


def test_a_resident_row_is_loaded_once(facts: Facts) -> None:
    """As many loads as it takes to bring each element in one time: the second look at x is at registers."""
    if not is_resident(facts) or facts["weight"] is not None:
        return
    itemsize = ELEMENT_BYTES[facts["dtype"]]
    once = sum(max(1, facts["rows"] * block * itemsize // 16 // facts["threads"]) for block in facts["blocks"])
    assert sum(facts["loads"].values()) == once


def test_one_rsqrt_a_row_and_no_division_or_root(facts: Facts) -> None:
    assert facts["ordinary_rsqrts"] == 1
    assert facts["all_rsqrts"] == 2, "the other is in the branch for rows whose squares over- or underflow"
    assert facts["ordinary_slow"] == []
    assert facts["rsqrts"] >= 2
    if facts["rows"] == 1 and facts["dtype"] != "fp64":
        assert facts["rsqrts"] == 2


def test_no_arithmetic_is_narrower_than_fp32(facts: Facts) -> None:
    """Elements are widened as they are loaded. Triton's interpreter computes bf16 on bit patterns where they are not."""
    assert facts["narrow_arithmetic"] == []
    assert not [layout for layout in facts["reductions"] if "xf16" in layout or "bf16" in layout]


def test_no_register_is_spilled(facts: Facts) -> None:
    assert facts["spilled_bytes"] == 0
    assert facts["registers"] <= 255


def test_a_row_is_reduced_by_shuffles_and_a_little_shared_memory(facts: Facts) -> None:
    assert facts["shuffles"] > 0
    assert facts["shared_bytes"] <= 4096 or is_shared(facts)
    assert facts["threads"] <= 1024


@pytest.mark.parametrize("variant", list(VARIANTS)[1:])
@pytest.mark.parametrize("hidden", LAID_OUT)
def test_reductions_are_laid_out_alike_however_x_is_aligned(
    hidden: int, variant: str, compiled: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """The layout is the order of the sum: another would give a strided or unaligned row other bits than a dense one."""
    kernel = {"target": "sm_90", "hidden": hidden}
    expected = compiled[label({**kernel, "variant": "aligned"})]["reductions"]
    assert compiled[label({**kernel, "variant": variant})]["reductions"] == expected
    assert len(expected) >= 3
    assert all("#" not in layout.replace("#ttg.", "") for layout in expected), "an alias was not spelt out"


def test_the_variants_are_not_one_and_the_same(compiled: dict[str, Any]) -> None:
    """Else equal layouts would say nothing."""
    loads = {v: compiled[label({"target": "sm_90", "hidden": 4096, "variant": v})]["loads"] for v in VARIANTS}
    assert loads["aligned"] == loads["two strides"]
    assert list(loads["aligned"]) == ["16"]
    assert "16" not in {**loads["unaligned pointer"], **loads["odd stride"]}


@pytest.fixture(scope="module")
def specialised(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What Triton's launch would have compiled anew, for another value of one argument of any kernel."""
    return compile_all("specialised", ["sm_90", "gfx942"], str(tmp_path_factory.mktemp("triton")))


def test_a_kernel_that_is_held_was_not_compiled_for_the_first_calls_integers(specialised: dict[str, list[str]]) -> None:
    """Triton takes note of integers that are 1 or divisible by 16, the launcher keeps the first compiled kernel: rows at a stride
    of 16 k would be loaded wide, and summed in another order, by a kernel that next gets rows at any stride."""
    assert [entry for entries in specialised.values() for entry in entries if "large" not in entry] == []


def test_triton_for_amd_gpus_compiles_for_tensors_below_2_gigabytes(specialised: dict[str, list[str]]) -> None:
    """It then addresses with 32 bits: what ``prepared.large`` is for. Where this fails, it no longer is for anything."""
    assert specialised["sm_90"] == []
    assert {"resident_forward x_ptr=large", "resident_backward dy_ptr=large"} <= set(specialised["gfx942"])


@pytest.mark.parametrize("hip", [False, True])
def test_a_held_kernel_is_kept_apart_for_tensors_of_2_gigabytes(hip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "HIP", hip)
    small, big = (torch.empty(n, dtype=torch.bfloat16, device="meta") for n in (2**30 - 1, 2**30))
    assert not prepared.large(small, None, small)
    assert prepared.large(small, None, big) is hip
    assert prepared.large(big[:5]) is hip, "a kernel may be given any part of the storage"

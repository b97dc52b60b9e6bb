"""Each error is one sentence, the same from every path, and nothing is launched."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from rmsnorm_ops import launch, plain, rms_norm
from tests.implementations import DEVICES, GPU, TRITON
from tests.launches import count_launches
from tests.processes import run_python


@dataclass(frozen=True)
class Bad:
    """A call that breaks the contract. ``{device}`` and ``{other}`` in the sentence are x's device and another."""

    name: str
    error: type[Exception]
    sentence: str
    x: Callable[[str, str], Tensor] = lambda device, other: torch.ones(3, 64, device=device)
    weight: Callable[[str, str], Tensor | None] = lambda device, other: torch.ones(64, device=device)
    eps: float = 1e-6
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


FLOATS = "float16, bfloat16, float32 or float64"
BAD = (
    Bad("x of no dims", ValueError, "x must have at least one dimension, got a 0-dimensional tensor",
        x=lambda device, other: torch.ones((), device=device)),
    Bad("integer x", TypeError, f"x must be {FLOATS}, got int32",
        x=lambda device, other: torch.ones(3, 64, device=device, dtype=torch.int32)),
    Bad("boolean x", TypeError, f"x must be {FLOATS}, got bool",
        x=lambda device, other: torch.ones(3, 64, device=device, dtype=torch.bool)),
    Bad("complex x", TypeError, f"x must be {FLOATS}, got complex64",
        x=lambda device, other: torch.ones(3, 64, device=device, dtype=torch.complex64)),
    Bad("fp8 x", TypeError, f"x must be {FLOATS}, got float8_e4m3fn",
        x=lambda device, other: torch.empty(3, 64, device=device, dtype=torch.float8_e4m3fn)),
    Bad("sparse x", ValueError, "x must be a dense (strided) tensor, got layout torch.sparse_coo",
        x=lambda device, other: torch.sparse_coo_tensor(size=(3, 64), device=device, check_invariants=False)),
    Bad("integer weight", TypeError, f"weight must be {FLOATS}, got int64",
        weight=lambda device, other: torch.ones(64, device=device, dtype=torch.int64)),
    Bad("sparse weight", ValueError, "weight must be a dense (strided) tensor, got layout torch.sparse_coo",
        weight=lambda device, other: torch.sparse_coo_tensor(size=(64,), device=device, check_invariants=False)),
    Bad("short weight", ValueError, "weight must have shape (64,), got (63,)",
        weight=lambda device, other: torch.ones(63, device=device)),
    Bad("weight to broadcast", ValueError, "weight must have shape (64,), got (1,)",
        weight=lambda device, other: torch.ones(1, device=device)),
    Bad("two-dimensional weight", ValueError, "weight must have shape (64,), got (3, 64)",
        weight=lambda device, other: torch.ones(3, 64, device=device)),
    Bad("weight of no dims", ValueError, "weight must have shape (64,), got ()",
        weight=lambda device, other: torch.ones((), device=device)),
    Bad("weight elsewhere", ValueError, "weight must be on x's device {device}, got {other}",
        weight=lambda device, other: torch.ones(64, device=other)),
    Bad("negative eps", ValueError, "eps must be finite and not negative, got -1e-06", eps=-1e-6),
    Bad("nan eps", ValueError, "eps must be finite and not negative, got nan", eps=math.nan),
    Bad("infinite eps", ValueError, "eps must be finite and not negative, got inf", eps=math.inf),
    Bad("nan offset", ValueError, "weight_offset must be finite, got nan", options={"weight_offset": math.nan}),
    Bad("infinite offset", ValueError, "weight_offset must be finite, got -inf", options={"weight_offset": -math.inf}),
    Bad("offset of no weight", ValueError, "weight_offset must be 0 when there is no weight, got 1.0",
        weight=lambda device, other: None, options={"weight_offset": 1.0}),
    Bad("nan offset of no weight", ValueError, "weight_offset must be 0 when there is no weight, got nan",
        weight=lambda device, other: None, options={"weight_offset": math.nan}),
)  # fmt: skip

operator = torch.ops.rmsnorm.forward.default
# path: (function, device, the mode to call it in)
PATHS = {
    **{f"operator on {device}": (operator, device, nullcontext) for device in DEVICES},
    "launcher": (launch.forward, TRITON.device, nullcontext),
    "plain": (plain.forward, "cpu", nullcontext),
    "rms_norm": (rms_norm, "cpu", nullcontext),
    "meta": (operator, "meta", nullcontext),
    "fake cpu": (operator, "cpu", FakeTensorMode),
    "fake cuda": (operator, "cuda", FakeTensorMode),
}


# A fake sparse CUDA tensor asks for the driver.
PAIRS = [(path, bad) for path in PATHS for bad in BAD if not (path == "fake cuda" and bad.name.startswith("sparse"))]


@pytest.mark.parametrize(("path", "bad"), PAIRS, ids=str)
def test_the_sentence_is_the_same_from_every_path(path: str, bad: Bad, monkeypatch: pytest.MonkeyPatch) -> None:
    function, device, mode = PATHS[path]
    launched = count_launches(monkeypatch)
    other = "cpu" if device == "meta" else "meta"
    with mode():
        x, weight = bad.x(device, other), bad.weight(device, other)
        with pytest.raises(bad.error) as caught:
            function(x, weight, bad.eps, **bad.options)
    assert str(caught.value) == bad.sentence.format(device=x.device, other=other)
    assert type(caught.value) is bad.error
    assert not launched


@pytest.mark.parametrize("weight", [64, [64], (64,), 1.0], ids=str)
def test_rms_norm_takes_no_normalized_shape(weight: object) -> None:
    """torch.nn.functional.rms_norm has it second; there it would be taken for weight."""
    with pytest.raises(TypeError) as caught:
        rms_norm(torch.ones(3, 64), weight)
    assert str(caught.value) == (
        f"weight must be a Tensor or None, got {type(weight).__name__}: the norm is over the last dimension, and takes no "
        "normalized_shape"
    )


def test_rms_norm_needs_a_tensor() -> None:
    with pytest.raises((TypeError, RuntimeError, AttributeError)):
        rms_norm([1.0, 2.0])


def test_options_are_keywords() -> None:
    with pytest.raises(RuntimeError, match="positional argument"):
        operator(torch.ones(3, 64), torch.ones(64), 1e-6, 1.0)
    with pytest.raises(TypeError, match="positional argument"):
        rms_norm(torch.ones(3, 64), torch.ones(64), 1e-6, 1.0)


def test_cpu_tensors_need_the_interpreter() -> None:
    code = """
import torch
from rmsnorm_ops import launch
try:
    launch.forward(torch.ones(3, 64), None, 1e-6)
except RuntimeError as error:
    print(error)
"""
    assert run_python(code, TRITON_INTERPRET=None) == (
        "Triton kernels run on CPU tensors only in its interpreter: set TRITON_INTERPRET=1 before triton is imported\n"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_tensors_of_two_devices() -> None:
    with pytest.raises(ValueError, match=r"^weight must be on x's device cuda:0, got cpu$"):
        operator(torch.ones(3, 64, device="cuda"), torch.ones(64), 1e-6)
    with pytest.raises(ValueError, match=r"^weight must be on x's device cpu, got cuda:0$"):
        operator(torch.ones(3, 64), torch.ones(64, device="cuda"), 1e-6)

"""What the quantising operators refuse: one sentence, the same from every path, and nothing launched."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from rmsnorm_ops import add_rms_norm_quant, launch_quant, plain_quant, rms_norm_quant
from tests.implementations import DEVICES, TRITON
from tests.launches import count_launches

E4M3 = torch.float8_e4m3fn
FLOATS = "float16, bfloat16, float32 or float64"
NARROW = "float16, bfloat16 or float32 to be quantised, got float64"
FORMATS = "float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz or int8"
# name: (error, sentence, what replaces the defaults)
BAD: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "fp64 x": (TypeError, f"x must be {NARROW}", {"x": torch.float64}),
    "integer x": (TypeError, f"x must be {FLOATS}, got int32", {"x": torch.int32}),
    "short weight": (ValueError, "weight must have shape (64,), got (63,)", {"weight": 63}),
    "negative eps": (ValueError, "eps must be finite and not negative, got -1.0", {"eps": -1.0}),
    "nan offset": (ValueError, "weight_offset must be finite, got nan", {"weight_offset": math.nan}),
    "fp16 codes": (TypeError, f"dtype must be {FORMATS}, got float16", {"dtype": torch.float16}),
    "unsigned codes": (TypeError, f"dtype must be {FORMATS}, got uint8", {"dtype": torch.uint8}),
}
DYNAMIC: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "group of 100": (ValueError, "group_size must be 32, 64, 128 or None for a scale a row, got 100", {"group_size": 100}),
    "group of 0": (ValueError, "group_size must be 32, 64, 128 or None for a scale a row, got 0", {"group_size": 0}),
    "no max_scale": (ValueError, "max_scale must be a positive normal number of float32, got 0.0", {"max_scale": 0.0}),
    "nan max_scale": (ValueError, "max_scale must be a positive normal number of float32, got nan", {"max_scale": math.nan}),
    "huge max_scale": (ValueError, "max_scale must be a positive normal number of float32, got 1e+39", {"max_scale": 1e39}),
    "odd max_scale": (
        ValueError, "max_scale must be a power of two where scales are, got 0.3", {"max_scale": 0.3, "power_of_two_scale": True},
    ),
    "max_scale of exponents": (
        ValueError, "max_scale must be a power of two where scales are, got 3.0",
        {"max_scale": 3.0, "scale_dtype": torch.float8_e8m0fnu},
    ),
    "half scales": (TypeError, "scale_dtype must be float32 or float8_e8m0fnu, got float16", {"scale_dtype": torch.float16}),
}  # fmt: skip
STATIC: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "half scale": (TypeError, "scale must be float32, got float16", {"scale": {"size": (), "dtype": torch.float16}}),
    "two scales": (ValueError, "scale must be a tensor of one element, got shape (2,)", {"scale": {"size": (2,)}}),
    "scale elsewhere": (
        ValueError,
        "scale must be on x's device {device}, got {other}",
        {"scale": {"size": (), "device": "{other}"}},
    ),
}
PATHS = {
    **{f"operator on {device}": (torch.ops.rmsnorm, device, nullcontext) for device in DEVICES},
    "launcher": (launch_quant, TRITON.device, nullcontext),
    "plain": (plain_quant, "cpu", nullcontext),
    "meta": (torch.ops.rmsnorm, "meta", nullcontext),
    "fake cpu": (torch.ops.rmsnorm, "cpu", FakeTensorMode),
    "fake cuda": (torch.ops.rmsnorm, "cuda", FakeTensorMode),
}
PAIRS = [
    (operator, name)
    for operator in ("forward_quant", "add_forward_quant", "forward_quant_static", "add_forward_quant_static")
    for name in {**BAD, **(STATIC if operator.endswith("static") else DYNAMIC)}
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("operator", "name"), PAIRS, ids=lambda text: text.replace(" ", "-"))
def test_the_sentence_is_the_same_from_every_path(operator: str, name: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error, sentence, changes = {**BAD, **DYNAMIC, **STATIC}[name]
    module, device, mode = PATHS[path]
    launched = count_launches(monkeypatch)
    other = "cpu" if device == "meta" else "meta"
    changes = dict(changes)
    with mode():
        x = torch.ones(3, 64, dtype=changes.pop("x", torch.float32), device=device)
        weight = torch.ones(changes.pop("weight", 64), device=device)
        scale = {"size": (), "device": device, **changes.pop("scale", {})}
        scale = torch.ones(**{**scale, "device": scale["device"].format(other=other)})
        tensors = (x, *((x.float(),) if operator.startswith("add") else ()), weight)
        tensors += (scale,) if operator.endswith("static") else ()
        eps = changes.pop("eps", 1e-6)
        with pytest.raises(error) as caught:
            getattr(module, operator)(*tensors, eps, **{"dtype": E4M3, **changes})
    assert str(caught.value) == sentence.format(device=x.device, other=other)
    assert not launched


def test_the_residual() -> None:
    x = torch.ones(3, 64)
    for residual, error, sentence in (
        (torch.ones(3, 63), ValueError, r"^residual must have x's shape \(3, 64\), got \(3, 63\)$"),
        (torch.ones(3, 64, dtype=torch.float64), TypeError, f"^residual must be {NARROW}$"),
    ):
        with pytest.raises(error, match=sentence):
            torch.ops.rmsnorm.add_forward_quant(x, residual, None, 1e-6, dtype=E4M3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("group_size", 64), ("max_scale", 1.0), ("power_of_two_scale", True), ("column_major_scale", True),
        ("scale_dtype", torch.float32),
    ],
)  # fmt: skip
def test_functions_take_one_scale_or_find_them(name: str, value: object) -> None:
    x, scale = torch.ones(3, 64), torch.ones(())
    sentence = f"^{name} must not be given with scale, which is then the one scale of all$"
    with pytest.raises(ValueError, match=sentence):
        rms_norm_quant(x, dtype=E4M3, scale=scale, **{name: value})
    with pytest.raises(ValueError, match=sentence):
        add_rms_norm_quant(x, x, dtype=E4M3, scale=scale, **{name: value})
    with pytest.raises(TypeError, match=r"^weight must be a Tensor or None, got int: "):
        rms_norm_quant(x, 64, dtype=E4M3)

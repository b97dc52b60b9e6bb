"""The training operators as registered: schemas, fakes, opcheck, errors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor
from torch._subclasses import FakeTensorMode

from rmsnorm_ops import launch_backward, plain
from tests.gradients import CPU, PLAIN, TRITON, Training, each_implementation
from tests.implementations import DEVICES, GPU, random
from tests.launches import count_launches
from tests.layouts import LAYOUTS, Layout

ops = torch.ops.rmsnorm
NAMES = ("forward", "add_forward", "backward", "backward_input", "add_backward", "add_backward_input")
# arguments of operator ``name`` from tensors of one shape, and the options to try
CALLS: dict[str, tuple[Callable[..., tuple[Any, ...]], list[dict[str, Any]]]] = {
    "add_forward": (lambda x, other, w: (x, other, w, 1e-6), [{}, {"round_before_weight": True}]),
    "backward": (lambda x, other, w: (other, x, w, 1e-6), [{}, {"weight_offset": 1.0}]),
    "backward_input": (lambda x, other, w: (other, x, w, 1e-6), [{}]),
    "add_backward": (lambda x, other, w: (other, other, x, w, 1e-6), [{}, {"dx_dtype": torch.bfloat16}]),
    "add_backward_input": (lambda x, other, w: (other, None, x, w, 1e-6), [{}, {"dx_dtype": torch.float32}]),
}
# opcheck takes half a second; test_the_fakes_at_any_layout has all of them.
CHECKED = ("dense", "one dimension", "slice of a fused qkv", "permuted", "every second column", "expanded rows",
           "size-1 dim of an odd stride", "zero rows")  # fmt: skip
NEEDS_WEIGHT = ("backward", "add_backward")


def test_the_schemas() -> None:
    schemas = [str(getattr(ops, name).default._schema).replace("rmsnorm::", "") for name in NAMES[1:]]
    assert_expected_inline(
        "\n".join(schemas).replace(", *, ", ",\n  *, "),
        """\
add_forward(Tensor x, Tensor residual, Tensor? weight, float eps,
  *, float weight_offset=0., bool round_before_weight=False) -> (Tensor y, Tensor residual_out)
backward(Tensor dy, Tensor x, Tensor weight, float eps,
  *, float weight_offset=0.) -> (Tensor dx, Tensor dweight)
backward_input(Tensor dy, Tensor x, Tensor? weight, float eps,
  *, float weight_offset=0.) -> Tensor dx
add_backward(Tensor dy, Tensor? dsum, Tensor residual_out, Tensor weight, float eps,
  *, float weight_offset=0., ScalarType? dx_dtype=None) -> (Tensor dx, Tensor dresidual, Tensor dweight)
add_backward_input(Tensor dy, Tensor? dsum, Tensor residual_out, Tensor? weight, float eps,
  *, float weight_offset=0., ScalarType? dx_dtype=None) -> (Tensor dx, Tensor dresidual)""",
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_implementation_has_the_schema_s_arguments(name: str) -> None:
    schema = [argument.name for argument in getattr(ops, name).default._schema.arguments]
    for run in (TRITON, *PLAIN):
        if run.of is not ops:
            assert [argument for argument in inspect.signature(getattr(run.of, name)).parameters if argument != "plan"] == schema


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.name in CHECKED], ids=str)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str, name: str, layout: Layout) -> None:
    """Each operator at each layout, in turn with and without gradients, weight and options: opcheck takes its time."""
    arguments, options = CALLS[name]
    turn = list(CALLS).index(name) + LAYOUTS.index(layout)
    x, other = (layout.make(lambda *shape: random(*shape, device=device), 16).detach() for _ in range(2))
    weight = random(16, device=device, seed=1) if name in NEEDS_WEIGHT or turn % 4 < 2 else None
    tensors = [None if tensor is None else tensor.requires_grad_(turn % 2 == 0) for tensor in (x, other, weight)]
    torch.library.opcheck(getattr(ops, name).default, arguments(*tensors), options[turn // 2 % len(options)])


def facts(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.requires_grad, tensor.device


@pytest.mark.parametrize("hidden", [0, 1, 64])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@each_implementation
def test_the_fakes_at_any_layout(run: Training, layout: Layout, hidden: int) -> None:
    """Strides above all, which not every version of opcheck compares."""
    x, other = (layout.make(lambda *shape: run.random(*shape, dtype=torch.float16), hidden) for _ in range(2))
    weight = run.random(hidden, dtype=torch.float32)
    for name, (arguments, all_options) in CALLS.items():
        for options in all_options:
            real = getattr(run.of, name)(*arguments(x, other, weight), **options)
            with FakeTensorMode() as mode:
                fakes = [mode.from_tensor(tensor) for tensor in (x, other, weight)]
                fake = getattr(ops, name)(*arguments(*fakes), **options)
            real, fake = (result if isinstance(result, tuple) else (result,) for result in (real, fake))
            assert [facts(tensor) for tensor in real] == [facts(tensor) for tensor in fake]
            inputs = {tensor.untyped_storage().data_ptr() for tensor in (x, other, weight)}
            outputs = [tensor.untyped_storage().data_ptr() for tensor in real if tensor.numel()]
            assert len(set(outputs)) == len(outputs), "outputs alias each other"
            assert not inputs & set(outputs), "an output aliases an input"


FLOATS = "float16, bfloat16, float32 or float64"
ones = torch.ones
# operator, argument by name, its bad value, the error, the sentence
BAD: list[tuple[str, str, Callable[[], Any], type[Exception], str]] = [
    ("backward", "dy", lambda: ones(1, 64), ValueError, "dy must have x's shape (3, 64), got (1, 64)"),
    ("backward", "dy", lambda: ones(64), ValueError, "dy must have x's shape (3, 64), got (64,)"),
    ("backward", "dy", lambda: ones(3, 64, dtype=torch.int32), TypeError, f"dy must be {FLOATS}, got int32"),
    ("backward_input", "dy", lambda: ones(3, 63), ValueError, "dy must have x's shape (3, 64), got (3, 63)"),
    ("backward_input", "weight", lambda: ones(1), ValueError, "weight must have shape (64,), got (1,)"),
    ("backward", "weight", lambda: ones(3, 64), ValueError, "weight must have shape (64,), got (3, 64)"),
    ("backward", "eps", lambda: -1.0, ValueError, "eps must be finite and not negative, got -1.0"),
    ("backward", "weight_offset", lambda: float("nan"), ValueError, "weight_offset must be finite, got nan"),
    ("add_backward", "dsum", lambda: ones(1, 64), ValueError, "dsum must have x's shape (3, 64), got (1, 64)"),
    ("add_backward", "dsum", lambda: ones(3, 64, dtype=torch.bool), TypeError, f"dsum must be {FLOATS}, got bool"),
    ("add_backward", "dx_dtype", lambda: torch.int8, TypeError, f"dx_dtype must be {FLOATS}, got int8"),
    ("add_backward_input", "dsum", lambda: ones(3, 1), ValueError, "dsum must have x's shape (3, 64), got (3, 1)"),
    ("add_backward_input", "dx_dtype", lambda: torch.complex64, TypeError, f"dx_dtype must be {FLOATS}, got complex64"),
    ("add_backward_input", "dy", lambda: ones(4, 64), ValueError, "dy must have x's shape (3, 64), got (4, 64)"),
    ("add_forward", "residual", lambda: ones(64), ValueError, "residual must have x's shape (3, 64), got (64,)"),
    ("add_forward", "residual", lambda: ones(1, 64), ValueError, "residual must have x's shape (3, 64), got (1, 64)"),
    ("add_forward", "residual", lambda: ones(3, 64, dtype=torch.int64), TypeError, f"residual must be {FLOATS}, got int64"),
    ("add_forward", "weight", lambda: ones(63), ValueError, "weight must have shape (64,), got (63,)"),
]


def good(name: str, device: str) -> dict[str, Any]:
    arguments = [argument.name for argument in getattr(ops, name).default._schema.arguments]
    shapes = {"weight": (64,)}
    tensors = {argument: ones(shapes.get(argument, (3, 64)), device=device) for argument in arguments if argument in TENSORS}
    return {**tensors, "eps": 1e-6}


TENSORS = ("x", "dy", "dsum", "residual", "residual_out", "weight")
PATHS = {
    **{str(run): (run.of, run.device, nullcontext) for run in (CPU, TRITON, *PLAIN)},
    "launcher": (launch_backward, TRITON.device, nullcontext),
    "meta": (ops, "meta", nullcontext),
    "fake": (ops, "cpu", FakeTensorMode),
    "grad": (ops, "cpu", nullcontext),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("name", "argument", "value", "error", "sentence"), BAD)
def test_one_sentence_from_every_path(
    monkeypatch: pytest.MonkeyPatch, name: str, argument: str, value: Any, error: type[Exception], sentence: str, path: str
) -> None:
    namespace, device, mode = PATHS[path]
    if not hasattr(namespace, name):
        return
    launched = count_launches(monkeypatch)
    with mode():
        arguments = good(name, device)
        bad = value()
        arguments[argument] = bad.to(device) if isinstance(bad, Tensor) else bad
        if path == "grad":
            arguments["weight"].requires_grad_()
        with pytest.raises(error, match=f"^{re.escape(sentence)}$"):
            getattr(namespace, name)(**arguments)
    assert not launched


@pytest.mark.parametrize("namespace", [ops, plain], ids=["operator", "plain"])
@pytest.mark.parametrize(("name", "argument"), [("backward", "dy"), ("add_backward", "dsum"), ("add_forward", "residual")])
def test_a_tensor_elsewhere(namespace: Any, name: str, argument: str) -> None:
    """A fake stands for the other device, so that no GPU is needed."""
    with FakeTensorMode():
        arguments = good(name, "cpu")
        arguments[argument] = torch.empty(3, 64, device="cuda" if GPU else "meta")
        with pytest.raises((ValueError, RuntimeError), match="device"):
            getattr(namespace, name)(**arguments)

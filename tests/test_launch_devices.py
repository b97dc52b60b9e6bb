"""Which way a launch goes: held, compiled or interpreted, and on which device. The devices are pretended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rmsnorm_ops import prepared
from rmsnorm_ops.plan import LaunchPlan
from rmsnorm_ops.prepared import Prepared

PLAN = LaunchPlan("resident", 1, 64, 0, 4)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is done, in order, on a machine of two GPUs of which the first is current."""
    done: list[tuple[Any, ...]] = []
    current = [0]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    def compiled(kernel: Prepared, grid: tuple[int, int], arguments: tuple[Any, ...]) -> None:
        done.append(("compiled", current[-1], grid))
        kernel.hooks = SimpleNamespace(calls=[])
        kernel.run = lambda x, y, z, stream, *rest: done.append(("held", current[-1], (x, y), stream))

    monkeypatch.setattr(prepared, "_current_device", lambda: current[-1])
    monkeypatch.setattr(prepared, "_current_stream", lambda index: f"stream of {index}")
    monkeypatch.setattr(prepared, "_executors", lambda: SimpleNamespace(compiled=compiled))
    monkeypatch.setattr(torch.cuda, "device", device)
    return done


@pytest.mark.parametrize("index", [0, 1])
def test_compiled_once_on_any_device(index: int, calls: list[tuple[Any, ...]]) -> None:
    """On a device that is not the current one too: a public launch a call would cost it three times the host time."""
    kernel = Prepared(None, PLAN, (), index)
    for _ in range(3):
        prepared.launch(kernel, 5, 1, ())
    assert calls == [("compiled", index, (5, 1)), *[("held", index, (5, 1), f"stream of {index}")] * 2]


def test_a_profilers_hook_wants_the_public_launch(calls: list[tuple[Any, ...]]) -> None:
    kernel = Prepared(None, PLAN, (), 0)
    prepared.launch(kernel, 5, 1, ())
    kernel.hooks.calls.append(print)
    prepared.launch(kernel, 5, 1, ())
    assert [call[0] for call in calls] == ["compiled", "compiled"]

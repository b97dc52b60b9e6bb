"""Compiled by Inductor on a GPU: the host time of a small graph, and the cache on disk."""

from __future__ import annotations

import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from rmsnorm_ops import rms_norm, visible
from tests.hardware import needs_gpu
from tests.implementations import random
from tests.processes import ROOT, run_python

EPS = 1e-6


@needs_gpu()
def test_host_time_is_that_of_atens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small graph, without a gradient and with one, against the same with aten's norm. Their medians, interleaved."""
    monkeypatch.setattr(visible, "DEVICES", frozenset(("cuda",)))
    torch._dynamo.reset()
    x, weight = (random(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((4, 1024), (1024,)))

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x * 2, weight, EPS) + 1

    def atens(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x * 2, (1024,), weight, EPS) + 1

    pair = [torch.compile(function, fullgraph=True) for function in (ours, atens)]
    for gradient in (False, True):
        leaf, scale = x.clone().requires_grad_(gradient), weight.clone().requires_grad_(gradient)
        times: list[list[float]] = [[], []]
        for _ in range(40):
            for function, spent in zip(pair, times, strict=True):
                spent.append(host_time(function, leaf, scale))
        mine, theirs = (statistics.median(spent[10:]) for spent in times)
        print(f"host time, gradient {gradient}: {mine * 1e6:.1f} us, aten's {theirs * 1e6:.1f} us")
        assert mine <= 1.25 * theirs


def host_time(function: Any, x: Tensor, weight: Tensor, calls: int = 50) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        y = function(x, weight)
        if y.requires_grad:
            y.backward(y.detach())
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / calls


STEP = """
import torch, rmsnorm_ops
x = torch.ones(4, 1024, device="cuda", dtype=torch.float32)
print(torch.compile(rmsnorm_ops.rms_norm, fullgraph=True)(x * 3, None, 0.0).mean().item())
"""


@needs_gpu()
def test_inductors_cache_on_disk_notices_a_changed_kernel(tmp_path: Path) -> None:
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    cache |= {"TORCHINDUCTOR_AUTOGRAD_CACHE": "1", "TRITON_INTERPRET": None, "RMSNORM_OPS_VISIBLE": "1"}
    copy = tmp_path / "rmsnorm_ops"
    shutil.copytree(ROOT / "rmsnorm_ops", copy)
    step = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{STEP}"
    assert float(run_python(step, **cache)) == pytest.approx(1, rel=1e-3)
    assert float(run_python(step, **cache)) == pytest.approx(1, rel=1e-3)
    path = copy / "kernels" / "rowmath.py"
    text = path.read_text()
    start = text.index("def normalise(")
    changed = text[:start] + text[start:].replace("x * rstd", "2.0 * x * rstd", 1)
    assert changed != text
    path.write_text(changed)
    assert float(run_python(step, **cache)) == pytest.approx(2, rel=1e-3)

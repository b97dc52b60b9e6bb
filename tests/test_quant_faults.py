"""Faults that other fused quantisers have had, by kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rmsnorm_ops import rms_norm, rms_norm_quant
from rmsnorm_ops.contracts_quant import FORMATS
from tests.hardware import needs_gpu, two_gpus
from tests.implementations import DEVICES, assert_same_bits, random
from tests.quantised import (
    CPU,
    TRITON,
    Quantiser,
    arguments,
    assert_same,
    assert_same_codes,
    bytes_of,
    call,
    each_format,
    each_implementation,
    values_of,
)  # fmt: skip

E4M3 = torch.float8_e4m3fn
quantise = torch.ops.rmsnorm.forward_quant.default
CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("forward_quant", {}),
    ("forward_quant", {"group_size": 128, "column_major_scale": True}),
    ("add_forward_quant", {"group_size": 64}),
    ("add_forward_quant_static", {}),
)


@each_format
@each_implementation
def test_the_largest_number_of_another_format(run: Quantiser, dtype: torch.dtype) -> None:
    """e4m3fn's 448 used for fnuz, whose largest is 240, saturates; the reverse wastes a bit."""
    q, scale = run.of.forward_quant(run.random(64, 256), None, 1e-6, dtype=dtype)
    largest = torch.iinfo(dtype).max if dtype is torch.int8 else torch.finfo(dtype).max
    assert FORMATS[dtype].qmax == largest
    assert (abs(values_of(q)).max(-1) == largest).all()
    assert bool((q.float() * scale).abs().amax(-1).isfinite().all())


@each_format
@each_implementation
def test_fused_and_unfused_differ(run: Quantiser, dtype: torch.dtype) -> None:
    """By the last bit of fp32 alone: where the unfused norm gives fp32, less than one code in a thousand is another."""
    x, weight = run.random(200, 512), run.random(512, seed=1)
    y = run.like.forward(x, weight, 1e-6) if run in (CPU, TRITON) else torch.ops.rmsnorm.forward(x, weight, 1e-6)
    amax = y.abs().amax(-1, keepdim=True)
    qmax = FORMATS[dtype].qmax
    q, scale = run.of.forward_quant(x, weight, 1e-6, dtype=dtype)
    torch.testing.assert_close(scale, amax / qmax, rtol=4 * 2.0**-23, atol=0)
    expected = (y / (amax / qmax)).clamp(-qmax, qmax)
    expected = expected.round().to(dtype) if dtype is torch.int8 else expected.to(dtype)
    differ = (bytes_of(q) != bytes_of(expected)).double().mean()
    assert float(differ) < 1e-3
    if run is CPU:
        assert_same_codes(q, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_half_rounded_on_the_way(device: str) -> None:
    """y rounded to bf16 before it is quantised would move a tenth of the codes; the codes are those of fp32 y."""
    x, weight = random(100, 1024, dtype=torch.bfloat16, device=device), random(1024, device=device)
    q, scale = rms_norm_quant(x, weight, 1e-6, dtype=torch.int8)
    y = rms_norm(x.float(), weight, 1e-6)
    rounded = (y.bfloat16().float() / scale).round()
    assert float((q != (y / scale).round()).double().mean()) < 1e-3
    assert float((q != rounded).double().mean()) > 0.01


@pytest.mark.parametrize("device", DEVICES)
def test_a_recomputed_norm_gives_the_same_codes(device: str) -> None:
    """Activation checkpointing runs the norm again: another code would be another gradient."""
    torch._dynamo.reset()
    x = random(64, 512, dtype=torch.bfloat16, device=device)
    seen: list[tuple[Tensor, ...]] = []

    def block(x: Tensor, scale: Tensor) -> Tensor:
        with torch.no_grad():
            codes = rms_norm_quant(x, None, 1e-6, dtype=E4M3, group_size=128)
        seen.append(tuple(codes))
        return (codes.q.float() * scale).sum()

    scale = torch.ones(512, device=device, requires_grad=True)
    checkpoint(block, x, scale, use_reentrant=False).backward()
    assert len(seen) == 2
    assert_same(*seen)
    compiled = torch.compile(lambda x: rms_norm_quant(x, None, 1e-6, dtype=E4M3, group_size=128), fullgraph=True)
    assert_same(compiled(x), seen[0])


@needs_gpu(40)
@pytest.mark.parametrize(("name", "options"), CALLS)
@pytest.mark.parametrize("shape", [(2**23 + 16, 256), (2**20 + 65, 4096), (2**15 + 3, 131072)], ids=str)
def test_int32_offset_overflow(shape: tuple[int, int], name: str, options: dict[str, Any]) -> None:
    torch.cuda.empty_cache()
    x = torch.zeros(shape, dtype=torch.float16, device="cuda")
    x[-1000:] = random(1000, shape[1], dtype=torch.float16, device="cuda")
    residual = (x[:1].expand(shape),) if name.startswith("add") else ()
    scale = (torch.full((), 0.05, device="cuda"),) if name.endswith("static") else ()

    def run(x: Tensor, residual: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        outputs = getattr(torch.ops.rmsnorm, name)(x, *residual, None, *scale, 1e-6, dtype=E4M3, **options)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    whole = run(x, residual)
    tail = run(x[-1000:].clone(), tuple(tensor[-1000:] for tensor in residual))
    for one, other in zip(whole, tail, strict=True):
        one = one[-1000:]
        if one.dtype is E4M3:
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        else:
            assert_same_bits(one.contiguous(), other.contiguous())
    assert not whole[0].view(torch.uint8)[:-1000:4099].any(), "rows of zeros"


@two_gpus
def test_wrong_device() -> None:
    x, weight = random(33, 1000, dtype=torch.bfloat16), random(1000)
    expected = [call(TRITON, name, x.to("cuda:0"), weight.to("cuda:0"), dtype=E4M3, **options) for name, options in CALLS]
    for current in (0, 1):
        with torch.cuda.device(current):
            for (name, options), known in zip(CALLS, expected, strict=True):
                found = call(TRITON, name, x.to("cuda:1"), weight.to("cuda:1"), dtype=E4M3, **options)
                assert all(str(tensor.device) == "cuda:1" for tensor in found)
                assert_same([tensor.cpu() for tensor in found], [tensor.cpu() for tensor in known])


@needs_gpu()
def test_wrong_stream() -> None:
    x = random(64, 4096, device="cuda")
    expected = call(TRITON, "forward_quant", x, None, dtype=E4M3)
    torch.cuda.synchronize()
    buffer, stream = torch.zeros_like(x), torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(stream):
            buffer.zero_()
            torch.cuda._sleep(100_000)
            buffer.copy_(x)
            q, scale = call(TRITON, "forward_quant", buffer, None, dtype=E4M3)
            torch.cuda._sleep(100_000)
            consumed = (q.view(torch.uint8) + 1, scale + 1)
        stream.synchronize()
        assert torch.equal(consumed[0], expected[0].view(torch.uint8) + 1)
        assert_same_bits(consumed[1], expected[1] + 1)


@needs_gpu()
def test_a_captured_graph_replays() -> None:
    x = random(64, 4096, dtype=torch.bfloat16, device="cuda")
    for name, options in CALLS:
        tensors = arguments(name, x, None)
        operator = getattr(torch.ops.rmsnorm, name)
        expected = operator(*tensors, dtype=E4M3, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = operator(*tensors, dtype=E4M3, **options)
        for output in outputs:
            output.view(torch.uint8).zero_() if output.dtype.itemsize == 1 else output.zero_()
        graph.replay()
        assert_same(outputs, expected)


@needs_gpu()
@each_format
def test_codes_of_random_numbers_are_those_of_a_division(dtype: torch.dtype) -> None:
    """2²⁴ of them, each group with a scale of its own: from the same scales, none is another on the GPU than on the CPU."""
    x = random(4096, 4096, device="cuda") * torch.logspace(-10, 10, 4096, device="cuda")
    weight = 2.0 ** torch.arange(4096, device="cuda").remainder(7)
    eps = 2.0**60  # rstd is 2⁻³⁰ whatever x, and y x · 2⁻³⁰ · weight
    x = x / x.abs().amax() * 2.0**15
    q, scale = quantise(x, weight, eps, dtype=dtype, group_size=32)
    y = (x * 2.0**-30 * weight).view(4096, 128, 32)
    assert_same_bits(scale, y.abs().amax(-1) / torch.tensor(FORMATS[dtype].qmax, device="cuda"))
    qmax = FORMATS[dtype].qmax
    expected = (y.cpu() / scale.cpu()[..., None]).view(4096, 4096)
    expected = (expected.round() if dtype is torch.int8 else expected).clamp(-qmax, qmax).to(dtype)
    assert_same_codes(q.cpu(), expected)

"""Faults of what is kept between calls on a GPU: captured graphs, compiled kernels, hidden copies."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from rmsnorm_ops import launch
from tests.hardware import needs_gpu
from tests.implementations import TRITON, assert_accurate, assert_same_bits, random
from tests.processes import run_python

forward = torch.ops.rmsnorm.forward.default


@needs_gpu()
@pytest.mark.parametrize("hidden", [128, 5120, 40000])
def test_cuda_graph_capture_and_replay(hidden: int) -> None:
    x, weight = random(16, hidden, dtype=torch.bfloat16, device="cuda"), random(hidden, device="cuda")
    forward(x, weight, 1e-6)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = forward(x, weight, 1e-6)
    for seed in range(1, 4):
        x.copy_(random(16, hidden, dtype=torch.bfloat16, seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(y, forward(x, weight, 1e-6))


@needs_gpu()
def test_cuda_graph_capture_of_a_kernel_never_run() -> None:
    """Loading a kernel while a stream captures works, or says so; it must not leave a wrong graph behind."""
    code = """
import torch, rmsnorm_ops
forward = torch.ops.rmsnorm.forward.default
x = torch.randn(16, 1336, device="cuda")
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        y = forward(x, None, 1e-6)
except RuntimeError as error:
    print("refused:", str(error).splitlines()[0])
else:
    x.mul_(3).add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, forward(x, None, 1e-6))
    print("captured")
"""
    assert run_python(code).startswith(("captured", "refused"))


@needs_gpu()
def test_cudagraphs_of_a_compiled_function() -> None:
    compiled = torch.compile(lambda x, weight: forward(x * 2, weight, 1e-6) + 1, mode="reduce-overhead", fullgraph=True)
    weight = random(1024, device="cuda")
    for seed in range(5):
        x = random(16, 1024, device="cuda", seed=seed)
        assert_same_bits(compiled(x, weight).clone(), forward(x * 2, weight, 1e-6) + 1)


@needs_gpu()
def test_threads_with_a_cold_cache() -> None:
    """Two threads that compile at once."""
    sizes = range(1400, 1440)
    results: dict[int, Tensor] = {}

    def work(start: int) -> None:
        for hidden in sizes[start::2]:
            results[hidden] = forward(random(5, hidden, device="cuda"), None, 1e-6)

    threads = [threading.Thread(target=work, args=(start,)) for start in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for hidden in sizes:
        assert_same_bits(results[hidden], forward(random(5, hidden, device="cuda"), None, 1e-6))


@needs_gpu()
def test_recompiles_for_row_counts_and_addresses() -> None:
    """One kernel for every count of rows, in the launcher and in Triton, and one more for rows that are not aligned."""
    from triton import knobs

    compiled = []
    buffer = random(100 * 1304 + 1, dtype=torch.bfloat16, device="cuda")
    old, knobs.runtime.jit_post_compile_hook = knobs.runtime.jit_post_compile_hook, lambda **facts: compiled.append(facts["repr"])
    try:
        for rows in (3, 1, 2, 16, 17, *range(18, 64), 100):
            forward(buffer[: rows * 1304].view(rows, 1304), None, 1e-6)
        assert len(compiled) <= 1
        for rows in (3, 1, 2, 16, 17, 100):
            forward(buffer[1 : rows * 1304 + 1].view(rows, 1304), None, 1e-6)
        assert len(compiled) <= 2
    finally:
        knobs.runtime.jit_post_compile_hook = old


@needs_gpu()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_kernel_specialised_on_the_first_calls_integers(dtype: torch.dtype) -> None:
    """Rows 2¹⁰ elements apart, then rows an odd number apart: loads of several elements would now be misaligned. And 16 rows,
    then 17. A hidden size of which nothing else here takes rows."""
    hidden = 998 if dtype is torch.float32 else 996
    x = random(17, hidden, dtype=dtype, device="cuda")
    results = []
    for stride, rows in ((1024, 16), (1024, 17), (1001, 17), (hidden, 17), (1007, 1)):
        buffer = torch.zeros(17, stride, dtype=dtype, device="cuda")
        buffer[:, :hidden] = x
        results.append(forward(buffer[:rows, :hidden], None, 1e-6))
        torch.cuda.synchronize()
    for y in results:
        assert_same_bits(y, results[1][: len(y)])
    assert_accurate(TRITON, x, None, 1e-6)


@needs_gpu()
@pytest.mark.parametrize(
    "view",
    [
        lambda qkv: qkv,
        lambda qkv: qkv[..., 1024:2048],
        lambda qkv: qkv[..., 1 : 1024 + 1],
        lambda qkv: qkv[:1, :, :1024].view(1, 256, 8, 128).transpose(1, 2),
        lambda qkv: qkv[..., :1024].transpose(0, 1),
        lambda qkv: qkv[:, :1, :1024].expand(-1, 256, -1),
    ],
    ids=["dense", "slice", "unaligned-slice", "transposed-heads", "swapped", "expanded"],
)
def test_silent_copy(view: object) -> None:
    """What the documentation says is read in place takes no memory but y's."""
    x = view(random(4, 256, 3072, dtype=torch.bfloat16, device="cuda"))
    weight = random(x.shape[-1], device="cuda")
    y = forward(x, weight, 1e-6)
    size = y.numel() * y.element_size()
    del y
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    forward(x, weight, 1e-6)
    assert torch.cuda.max_memory_allocated() - before <= size + 1024


@needs_gpu()
def test_profiled_launches_are_the_same() -> None:
    """A profiler's launch hook takes the kernel through Triton's public launch."""
    from triton import knobs

    x, weight = random(7, 1000, dtype=torch.bfloat16, device="cuda"), random(1000, device="cuda")
    expected, seen = forward(x, weight, 1e-6), []

    def hook(metadata: object) -> None:
        seen.append(metadata)

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        assert_same_bits(forward(x, weight, 1e-6), expected)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert seen
    assert_same_bits(forward(x, weight, 1e-6), expected)


@needs_gpu()
def test_a_call_like_an_earlier_one_in_all_but_one_thing() -> None:
    """The launcher looks at little of a call of dense, aligned tensors that it has seen before. All else must still count."""
    wide = random(7, 2 * 1016 + 1, dtype=torch.bfloat16, device="cuda")
    weights = random(2 * 1016, dtype=torch.bfloat16, device="cuda", seed=1)
    x, weight = wide[:, :1016].contiguous(), weights[:1016].clone()
    for _ in range(3):
        usual = launch.forward(x, weight, 1e-5)
    for other_x in (wide[:, :1016], wide[:, 1 : 1 + 1016], wide[:, ::2][:, :1016], wide[:0, :1016], x[None, :, None], x[3]):
        for other_weight in (weight, weights[::2], weights[1 : 1 + 1016]):
            expected = launch.forward(other_x.contiguous().clone(), other_weight.contiguous().clone(), 1e-5)
            assert_same_bits(launch.forward(other_x, other_weight, 1e-5), expected)
    assert_same_bits(launch.forward(x, weight, 1e-5), usual)
    assert not torch.equal(launch.forward(x, weight, 1.0), usual)
    assert not torch.equal(launch.forward(x, weight, 1e-5, weight_offset=1.0), usual)
    with pytest.raises(ValueError, match="eps must be finite"):
        launch.forward(x, weight, float("nan"))
    with pytest.raises(ValueError, match="weight must have shape"):
        launch.forward(x, weight[:8], 1e-5)
    with pytest.raises(ValueError, match="dense"):
        launch.forward(x.to_sparse(), weight, 1e-5)

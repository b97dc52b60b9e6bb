"""What every rank of a group of processes does: the checks of tests/test_distributed.py, run where no test runner is.

Each check takes a mesh of all ranks and compares with one process's result, which every rank computes for itself.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import rmsnorm_ops
from tests.implementations import assert_same_bits, random

Check = Callable[[DeviceMesh], None]
CHECKS: dict[str, Check] = {}
ops = torch.ops.rmsnorm
HIDDEN = 24
ROWS, SEQUENCE, COLUMNS, WHOLE = Shard(0), Shard(1), Shard(2), Replicate()


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def run_checks(rank: int, world: int, folder: str) -> None:
    """Each check's outcome, None or a traceback, to ``folder``/``rank``.json."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    outcome: dict[str, str | None] = {}
    for name, function in CHECKS.items():
        try:
            function(mesh)
            outcome[name] = None
        except Exception:
            outcome[name] = traceback.format_exc()
    Path(folder, f"{rank}.json").write_text(json.dumps(outcome))
    dist.destroy_process_group()


def tensors(rows: int = 5, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """x, residual, weight, and cotangents of y and residual_out."""
    shape = (rows, 4, HIDDEN)
    x, residual, dy, dsum = (random(*shape, dtype=dtype, seed=seed) for seed in range(4))
    return [x, residual, random(HIDDEN, seed=9), dy, dsum]


def forward_and_backward(add: bool, x: Tensor, residual: Tensor, weight: Tensor | None, dy: Tensor, dsum: Tensor) -> list[Any]:
    """The outputs, then the gradients of x, residual and weight that there are."""
    leaves = [tensor.detach().requires_grad_() for tensor in ((x, residual) if add else (x,))]
    if weight is not None:
        weight = weight.detach().requires_grad_()
    results = (rmsnorm_ops.add_rms_norm if add else rmsnorm_ops.rms_norm)(*leaves, weight, 1e-6)
    outputs = list(results) if add else [results]
    wanted = [*leaves, *([] if weight is None else [weight])]
    return [*outputs, *torch.autograd.grad(outputs, wanted, [dy, dsum][: len(outputs)])]


def place(mesh: DeviceMesh, tensor: Tensor, placement: Placement) -> DTensor:
    if isinstance(placement, Partial):
        return DTensor.from_local(tensor / mesh.size(), mesh, [placement], run_check=False)
    return distribute_tensor(tensor, mesh, [placement])


def compare(mesh: DeviceMesh, add: bool, placement: Placement, *, weighted: bool = True, rows: int = 5) -> tuple[list[Any], int]:
    """Hold DTensors to one process: the DTensors that came out, and how often the ranks communicated for them."""
    x, residual, weight, dy, dsum = tensors(rows)
    weight = weight if weighted else None
    sharded = [place(mesh, tensor, placement) for tensor in (x, residual, dy, dsum)]
    whole = None if weight is None else distribute_tensor(weight, mesh, [Replicate()])
    with CommDebugMode() as communication:
        results = forward_and_backward(add, *sharded[:2], whole, *sharded[2:])
    expected = forward_and_backward(add, x, residual, weight, dy, dsum)
    assert len(results) == len(expected)
    for result, right in zip(results, expected, strict=True):
        if right.shape == (HIDDEN,):  # rows are summed in another order
            torch.testing.assert_close(result.full_tensor(), right, rtol=1e-5, atol=1e-5)
        else:
            assert_same_bits(result.full_tensor(), right)
    return results, communication.get_total_counts()


@check
def the_first_call_may_be_without_gradients(mesh: DeviceMesh) -> None:
    """Under inference_mode no Autograd kernel runs that would register the rules."""
    x, _, weight, *_ = tensors()
    with torch.inference_mode():
        y = rmsnorm_ops.rms_norm(place(mesh, x, ROWS), place(mesh, weight, WHOLE), 1e-6)
        assert_same_bits(y.full_tensor(), rmsnorm_ops.rms_norm(x, weight, 1e-6))


@check
def rows_are_normed_where_they_lie(mesh: DeviceMesh) -> None:
    for add in (False, True):
        for placement in (ROWS, SEQUENCE):
            for rows in (5, 2):
                results, communications = compare(mesh, add, placement, rows=rows)
                assert communications == 0
                *like_x, dweight = results
                assert [result.placements for result in like_x] == [(placement,)] * len(like_x)
                assert dweight.placements == (Partial(),)


@check
def a_dimension_with_fewer_rows_than_ranks_is_gathered(mesh: DeviceMesh) -> None:
    """As DTensor does for every operator."""
    for add in (False, True):
        assert compare(mesh, add, ROWS, rows=1)[0][0].placements == (WHOLE,)


@check
def replicated_rows_have_a_replicated_dweight(mesh: DeviceMesh) -> None:
    for add in (False, True):
        results, communications = compare(mesh, add, WHOLE)
        assert communications == 0
        assert {result.placements for result in results} == {(WHOLE,)}


@check
def a_sharded_hidden_is_gathered(mesh: DeviceMesh) -> None:
    for add in (False, True):
        results, communications = compare(mesh, add, COLUMNS)
        assert communications > 0
        assert results[0].placements == (WHOLE,)


@check
def partial_sums_are_reduced_first(mesh: DeviceMesh) -> None:
    """What a row-parallel linear layer returns; halves of a number add up exactly."""
    for add in (False, True):
        assert compare(mesh, add, Partial())[1] > 0


@check
def without_a_weight(mesh: DeviceMesh) -> None:
    for add in (False, True):
        for placement in (ROWS, SEQUENCE, COLUMNS):
            compare(mesh, add, placement, weighted=False)


@check
def every_call_has_its_own_eps_and_options(mesh: DeviceMesh) -> None:
    """DTensor keeps the redistribution that a call needed, by shapes and placements alone."""
    x, _, weight, *_ = tensors()
    for eps, offset in ((1e-6, 0.0), (1.0, 0.0), (1.0, 1.0)):
        y = rmsnorm_ops.rms_norm(place(mesh, x, COLUMNS), place(mesh, weight, WHOLE), eps, weight_offset=offset)
        assert_same_bits(y.full_tensor(), rmsnorm_ops.rms_norm(x, weight, eps, weight_offset=offset))


@check
def one_dimension(mesh: DeviceMesh) -> None:
    """No rows to shard; and dsum and weight have one shape, so only their being absent tells the calls apart."""
    x, dsum, weight, dy = (random(HIDDEN, seed=seed) for seed in range(4))
    for dsum_there, weight_there in ((x, None), (None, weight), (dsum, weight), (None, None)):
        arguments = dy, dsum_there, x, weight_there
        sharded = [None if tensor is None else place(mesh, tensor, ROWS) for tensor in arguments]
        dx = ops.add_backward_input(*sharded, 1e-6)[0]
        assert_same_bits(dx.full_tensor(), ops.add_backward_input(*arguments, 1e-6)[0])


@check
def a_residual_of_another_dtype(mesh: DeviceMesh) -> None:
    """Two gradients that differ in dtype, where otherwise the second is empty."""
    x, residual, weight, dy, dsum = tensors()
    operands = x.bfloat16(), residual, weight, dy.bfloat16(), dsum
    for placement in (ROWS, SEQUENCE, COLUMNS):
        sharded = [place(mesh, tensor, placement if tensor is not weight else WHOLE) for tensor in operands]
        for actual, right in zip(forward_and_backward(True, *sharded), forward_and_backward(True, *operands), strict=True):
            assert actual.dtype is right.dtype
            torch.testing.assert_close(actual.full_tensor(), right, rtol=1e-5, atol=1e-5)


@check
def an_empty_dresidual_has_no_rows_to_shard(mesh: DeviceMesh) -> None:
    _, residual, weight, dy, dsum = tensors()
    sharded = [place(mesh, tensor, WHOLE if tensor is weight else SEQUENCE) for tensor in (dy, dsum, residual, weight)]
    dx, dresidual, _ = ops.add_backward(*sharded, 1e-6)
    assert dx.placements == (SEQUENCE,)
    assert dresidual.full_tensor().shape == (0,)
    assert dresidual.placements == (WHOLE,)


@check
def two_mesh_dimensions(mesh: DeviceMesh) -> None:
    plane = init_device_mesh("cpu", (mesh.size(), 1))
    x, _, weight, dy, _ = tensors()
    leaf = distribute_tensor(x, plane, [Shard(0), Shard(1)]).requires_grad_()
    scale = distribute_tensor(weight, plane, [WHOLE, WHOLE]).requires_grad_()
    y = rmsnorm_ops.rms_norm(leaf, scale, 1e-6)
    dx, dweight = torch.autograd.grad(y, (leaf, scale), distribute_tensor(dy, plane, [Shard(0), Shard(1)]))
    assert y.placements == (Shard(0), Shard(1))
    expected = ops.backward(dy, x, weight, 1e-6)
    assert_same_bits(dx.full_tensor(), expected[0])
    torch.testing.assert_close(dweight.full_tensor(), expected[1], rtol=1e-5, atol=1e-5)


@check
def double_backward(mesh: DeviceMesh) -> None:
    results = []
    for shard in (False, True):
        x, _, weight, dy, _ = (tensor.double() for tensor in tensors())
        x, dy = (place(mesh, tensor, ROWS) if shard else tensor for tensor in (x, dy))
        weight = place(mesh, weight, WHOLE) if shard else weight
        x.requires_grad_()
        weight.requires_grad_()
        (dx,) = torch.autograd.grad(rmsnorm_ops.rms_norm(x, weight, 1e-6), x, dy, create_graph=True)
        results.append(torch.autograd.grad((dx * dx).sum(), (x, weight)))
    for right, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual.full_tensor(), right)


@check
def a_plain_weight_beside_a_dtensor_is_refused(mesh: DeviceMesh) -> None:
    x, _, weight, *_ = tensors()
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        rmsnorm_ops.rms_norm(place(mesh, x, ROWS), weight, 1e-6)


@check
def a_compiled_function_of_dtensors(mesh: DeviceMesh) -> None:
    torch._dynamo.reset()

    def step(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        y, residual_out = rmsnorm_ops.add_rms_norm(x, residual, weight, 1e-6)
        return y.cos() * residual_out

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (4, 6):
        x, residual, weight, dy, _ = tensors(rows)
        results = []
        for function, spread in ((step, False), (compiled, True)):
            leaves = [place(mesh, t, WHOLE if t is weight else ROWS) if spread else t.clone() for t in (x, residual, weight)]
            leaves = [leaf.requires_grad_() for leaf in leaves]
            results.append(torch.autograd.grad(function(*leaves), leaves, place(mesh, dy, ROWS) if spread else dy))
        for right, actual in zip(*results, strict=True):
            torch.testing.assert_close(actual.full_tensor(), right, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    import tests.ranks_models  # noqa: F401  (more checks)
    from tests.ranks import run_checks as run  # of the module that the checks were added to

    run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])

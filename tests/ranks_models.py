"""Checks of tests/test_distributed.py on models: sequence and tensor parallel, and fully sharded, against one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import rmsnorm_ops
from tests.implementations import random
from tests.ranks import HIDDEN, check

STEPS = 3


class Block(nn.Module):
    """Norm, gated MLP, residual add and a norm again: a transformer block without its attention."""

    def __init__(self, last: int = 1) -> None:
        super().__init__()
        self.norm = rmsnorm_ops.RMSNorm(HIDDEN, 1e-6)
        self.gate, self.up = nn.Linear(HIDDEN, 32, bias=False), nn.Linear(HIDDEN, 32, bias=False)
        self.down = nn.Linear(32, HIDDEN, bias=False)
        self.last = rmsnorm_ops.RMSNorm(HIDDEN, 1e-6, weight_offset=1.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(x))
        return self.last(x + y)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class FusedBlock(Block):
    """The residual add and the second norm in one pass."""

    def forward(self, x: Tensor) -> Tensor:
        return rmsnorm_ops.add_rms_norm(self.mlp(self.norm(x)), x, self.last.weight, 1e-6, weight_offset=1.0).y


def build(kind: type[Block]) -> Block:
    torch.manual_seed(0)
    return kind()


PLAN = {
    "norm": SequenceParallel(),
    "gate": ColwiseParallel(input_layouts=Shard(1)),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "last": SequenceParallel(),
}


def parallel(kind: type[Block], mesh: DeviceMesh) -> nn.Module:
    """The block with its sequence and its MLP's columns over the ranks."""
    model = build(kind)
    entry = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))
    parallelize_module(model, mesh, PLAN)
    return parallelize_module(model, mesh, entry)


def train(model: Any, x: Tensor, target: Tensor) -> tuple[list[float], list[Tensor]]:
    """A few steps of AdamW: the losses, and the gradients and parameters after the last."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        y = model(x)
        loss = F.mse_loss(y.full_tensor() if isinstance(y, DTensor) else y, target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = [tensor for parameter in model.parameters() for tensor in (parameter.grad, parameter.detach())]
    return losses, [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in found]


def assert_trains_alike(model: Any, kind: type[Block], *, mine: slice | None = None) -> None:
    x, target = random(4, 6, HIDDEN), random(4, 6, HIDDEN, seed=1)
    losses, found = train(model, x, target) if mine is None else train(model, x[mine], target[mine])
    expected_losses, expected = train(build(kind), x, target)
    assert losses[-1] != losses[0]
    if mine is None:
        torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6)
    for actual, right in zip(found, expected, strict=True):
        # AdamW divides by the gradient's own size: a rounding of a small one shows.
        torch.testing.assert_close(actual, right, rtol=1e-3, atol=1e-4)


@check
def sequence_parallel(mesh: DeviceMesh) -> None:
    for kind in (Block, FusedBlock):
        model = parallel(kind, mesh)
        assert isinstance(model.norm.weight, DTensor)
        if kind is FusedBlock:  # its weight is not used by its own module's forward, but is a DTensor all the same
            assert isinstance(model.last.weight, DTensor)
        assert_trains_alike(model, kind)


@check
def sequence_parallel_compiled(mesh: DeviceMesh) -> None:
    torch._dynamo.reset()
    assert_trains_alike(torch.compile(parallel(Block, mesh), backend="aot_eager"), Block)


@check
def fully_sharded(mesh: DeviceMesh) -> None:
    """Each rank has its part of every parameter, and of the batch."""
    for kind in (Block, FusedBlock):
        model = build(kind)
        for norm in (model.norm, model.last) if kind is Block else ():
            fully_shard(norm, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert model.norm.weight.placements == (Shard(0),)
        share = 4 // mesh.size()
        assert_trains_alike(model, kind, mine=slice(share * mesh.get_rank(), share * (mesh.get_rank() + 1)))


@check
def a_module_of_dtensors_is_copied_and_saved(mesh: DeviceMesh) -> None:
    norm = rmsnorm_ops.RMSNorm(HIDDEN, 1e-6)
    parallelize_module(norm, mesh, SequenceParallel())
    other = copy.deepcopy(norm)
    other.load_state_dict(norm.state_dict())
    x = distribute_tensor(random(2, 4, HIDDEN), mesh, [Shard(1)])
    assert torch.equal(other(x).full_tensor(), norm(x).full_tensor())

"""Tensor and sequence parallel: a transformer's MLP with its norms over two processes, against one. On CPUs:

    torchrun --nproc-per-node 2 examples/05_distributed.py

The sequence is sharded outside the MLP and its columns inside. Norms and residual adds see whole rows, so they need no
communication, and the gradient of their weight is a sum over ranks, which DTensor takes when the optimizer asks for it.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn import functional as F

import rmsnorm_ops

HIDDEN, WIDE, BATCH, SEQUENCE = 64, 128, 4, 32
PLAN = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "last": SequenceParallel(),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = rmsnorm_ops.RMSNorm(HIDDEN, 1e-6), rmsnorm_ops.RMSNorm(HIDDEN, 1e-6)
        self.up, self.down = nn.Linear(HIDDEN, WIDE, bias=False), nn.Linear(WIDE, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mlp = self.down(F.silu(self.up(self.norm(x))))
        return rmsnorm_ops.add_rms_norm(mlp, x, self.last.weight, 1e-6).y


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of all parameters, both whole."""
    y = model(x)
    y.square().sin().sum().backward()
    found = [y.detach(), *(parameter.grad for parameter in model.parameters())]
    y, *gradients = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in found)
    return y, gradients


def main() -> None:
    if "RANK" not in os.environ:
        raise SystemExit("Run this example with: torchrun --nproc-per-node 2 examples/05_distributed.py")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    alone = Block()
    spread = Block()
    spread.load_state_dict(alone.state_dict())
    parallelize_module(spread, mesh, PLAN)
    x = torch.randn(BATCH, SEQUENCE, HIDDEN)

    y, gradients = step(spread, distribute_tensor(x, mesh, [Shard(1)]))
    expected, right = step(alone, x)
    if mesh.get_rank() == 0:
        print(f"{mesh.size()} processes; the weight of a norm is {spread.norm.weight.placements}")
        print(f"its gradient is {spread.norm.weight.grad.placements}")
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    for actual, gradient in zip(gradients, right, strict=True):
        torch.testing.assert_close(actual, gradient, rtol=1e-4, atol=1e-4)
    if mesh.get_rank() == 0:
        print("outputs and gradients are those of one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

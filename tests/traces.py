"""What torch.compile traces for an NVIDIA GPU that need not be there. Run in a process without Triton's interpreter:

    python -m tests.traces graphs | dynamic

CPU tensors stand for the GPU's, and a driver that only says which GPU it is stands for Triton's. Prints JSON.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from triton.backends.compiler import GPUTarget

import rmsnorm_ops
from rmsnorm_ops import device, launch, launch_backward, visible
from rmsnorm_ops.inspect.recorded import Launch, record
from rmsnorm_ops.inspect.targets import TARGETS
from tests.implementations import random

SM90 = TARGETS["sm_90"]


class Driver:
    """Enough of a driver to find out what a kernel writes."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0


class Traced(Exception):
    """The graph is there; there is no GPU to run it."""


def graphs_of(function: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> list[torch.fx.GraphModule]:
    """The joint graph of forward and backward and its two parts, or the forward alone where nothing requires grad."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return refuse

    def refuse(*args: Any) -> Any:
        raise Traced

    def partition(joint: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        graphs.append(joint)
        pair = min_cut_rematerialization_partition(joint, inputs, **options)
        graphs.extend(pair)
        return pair

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition)
    with contextlib.suppress(Traced):
        torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)(*inputs)
    return graphs[:3]


def launches(graph: torch.fx.GraphModule) -> list[dict[str, Any]]:
    """Of each kernel in the graph: its name, warps, grid, arguments that are no tensors, and the tensors it writes."""
    found = []
    for node in graph.graph.nodes:
        if "triton_kernel_wrapper" not in str(node.target):
            continue
        kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
        constants = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])
        arguments = {**dict.fromkeys(constants), **constants, **node.kwargs["kwargs"]}
        named = {name: value for name, value in arguments.items() if not isinstance(value, torch.fx.Node)}
        found.append(
            {
                "kernel": kernel.fn.__name__,
                "warps": kernel.configs[0].num_warps,
                "grid": [str(value) for value in node.kwargs["grid"][0]],
                "named": named,
                "writes": sorted(node.kwargs["tensors_to_clone"]),
            }
        )
    return found


def described(recorded: list[Launch]) -> list[dict[str, Any]]:
    """The same of an eager call."""
    found = []
    for one in recorded:
        names = one.prepared.kernel.arg_names
        values = (*one.arguments, *one.prepared.constants)
        named = {name: value for name, value in zip(names, values, strict=True) if not isinstance(value, Tensor)}
        grid = [str(value) for value in (*one.grid, 1)]
        found.append({"kernel": one.kernel, "warps": one.plan.warps, "grid": grid, "named": named})
    return found


def step(residual: bool, weighted: bool, trained: bool, options: dict[str, Any]) -> Callable[..., Any]:
    def forward(x: Tensor, other: Tensor, weight: Tensor) -> Any:
        scale = weight if weighted else None
        if residual:
            return tuple(rmsnorm_ops.add_rms_norm(x, other, scale, 1e-6, **options))
        return rmsnorm_ops.rms_norm(x, scale, 1e-6, **options)

    return forward


CASES: dict[str, dict[str, Any]] = {
    "forward": {},
    "frozen weight": {"trained": False},
    "no weight": {"weighted": False},
    "no gradient": {"gradient": False},
    "offset": {"options": {"weight_offset": 1.0}},
    "rounded twice": {"options": {"round_before_weight": True}},
    "add": {"residual": True},
    "add, residual in fp32": {"residual": True, "residual_dtype": torch.float32},
    "add, frozen weight": {"residual": True, "trained": False},
    "narrow": {"hidden": 100},
    "one row": {"view": lambda fill, hidden: fill(1, hidden)},
    "one wide row": {"hidden": 70001, "view": lambda fill, hidden: fill(1, hidden)},
    "two blocks": {"hidden": 5120},
    "fp32": {"dtype": torch.float32},
    "streamed": {"hidden": 70001},
    "shared": {"hidden": 65536},
    "fp64": {"dtype": torch.float64},
    "slice": {"view": lambda fill, hidden: fill(6, 3 * hidden)[:, hidden : 2 * hidden]},
    "unaligned slice": {"view": lambda fill, hidden: fill(6, hidden + 8)[:, 1 : hidden + 1]},
    "odd stride": {"view": lambda fill, hidden: fill(6, hidden + 1)[:, :hidden]},
    "three strides": {"view": lambda fill, hidden: fill(2, 5, 3, hidden).transpose(1, 2)},
    "transposed": {"view": lambda fill, hidden: fill(hidden, 6).t()},
}


def inputs_of(case: dict[str, Any], where: str) -> tuple[list[Tensor], Callable[..., Any]]:
    dtype, hidden = case.get("dtype", torch.bfloat16), case.get("hidden", 1024)
    view = case.get("view", lambda fill, hidden: fill(6, hidden))

    def fill(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta") if where == "meta" else random(*shape, dtype=dtype)

    trained, gradient = case.get("trained", True), case.get("gradient", True)
    x = view(fill, hidden)
    residual = fill(*x.shape, dtype=case.get("residual_dtype", dtype))
    tensors = [x.requires_grad_(gradient), residual, fill(hidden, dtype=torch.float32).requires_grad_(gradient and trained)]
    return tensors, step(case.get("residual", False), case.get("weighted", True), trained, case.get("options", {}))


def eager(case: dict[str, Any]) -> list[Launch]:
    """What an eager forward and backward launch, of gradients that are dense."""
    (x, residual, weight), _ = inputs_of(case, "meta")
    scale, options = weight if case.get("weighted", True) else None, case.get("options", {})
    offset = {name: value for name, value in options.items() if name == "weight_offset"}
    train = scale is not None and case.get("trained", True)
    y = torch.empty(x.shape, dtype=x.dtype, device="meta")

    def call() -> None:
        if case.get("residual"):
            _, total = launch.add_forward(x, residual, scale, 1e-6, **options)
            dtype = {} if residual.dtype is x.dtype else {"dx_dtype": x.dtype}
            operator = launch_backward.add_backward if train else launch_backward.add_backward_input
            operator(y, torch.empty_like(total), total, scale, 1e-6, **offset, **dtype)
            return
        launch.forward(x, scale, 1e-6, **options)
        if case.get("gradient", True):
            (launch_backward.backward if train else launch_backward.backward_input)(y, x, scale, 1e-6, **offset)

    with torch.no_grad():
        return record(SM90, call)


def pretend() -> None:
    triton.runtime.driver.set_active(Driver())
    device._limits = lambda where: SM90.limits


def graphs() -> dict[str, Any]:
    pretend()
    result: dict[str, Any] = {}
    for name, case in CASES.items():
        tensors, function = inputs_of(case, "cpu")
        graph, *_ = graphs_of(function, *tensors)
        called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        opaque = [target for target in called if "rmsnorm" in target]
        others = [target for target in called if "rmsnorm" not in target and "triton" not in target and "getitem" not in target]
        result[name] = {"opaque": opaque, "others": others, "launches": launches(graph), "eager": described(eager(case))}
    return result


def checkpointed(saved: bool) -> Callable[..., Tensor]:
    """A norm inside a checkpoint, whose policy names the operator that the graph does not hold."""

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        named = operator is torch.ops.rmsnorm.forward.default
        return CheckpointPolicy.MUST_SAVE if saved and named else CheckpointPolicy.PREFER_RECOMPUTE

    def block(x: Tensor, weight: Tensor) -> Tensor:
        return rmsnorm_ops.rms_norm(x.sin(), weight, 1e-6).cos()

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return lambda x, weight: checkpoint(block, x, weight, use_reentrant=False, context_fn=contexts)


def dynamic() -> dict[str, Any]:
    """Rows that are not a number yet, in dense x and in a slice; and hidden that is none."""
    pretend()
    result = {}
    weight = torch.nn.Parameter(random(1024))
    for name, view in (("dense", lambda x: x), ("slice", lambda x: x[..., 1024:2048])):
        x, residual = random(2, 6, 3072, dtype=torch.bfloat16), random(2, 6, 1024, dtype=torch.bfloat16)
        x = x[..., :1024].contiguous() if name == "dense" else x
        for tensor in (x, residual):
            torch._dynamo.mark_dynamic(tensor, 0)
            torch._dynamo.mark_dynamic(tensor, 1)

        def function(x: Tensor, residual: Tensor, view: Callable[[Tensor], Tensor] = view) -> Any:
            return rmsnorm_ops.rms_norm(view(x) * 1, weight, 1e-6) + rmsnorm_ops.rms_norm(view(x), weight, 1e-6)

        graph, *_ = graphs_of(function, x.requires_grad_(), residual)
        opaque = [str(node.target) for node in graph.graph.nodes if "rmsnorm" in str(node.target)]
        found = launches(graph)
        grids = [one["grid"][0] for one in found if one["kernel"] == "resident_backward"]
        result[name] = {"opaque": opaque, "launches": [one["kernel"] for one in found], "grids": grids}
    x, scale = random(6, 1024), random(1024)
    for tensor in (x, scale):
        torch._dynamo.mark_dynamic(tensor, tensor.dim() - 1)
    graph, *_ = graphs_of(lambda x, scale: rmsnorm_ops.rms_norm(x, scale, 1e-6), x, scale)
    result["hidden"] = {"opaque": [str(node.target) for node in graph.graph.nodes if "rmsnorm" in str(node.target)]}
    for saved in (False, True):
        x, scale = random(6, 1024).requires_grad_(), random(1024).requires_grad_()
        _, _, backward = graphs_of(checkpointed(saved), x, scale)
        result["saved" if saved else "recomputed"] = {"launches": [one["kernel"] for one in launches(backward)]}
    exported = torch.export.export(rmsnorm_ops.RMSNorm(1024, 1e-6), (random(6, 1024),)).run_decompositions()
    result["exported"] = {"opaque": [str(node.target) for node in exported.graph.nodes if "rmsnorm" in str(node.target)]}
    return result


if __name__ == "__main__":
    visible.DEVICES = frozenset(("cpu",))
    print(json.dumps({"graphs": graphs, "dynamic": dynamic}[sys.argv[1]](), default=str))

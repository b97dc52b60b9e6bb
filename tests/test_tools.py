"""What looks at a program's operators from outside: selective checkpointing, the profiler, the flop counter, functional_call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from rmsnorm_ops import RMSNorm, add_rms_norm, replace_rms_norm, rms_norm
from tests.gradients import textbook
from tests.implementations import DEVICES, assert_same_bits, random
from tests.test_autograd import Counter

ops = torch.ops.rmsnorm
on_each_device = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def block(x: Tensor, weight: Tensor) -> Tensor:
    y, residual_out = add_rms_norm(x.sin(), x, weight, 1e-6)
    return rms_norm(y * residual_out, weight, 1e-6).cos()


def leaves(device: str) -> tuple[Tensor, Tensor]:
    return random(6, 24, device=device).requires_grad_(), random(24, device=device, seed=1).requires_grad_()


NAMED = (ops.forward.default, ops.add_forward.default)


def policy(saved: bool, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if saved and operator in NAMED else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("saved", [False, True], ids=["recomputed", "saved"])
@on_each_device
def test_a_checkpoint_policy_names_the_operators(device: str, saved: bool) -> None:
    contexts = partial(create_selective_checkpoint_contexts, partial(policy, saved))
    x, weight = leaves(device)
    expected = torch.autograd.grad(block(x, weight).square().sum(), (x, weight))
    with Counter() as counter:
        y = checkpoint(block, x, weight, use_reentrant=False, context_fn=contexts)
        actual = torch.autograd.grad(y.square().sum(), (x, weight))
    forwards = [name for name in counter.names if "backward" not in name]
    assert sorted(forwards) == sorted(["add_forward", "forward"] * (1 if saved else 2))
    for got, right in zip(actual, expected, strict=True):
        assert_same_bits(got, right)


@pytest.mark.parametrize("saved", [False, True], ids=["recomputed", "saved"])
def test_a_checkpoint_policy_names_the_operators_compiled(saved: bool) -> None:
    contexts = partial(create_selective_checkpoint_contexts, partial(policy, saved))
    in_backward: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        in_backward.extend(str(node.target).split(".")[1] for node in graph.graph.nodes if "rmsnorm" in str(node.target))
        return graph.forward

    def checkpointed(x: Tensor, weight: Tensor) -> Tensor:
        return checkpoint(block, x, weight, use_reentrant=False, context_fn=contexts)

    backend = aot_autograd(
        fw_compiler=lambda graph, inputs: graph.forward,
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
    )
    x, weight = leaves("cpu")
    expected = torch.autograd.grad(block(x, weight).square().sum(), (x, weight))
    y = torch.compile(checkpointed, fullgraph=True, backend=backend)(x, weight)
    actual = torch.autograd.grad(y.square().sum(), (x, weight))
    again = [name for name in in_backward if "backward" not in name]
    assert again == ([] if saved else ["add_forward", "forward"])
    for got, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, right)


@on_each_device
def test_the_profiler_shows_the_operators_and_their_shapes(device: str) -> None:
    x, weight = leaves(device)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        block(x, weight).sum().backward()
    shapes = {event.key: event.input_shapes for event in profiled.key_averages(group_by_input_shape=True)}
    for name, tensors in (("forward", 1), ("add_forward", 2), ("backward", 2), ("add_backward", 3)):
        assert shapes[f"rmsnorm::{name}"][:tensors] == [[6, 24]] * tensors, name
    assert {"RMSNorm", "RMSNormBackward", "AddRMSNormBackward"} <= set(shapes)


@on_each_device
def test_flops_are_those_of_the_matrix_products(device: str) -> None:
    """As with torch.nn.functional.rms_norm: torch counts products of matrices, and a norm has none."""
    counted = []
    for norm in (RMSNorm(24), nn.RMSNorm(24)):
        model = nn.Sequential(nn.Linear(24, 24), norm, nn.Linear(24, 8)).to(device)
        with FlopCounterMode(display=False) as flops:
            model(random(6, 24, device=device)).sum().backward()
        counted.append(flops.get_total_flops())
    assert counted[0] == counted[1] > 0


@on_each_device
def test_functional_call(device: str) -> None:
    norm = RMSNorm(24, 1e-6, weight_offset=1.0).to(device)
    x, weight = random(6, 24, device=device), random(24, device=device, seed=1)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(norm, parameters, (x,)).sin().sum()

    def textbook_loss(weight: Tensor, x: Tensor) -> Tensor:
        return textbook(x, weight, 1e-6, 1.0).sin().sum()

    y = torch.func.functional_call(norm, {"weight": weight}, (x,))
    assert_same_bits(y, rms_norm(x, weight, 1e-6, weight_offset=1.0))
    gradient = torch.func.grad(loss)({"weight": weight}, x)["weight"]
    torch.testing.assert_close(gradient, torch.func.grad(textbook_loss)(weight, x))
    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))({"weight": weight}, x)["weight"]
    torch.testing.assert_close(per_sample, torch.func.vmap(torch.func.grad(textbook_loss), in_dims=(None, 0))(weight, x))


def test_an_ensemble_of_modules() -> None:
    norms = [RMSNorm(24, 1e-6) for _ in range(3)]
    for seed, norm in enumerate(norms):
        norm.weight.data = random(24, seed=seed)
    parameters, buffers = torch.func.stack_module_state(norms)
    x = random(6, 24)
    skeleton = RMSNorm(24, 1e-6, device="meta")
    y = torch.func.vmap(lambda parameters: torch.func.functional_call(skeleton, (parameters, buffers), (x,)))(parameters)
    torch.testing.assert_close(y, torch.stack([norm(x) for norm in norms]))


def test_a_replaced_model_is_compiled_whole() -> None:
    model = nn.Sequential(nn.Linear(24, 24), nn.RMSNorm(24), nn.Linear(24, 24), nn.RMSNorm(24))
    replace_rms_norm(model)
    x = random(6, 24)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x).detach(), model(x).detach())

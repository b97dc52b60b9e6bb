"""The layers for the ``kernels`` package, on models of Hugging Face's transformers and on norms of one's own."""

from __future__ import annotations

import copy

import pytest
import torch

from rmsnorm_ops import hub
from tests.implementations import random
from tests.norms import CONVENTIONS, Gemma, Llama, Once, define, holder

kernels = pytest.importorskip("kernels", reason="needs the extra 'integrations' (kernels)")

MODES = {
    "inference": kernels.Mode.INFERENCE,
    "training": kernels.Mode.TRAINING,
    "compiled inference": kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE,
    "compiled training": kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE,
}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def extensible(kind: type, name: str = "RMSNorm") -> type:
    """The class as transformers decorates it, a copy of its own."""
    return kernels.use_kernel_forward_from_hub(name)(type(kind.__name__, (kind,), {"forward": kind.forward}))


def kernelized(model: torch.nn.Module, mode: object) -> torch.nn.Module:
    with kernels.use_kernel_mapping(hub.kernel_mapping(model), inherit_mapping=False):
        return kernels.kernelize(model, mode=mode, device="cpu", use_fallback=False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CONVENTIONS)
def test_each_convention_in_each_mode(kind: type, mode: str) -> None:
    model = holder(extensible(kind)(64), extensible(kind)(64)).bfloat16()
    for seed, norm in enumerate(model):
        norm.weight.data = random(64, dtype=torch.bfloat16, seed=seed)
    before = copy.deepcopy(model)
    kernelized(model, MODES[mode])
    x = random(32, 64, dtype=torch.bfloat16, seed=5).requires_grad_()
    for norm, old in zip(model, before, strict=True):
        run = torch.compile(norm, fullgraph=True, backend="aot_eager") if "compiled" in mode else norm
        y, expected = run(x), old(x)
        assert type(y.grad_fn).__name__ != type(expected.grad_fn).__name__, "the forward was not swapped"
        assert (y == expected).float().mean() > 0.999
        gradients = torch.autograd.grad(y.float().sin().sum(), (x, norm.weight))
        theirs = torch.autograd.grad(expected.float().sin().sum(), (x, old.weight))
        for ours, right in zip(gradients, theirs, strict=True):
            assert (ours - right).norm() <= 2 * torch.finfo(x.dtype).eps * right.norm()


def test_names_that_do_not_name_one_convention_are_left_out() -> None:
    llama, once = extensible(Llama), extensible(Once)
    gemma = extensible(Gemma, "RMSNormZeroCentered")
    odd = extensible(define("OddRMSNorm", lambda x, w, eps: x * w), "Odd")
    assert hub.kernel_mapping(holder(llama(8), once(8))).keys() == set()
    assert hub.kernel_mapping(holder(llama(8), odd(8), gemma(8))).keys() == {"RMSNorm", "RMSNormZeroCentered"}


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Olmo2"])
def test_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of one hub name that round twice (Llama) and once (Olmo 2)."""
    pytest.importorskip("transformers", reason="needs the extra 'integrations' (transformers)")
    from tests.integrations.test_transformers import FP32_BOUND, MODELS, build, distance, run

    model = build(name)
    for kind in {type(module) for module in model.modules() if type(module).__name__.endswith("RMSNorm")}:
        # As transformers does itself where it and kernels are of versions that go together.
        monkeypatch.setattr(kind, "kernel_layer_name", "RMSNorm", raising=False)
    before = run(model)
    mapping = hub.kernel_mapping(model)
    ((_, repository), *_) = mapping["RMSNorm"].items()
    assert (repository.weight_offset, repository.round_before_weight) == MODELS[name][2]
    kernelized(model, MODES["training"])
    swapped = [module for module in model.modules() if "forward" in vars(module)]
    assert len(swapped) == MODELS[name][1]
    for actual, expected in zip(run(model), before, strict=True):
        assert distance(actual, expected) <= FP32_BOUND

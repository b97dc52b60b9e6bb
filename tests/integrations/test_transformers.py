"""replace_rms_norm on models of Hugging Face's transformers, tiny and of random weights."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rmsnorm_ops import RMSNorm, replace_rms_norm
from tests.processes import HERE, environment

transformers = pytest.importorskip("transformers", reason="needs the extra 'integrations' (transformers)")

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HEADS = {"head_dim": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {
    "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip
ONCE, TWICE, OFFSET = (0.0, False), (0.0, True), (1.0, False)
# Configuration: (what it needs beside SIZES, how many norms it has, their convention).
MODELS: dict[str, tuple[dict[str, Any], int, tuple[float, bool]]] = {
    "Llama": ({}, 5, TWICE),
    "Mistral": ({}, 5, TWICE),
    "Qwen2": ({}, 5, TWICE),
    "Qwen3": (HEADS, 9, TWICE),  # four of them q and k norms
    "DeepseekV3": (DEEPSEEK, 9, TWICE),
    "Gemma": (HEADS, 5, OFFSET),
    "Gemma2": (HEADS, 9, OFFSET),
    "Gemma3Text": (HEADS, 13, OFFSET),
    "GptOss": ({**HEADS, **EXPERTS}, 5, ONCE),
    "Olmo2": ({}, 9, ONCE),
}
# A dense model of each convention: where experts are chosen, one rounding can send a token elsewhere.
IN_BF16 = ("Llama", "Qwen3", "Gemma", "Gemma3Text", "Olmo2")
# fp32 roundings of 2⁻²⁴, a hundred of them one after another. Measured: 10 at most.
FP32_BOUND = 100 * 2**-24


def build(name: str) -> nn.Module:
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"needs a transformers with {name}, this is {transformers.__version__}")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name][0]))
    with torch.no_grad():  # norms start at scale 1, where a wrong convention would hardly show
        for parameter in (parameter for key, parameter in model.named_parameters() if "norm" in key):
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def run(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Logits, and all gradients of the loss as one vector."""
    ids = torch.arange(64).view(2, 32) * 37 % 125 + 3
    model.zero_grad()
    result = model(input_ids=ids, labels=ids)
    result.loss.backward()
    gradients = [parameter.grad.double().flatten() for parameter in model.parameters() if parameter.grad is not None]
    return result.logits.detach().double(), torch.cat(gradients)


def distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("name", MODELS)
def test_in_fp32(name: str) -> None:
    """The convention, the logits, and the gradients."""
    _, count, convention = MODELS[name]
    model = build(name)
    norms = [key for key, module in model.named_modules() if type(module).__name__.endswith("RMSNorm")]
    before = run(model)
    found = replace_rms_norm(model)
    assert not found.left
    assert sorted(found.replaced) == sorted(norms)
    assert len(norms) == count
    assert {(norm.weight_offset, norm.round_before_weight) for norm in found.replaced.values()} == {convention}
    for old, new in zip(before, run(model), strict=True):
        assert distance(new, old) <= FP32_BOUND


@pytest.mark.parametrize("name", IN_BF16)
def test_in_bf16(name: str) -> None:
    """Twice as far from the untouched model as that is from its fp32 copy at most: either is one of the roundings of it."""
    model = build(name).bfloat16()
    exact, before = run(copy.deepcopy(model).float()), run(model)
    replace_rms_norm(model)
    for new, old, wide in zip(run(model), before, exact, strict=True):
        assert distance(new, old) <= 2 * distance(old, wide)


@pytest.mark.parametrize("name", ["Llama", "Gemma"])
def test_another_convention_would_show(name: str) -> None:
    """In fp32 an offset, in bf16 the rounding: else the tests above hold nothing."""
    model = build(name)
    before = run(model)[0]
    found = replace_rms_norm(model)
    for norm in found.replaced.values():
        norm.weight_offset = 1 - norm.weight_offset
    assert distance(run(model)[0], before) > 1000 * FP32_BOUND


@pytest.mark.parametrize("name", ["Llama", "Gemma"])
def test_bf16_logits_are_the_same_bits(name: str) -> None:
    model = build(name).bfloat16()
    before = run(model)[0]
    found = replace_rms_norm(model)
    assert (run(model)[0] == before).float().mean() > 0.5, "an odd last bit of fp32 may turn up; a convention changes nearly all"
    for norm in found.replaced.values():
        norm.round_before_weight = not norm.round_before_weight
    assert (run(model)[0] == before).float().mean() < 0.5


@pytest.mark.parametrize("name", ["Llama", "Gemma3Text"])
def test_training_and_generation(name: str) -> None:
    """A few AdamW steps and greedy tokens, with and without the swap; saved weights load into the untouched class."""
    models = [build(name), build(name)]
    replace_rms_norm(models[1])
    ids, losses = torch.arange(64).view(2, 32) % 125 + 3, []
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(5):
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[5:] == pytest.approx(losses[:5], rel=1e-3)
    assert losses[9] < losses[5] - 0.5
    fresh = build(name)
    fresh.load_state_dict(models[1].state_dict())
    tokens = [model.eval().generate(ids[:, :4], max_new_tokens=6, do_sample=False) for model in (models[1], fresh)]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma3Text", "Olmo2"])
def test_compiled(name: str) -> None:
    """Logits and gradients of the compiled model with the swap, against the eager one without."""
    model = build(name)
    before = run(model)
    replace_rms_norm(model)
    torch._dynamo.reset()
    model.compile(backend="aot_eager", fullgraph=True)
    for actual, expected in zip(run(model), before, strict=True):
        assert distance(actual, expected) <= FP32_BOUND


def test_norms_that_cannot_be_replaced_are_named() -> None:
    """Gemma 4's v norms have no weight."""
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip(f"needs a transformers with Gemma4Text, this is {transformers.__version__}")
    model = transformers.AutoModelForCausalLM.from_config(transformers.Gemma4TextConfig(**SIZES, **HEADS))
    found = replace_rms_norm(model)
    assert set(found.left) == {f"model.layers.{layer}.self_attn.v_norm" for layer in (0, 1)}
    assert all("has no weight" in reason for reason in found.left.values())
    assert isinstance(model.model.norm, RMSNorm)


def test_example() -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "examples" / "03_transformers.py")],
        env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = [line.split()[:2] for line in done.stdout.splitlines()[2:]]
    assert lines == [[name, dtype] for name in ("Llama", "Gemma") for dtype in ("float32", "bfloat16")]

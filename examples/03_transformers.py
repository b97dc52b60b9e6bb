"""Hugging Face's Llama and Gemma, tiny and of random weights, before and after replace_rms_norm: same loss, same gradients.

How far apart they may be follows from how far the untouched model is from an exact one. ``before`` is a copy in a wider
dtype plus rounding errors; ``after`` makes as many roundings, some of them elsewhere, so it is no further from that copy, and
the two are at most twice that distance from each other. The loss moves by at most twice as much as the logits do.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rmsnorm_ops

SIZES = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128,
}  # fmt: skip
WIDER = {torch.float32: torch.float64, torch.bfloat16: torch.float32}


class Step(NamedTuple):
    """One forward and backward: the loss, the logits, and all gradients as one vector."""

    loss: float
    logits: Tensor
    gradients: Tensor


def run(model: nn.Module, ids: Tensor) -> Step:
    model.zero_grad()
    logits = model(input_ids=ids).logits.double()
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    gradients = torch.cat([parameter.grad.double().flatten() for parameter in model.parameters()])
    return Step(loss.item(), logits.detach(), gradients)


def distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def compare(name: str, model: nn.Module, ids: Tensor) -> None:
    """Print a line of the table, and hold the model to the bounds."""
    dtype = next(model.parameters()).dtype
    exact, before = run(copy.deepcopy(model).to(WIDER[dtype]), ids), run(model, ids)
    found = rmsnorm_ops.replace_rms_norm(model)
    after = run(model, ids)
    conventions = {(norm.weight_offset, norm.round_before_weight) for norm in found.replaced.values()}
    convention = ", ".join(f"{offset:g} + weight, rounded {'twice' if twice else 'once'}" for offset, twice in conventions)
    loss_bound = 4 * (before.logits - exact.logits).abs().max().item()
    bound = 2 * distance(before.gradients, exact.gradients)
    loss_off, off = abs(after.loss - before.loss), distance(after.gradients, before.gradients)
    print(
        f"{name:6} {str(dtype).removeprefix('torch.'):9} {len(found.replaced):5}  {convention:27} "
        f"{before.loss:8.4f} {after.loss:8.4f} {loss_off:8.1e} ({loss_bound:.1e}) {off:8.1e} ({bound:.1e})"
    )
    assert not found.left
    assert loss_off <= loss_bound
    assert off <= bound


def main() -> None:
    try:
        import transformers
    except ImportError:
        raise SystemExit("This example needs Hugging Face's transformers: pip install transformers") from None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"transformers {transformers.__version__}, {device}; off: after against before, and its bound")
    print("model  dtype     norms  convention                    before    after loss off             gradients off")
    for name in ("Llama", "Gemma"):
        for dtype in WIDER:
            torch.manual_seed(0)
            config = getattr(transformers, f"{name}Config")(**SIZES, pad_token_id=0, bos_token_id=1, eos_token_id=2)
            model = transformers.AutoModelForCausalLM.from_config(config)
            with torch.no_grad():  # norms start at 1 (Gemma: 0), where the conventions can hardly be told apart
                for parameter in (p for key, p in model.named_parameters() if "norm" in key):
                    parameter.add_(0.2 * torch.randn_like(parameter))
            compare(name, model.to(device, dtype), torch.randint(3, 512, (2, 64), device=device))


if __name__ == "__main__":
    main()

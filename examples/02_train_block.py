"""Train a small transformer block whose norms, and the residual add before the second, are this library's, and compare
its first gradients with those of the same block made of torch.nn.functional.rms_norm. On the GPU if there is one."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rmsnorm_ops

HIDDEN, HEADS, HEAD_DIM, STEPS = 256, 4, 64, 20
EPS = 1e-6
# Both blocks round each of some hundred fp32 operations to within 2⁻²⁴, at different places: their gradients agree to
# about √100 such roundings in the mean, and to 100 of them with certainty.
BOUND = 100 * 2**-24


class Block(nn.Module):
    """Pre-norm attention with q and k norms, and a gated MLP: x + attention(norm(x)), then the same with the MLP."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        norm = rmsnorm_ops.RMSNorm if fused else nn.RMSNorm  # one constructor, one state_dict
        self.attention_norm, self.mlp_norm = norm(HIDDEN, EPS), norm(HIDDEN, EPS)
        self.q_norm, self.k_norm = norm(HEAD_DIM, EPS), norm(HEAD_DIM, EPS)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.attention_out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        attention = self.attention(self.attention_norm(x))
        if self.fused:  # the sum is written once and normed in the same pass
            y, x = rmsnorm_ops.add_rms_norm(attention, x, self.mlp_norm.weight, EPS)
        else:
            x = x + attention
            y = F.rms_norm(x, (HIDDEN,), self.mlp_norm.weight, EPS)
        gate, up = self.gate_up(y).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

    def attention(self, x: Tensor) -> Tensor:
        # q and k are slices of one projection with the heads moved forward: normed where they lie, without a copy.
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        return self.attention_out(heads.transpose(1, 2).flatten(-2))


def batch(device: str) -> tuple[Tensor, Tensor]:
    """Random x, and as the target the mean of it up to each position: something for attention to learn."""
    x = torch.randn(4, 64, HIDDEN, device=device)
    return x, x.cumsum(1) / torch.arange(1, 65, device=device)[:, None]


def largest_difference(ours: nn.Module, theirs: nn.Module) -> float:
    """Over the parameters, the largest ‖difference of the gradients‖ / ‖gradient‖."""
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(((a.grad - b.grad).norm() / b.grad.norm()).item() for a, b in pairs)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    block, plain = Block(fused=True).to(device), Block(fused=False).to(device)
    plain.load_state_dict(block.state_dict())
    x, target = batch(device)

    for model in (block, plain):
        F.mse_loss(model(x), target).backward()
    difference = largest_difference(block, plain)
    print(f"gradients differ from torch's by {difference:.1e} of their norm, the bound is {BOUND:.1e}")
    assert difference <= BOUND

    optimizer = torch.optim.AdamW(block.parameters(), lr=2e-3)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = F.mse_loss(block(x), target)
        loss.backward()
        optimizer.step()
        if step % 5 == 0 or step == STEPS - 1:
            print(f"step {step:2}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()

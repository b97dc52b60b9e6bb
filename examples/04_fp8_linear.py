"""A norm that feeds an fp8 linear layer: codes and scales in one pass, then torch._scaled_mm, on the GPU if there is one that has
fp8 matmuls. Without one, the same product of what the codes stand for."""

from __future__ import annotations

import torch
from torch import Tensor

import rmsnorm_ops

ROWS, HIDDEN, OUT = 256, 4096, 1024
EPS = 1e-6
E4M3 = torch.float8_e4m3fn
# A code of e4m3 is off by up to 2⁻⁴ of its value, evenly: by 2⁻⁴ / √3 / 1.4 ≈ 0.026 in the mean, over a binade. Two such errors,
# of the norm's and of the layer's codes, make 0.037 of a product of random numbers; errors of its terms add up as the terms do.
EXPECTED, BOUND = 0.037, 0.05
# The matmul's own part: fp32 sums, and one rounding to bf16.
MATMUL_BOUND = 2.0**-8


def quantised(layer: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's codes [out, hidden] and scales [out, 1], once, when it is loaded."""
    scale = layer.float().abs().amax(1, keepdim=True) / torch.finfo(E4M3).max
    return (layer.float() / scale).to(E4M3), scale


def has_fp8_matmul() -> bool:
    return torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 9)


def linear(q: Tensor, scale: Tensor, layer_q: Tensor, layer_scale: Tensor) -> Tensor:
    """(q · scale) @ (layer_q · layer_scale).t(), in bf16."""
    if not has_fp8_matmul():
        return dequantised(q, scale, layer_q, layer_scale).bfloat16()
    return torch._scaled_mm(
        q, layer_q.t(), scale_a=scale, scale_b=layer_scale.t().contiguous(), out_dtype=torch.bfloat16, use_fast_accum=False
    )


def dequantised(q: Tensor, scale: Tensor, layer_q: Tensor, layer_scale: Tensor) -> Tensor:
    return ((q.double() * scale.double()) @ (layer_q.double() * layer_scale.double()).t()).float()


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, residual = (torch.randn(ROWS, HIDDEN, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.rand(HIDDEN, device=device) + 0.5
    layer = torch.randn(OUT, HIDDEN, device=device, dtype=torch.bfloat16) * HIDDEN**-0.5
    layer_q, layer_scale = quantised(layer)

    q, scale, residual_out = rmsnorm_ops.add_rms_norm_quant(x, residual, weight, EPS, dtype=E4M3)
    print("q:", tuple(q.shape), q.dtype, "scale:", tuple(scale.shape), scale.dtype, "residual_out:", residual_out.dtype)
    out = linear(q, scale, layer_q, layer_scale)

    y, _ = rmsnorm_ops.add_rms_norm(x, residual, weight, EPS)
    off = error(out, y.double() @ layer.double().t())
    print(f"off by {off:.3f} of the unquantised product, {EXPECTED} expected, the bound is {BOUND}")
    assert off < BOUND
    own = error(out, dequantised(q, scale, layer_q, layer_scale))
    print(f"of that the matmul's own part, {'torch._scaled_mm' if has_fp8_matmul() else 'dequantised'}: {own:.2g}")
    assert own < MATMUL_BOUND

    # A scale a group of 128, as DeepSeek-style block-scaled matmuls take it: column-major. Nearer, where a row has outliers.
    y[:, 7] *= 200
    for group_size, name in ((None, "row"), (128, "group of 128")):
        q, scale = rmsnorm_ops.rms_norm_quant(y, weight, EPS, dtype=torch.int8, group_size=group_size, column_major_scale=True)
        spread = scale.repeat_interleave(group_size or HIDDEN, 1)
        exact = rmsnorm_ops.rms_norm(y.float(), weight, EPS)
        print(f"int8 with an outlier a row, a scale a {name}: off by {error(q * spread, exact):.3f}, strides {scale.stride()}")


if __name__ == "__main__":
    main()

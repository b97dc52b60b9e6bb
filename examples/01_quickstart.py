"""The operator, the function, strided input, and torch.compile, on the GPU if there is one."""

import torch

import rmsnorm_ops


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(4, 128, 4096, device=device, dtype=torch.bfloat16)
    weight = torch.randn(4096, device=device, dtype=torch.bfloat16)

    y = torch.ops.rmsnorm.forward(x, weight, 1e-6)
    print("y:", tuple(y.shape), y.dtype, y.device)

    # Gemma stores weight − 1; Llama in Hugging Face's transformers rounds before the weight multiplies.
    gemma = rmsnorm_ops.rms_norm(x, weight, 1e-6, weight_offset=1.0)
    llama = rmsnorm_ops.rms_norm(x, weight, 1e-6, round_before_weight=True)
    print("largest effect of the offset:", (gemma - y).abs().max().item())
    print("largest effect of rounding first:", (llama - y).abs().max().item())

    # q/k norm: the heads of q inside a fused qkv projection. The slice is read where it lies, without a copy.
    qkv = torch.randn(4, 128, 3 * 32 * 128, device=device, dtype=torch.bfloat16)
    q = qkv[..., : 32 * 128].unflatten(-1, (32, 128))
    print("q:", tuple(rmsnorm_ops.rms_norm(q, torch.ones(128, device=device)).shape), "from strides", q.stride())

    # A row's result does not depend on what stands beside it, to the bit.
    alone = rmsnorm_ops.rms_norm(x[2, 5], weight, 1e-6)
    assert torch.equal(alone, y[2, 5])

    compiled = torch.compile(lambda x: torch.nn.functional.silu(rmsnorm_ops.rms_norm(x, weight, 1e-6)), fullgraph=True)
    print("compiled:", tuple(compiled(x).shape))


if __name__ == "__main__":
    main()

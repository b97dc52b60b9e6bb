"""Other libraries' norms, imported when they are asked for. Each is called as its own module calls it; forward and backward alone
through the functions that its autograd.Function calls."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rmsnorm_ops.bench.cases import Case
from rmsnorm_ops.bench.problem import Inputs
from rmsnorm_ops.bench.providers import Call, Provider

HALVES_AND_FLOAT = (torch.float16, torch.bfloat16, torch.float32)


class Peer(NamedTuple):
    """``module`` is imported, then ``make`` makes the provider from it."""

    name: str
    module: str
    package: str  # the distribution, as pip knows it
    make: Callable[[Peer], Provider]

    @property
    def present(self) -> bool:
        return importlib.util.find_spec(self.module.split(".")[0]) is not None


def _liger(peer: Peer) -> Provider:
    plain = importlib.import_module(peer.module)
    fused = importlib.import_module("liger_kernel.ops.fused_add_rms_norm")

    def mode(case: Case) -> tuple[float, str]:
        # "gemma" computes all in fp32 and rounds once, as the operators do; "llama" rounds before the weight.
        return case.weight_offset, "llama" if case.round_before_weight else "gemma"

    def norm(x: Tensor, weight: Tensor | None, case: Case) -> Tensor:
        return plain.LigerRMSNormFunction.apply(x, weight, case.eps, *mode(case))

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor | None, case: Case) -> tuple[Tensor, Tensor]:
        return fused.LigerFusedAddRMSNormFunction.apply(x, residual, weight, case.eps, *mode(case))

    def backward(inputs: Inputs, case: Case) -> Call:
        _, x, rstd, block, warps, casting = plain.rms_norm_forward(inputs.x, inputs.weight, case.eps, *mode(case), None)

        def call() -> tuple[Tensor, ...]:
            # In place, as it is by default: dx is written over dy.
            arguments = (case.weight_offset, casting, block, warps, True, None)
            return _present(plain.rms_norm_backward(inputs.dy, x, inputs.weight, rstd, *arguments))

        return call

    return Provider(
        peer.name, norm, add_norm, backward, peer.package, ("cuda",), HALVES_AND_FLOAT,
        options=("weight_offset", "round_before_weight"), most_hidden=65536, overwrites_dy=True,
    )  # fmt: skip


def _fla(peer: Peer) -> Provider:
    module = importlib.import_module(peer.module)

    def backward(inputs: Inputs, case: Case) -> Call:
        rstd = module.layer_norm_fwd(_rows(inputs.x), inputs.weight, None, case.eps, is_rms_norm=True)[2]

        def call() -> tuple[Tensor, ...]:
            dy, x = _rows(inputs.dy), _rows(inputs.x)
            dx, dweight, *_ = module.layer_norm_bwd(dy, x, inputs.weight, None, mean=None, rstd=rstd, is_rms_norm=True)
            return _present((dx.view(inputs.x.shape), dweight))

        return call

    return Provider(
        peer.name, *_prenorm(module.rms_norm), backward, peer.package, ("cuda",), HALVES_AND_FLOAT, most_bytes=65536
    )  # fmt: skip


def _flash_attn(peer: Peer) -> Provider:
    module = importlib.import_module(peer.module)

    def backward(inputs: Inputs, case: Case) -> Call:
        weight = inputs.weight
        rstd = module._layer_norm_fwd(_rows(inputs.x), weight, None, case.eps, is_rms_norm=True)[3]

        def call() -> tuple[Tensor, ...]:
            dy, x = _rows(inputs.dy), _rows(inputs.x)
            dx, dweight, *_ = module._layer_norm_bwd(dy, x, weight, None, case.eps, None, rstd, is_rms_norm=True)
            return dx.view(inputs.x.shape), dweight

        return call

    return Provider(
        peer.name, *_prenorm(module.rms_norm_fn), backward, peer.package, ("cuda",), HALVES_AND_FLOAT,
        most_bytes=65536, needs_weight=True,
    )  # fmt: skip


def _quack(peer: Peer) -> Provider:
    module = importlib.import_module(peer.module)

    def norm(x: Tensor, weight: Tensor | None, case: Case) -> Tensor:
        return module.rmsnorm(x, weight, eps=case.eps, **_offset(case))

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor | None, case: Case) -> tuple[Tensor, Tensor]:
        return module.rmsnorm(x, weight, residual=residual, eps=case.eps, prenorm=True, **_offset(case))

    def backward(inputs: Inputs, case: Case) -> Call:
        rstd = module.rmsnorm_fwd(_rows(inputs.x), inputs.weight, eps=case.eps, store_rstd=True, **_offset(case))[2]

        def call() -> tuple[Tensor, ...]:
            gradients = module.rmsnorm_bwd(_rows(inputs.x), inputs.weight, _rows(inputs.dy), rstd, **_offset(case))
            return _present((gradients[0].view(inputs.x.shape), gradients[1]))

        return call

    return Provider(
        peer.name, norm, add_norm, backward, peer.package, ("cuda",), HALVES_AND_FLOAT, options=("weight_offset",)
    )  # fmt: skip


PEERS = (
    Peer("liger", "liger_kernel.ops.rms_norm", "liger-kernel", _liger),
    Peer("fla", "fla.modules.layernorm", "fla-core", _fla),
    Peer("flash-attn", "flash_attn.ops.triton.layer_norm", "flash-attn", _flash_attn),
    Peer("quack", "quack.rmsnorm", "quack-kernels", _quack),
)


def _prenorm(
    function: Callable[..., object],
) -> tuple[Callable[[Tensor, Tensor | None, Case], Tensor], Callable[..., tuple[Tensor, Tensor]]]:
    """norm and add_norm of the signature that fla took over from flash-attn."""

    def norm(x: Tensor, weight: Tensor | None, case: Case) -> Tensor:
        y = function(x, weight, None, eps=case.eps)
        assert isinstance(y, Tensor)
        return y

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor | None, case: Case) -> tuple[Tensor, Tensor]:
        both = function(x, weight, None, residual=residual, eps=case.eps, prenorm=True)
        assert isinstance(both, tuple)
        return both

    return norm, add_norm


def _offset(case: Case) -> dict[str, float]:
    """Versions of quack before the option take no such argument."""
    return {"weight_offset": case.weight_offset} if case.weight_offset else {}


def _rows(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.reshape(-1, tensor.shape[-1])


def _present(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    return tuple(gradient for gradient in gradients if gradient is not None)

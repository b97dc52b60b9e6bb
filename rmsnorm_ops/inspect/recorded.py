"""Launches that are recorded instead of run, and compiled for a GPU that need not be there.

The library's own launchers run, on meta tensors under assumed limits: plan, arguments and constexprs are those of a real call,
and are bound as Triton's launch binds them. There is no second description of a kernel here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.errors import TritonError
from triton.runtime.jit import create_function_from_signature

from rmsnorm_ops import device, executors
from rmsnorm_ops import prepared as prepared_kernels
from rmsnorm_ops.inspect.targets import Target
from rmsnorm_ops.plan import LaunchPlan
from rmsnorm_ops.prepared import Prepared

INTERPRETING = "TRITON_INTERPRET is set, and what Triton interprets it does not compile: unset it"


class DoesNotCompile(RuntimeError):
    """A kernel that Triton, or an assembler, gives up on."""


@dataclass(frozen=True)
class Launch:
    """One launch: ``grid`` programs of ``prepared.kernel``."""

    prepared: Prepared
    grid: tuple[int, int]
    arguments: tuple[Any, ...]

    @property
    def kernel(self) -> str:
        return str(self.prepared.kernel.__name__)

    @property
    def plan(self) -> LaunchPlan:
        return self.prepared.plan


def record(target: Target, call: Callable[[], object]) -> list[Launch]:
    """What ``call`` would launch on ``target``; its tensors must be meta tensors."""
    if knobs.runtime.interpret:
        raise RuntimeError(INTERPRETING)

    def recording() -> list[Launch]:
        device.ASSUMED.set(target.limits)
        recorded: list[Any] = []
        prepared_kernels.RECORDED.set(recorded)
        call()
        return [Launch(*launch) for launch in recorded]

    return copy_context().run(recording)


def bound(launch: Launch, target: Target) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """The arguments by name, and what Triton's launch would compile each for: its type, and what is known of its value."""
    kernel = launch.prepared.kernel
    backend = make_backend(_gpu(target))
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    arguments, specialisation, _ = binder(
        *launch.arguments, *launch.prepared.constants, debug=False, **executors.options(launch.prepared)
    )
    return arguments, specialisation


def compiled(launch: Launch, target: Target) -> Any:
    """The kernel as Triton would compile it for this launch on ``target``: ``asm`` has every stage, ``metadata`` the rest.

    Raises DoesNotCompile.
    """
    kernel, options = launch.prepared.kernel, executors.options(launch.prepared)
    arguments, specialisation = bound(launch, target)
    # The JIT's own step from what was bound to what is compiled: private, and the same from triton 3.6.0 to 3.9.0.
    _, signature, constexprs, attributes = kernel._pack_args(
        make_backend(_gpu(target)), dict(options), arguments, specialisation, None
    )
    source = ASTSource(kernel, signature, constexprs, attributes)
    try:
        return triton.compile(source, target=_gpu(target), options=dict(options))
    except (RuntimeError, TritonError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DoesNotCompile(f"{launch.kernel} does not compile: {reason}") from error


def _gpu(target: Target) -> GPUTarget:
    return GPUTarget(target.backend, target.arch, target.limits.warp_size)

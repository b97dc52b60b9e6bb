"""The ways a prepared kernel runs. Importing this module imports triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from triton import knobs

if TYPE_CHECKING:
    from rmsnorm_ops.prepared import Prepared

# A compiled kernel's own launch is a private interface: used where it was read and found the same (3.6.0 to 3.9.0).
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
HOLDS_COMPILED = (3, 6) <= TRITON <= (3, 9)


def options(prepared: Prepared) -> dict[str, Any]:
    """What a kernel is compiled with, beyond its arguments."""
    # Fusing a product and a sum is asked for, not left to a default that changes with triton 3.10: bits depend on it.
    options: dict[str, Any] = {"num_warps": prepared.plan.warps, "enable_fp_fusion": True}
    if prepared.plan.slices > 1:
        # All programs run at once, or none: they wait for one another.
        options |= {"launch_cooperative_grid": True, "maxnreg": prepared.plan.max_registers}
    return options


def jit(prepared: Prepared, grid: tuple[int, int], arguments: tuple[Any, ...]) -> Any:
    """Triton's public launch. Specialises, compiles where needed, and returns the compiled kernel."""
    return prepared.kernel[grid](*arguments, *prepared.constants, **options(prepared))


def compiled(prepared: Prepared, grid: tuple[int, int], arguments: tuple[Any, ...]) -> None:
    """Launch on the current GPU, and hold what was compiled for the launches to come."""
    kernel = jit(prepared, grid, arguments)
    if not HOLDS_COMPILED:
        return
    prepared.hooks = knobs.runtime.launch_enter_hook
    run, function, metadata = kernel.run, kernel.function, kernel.packed_metadata
    if TRITON == (3, 6) and torch.version.hip is None and run.global_scratch_size == run.profile_scratch_size == 0:
        # One Python call fewer: this launcher only finds out, each time, that no scratch memory is needed.
        prepared.before = (function, run.launch_cooperative_grid, run.launch_pdl, None, None, metadata, None, None, None)
        run = run.launch
    else:
        prepared.before = (function, metadata, None, None, None)
    prepared.run = run  # last: from here on another thread may launch it


def interpreted(prepared: Prepared, grid: tuple[int, int], arguments: tuple[Any, ...]) -> None:
    """Run the kernel's Python on CPU tensors."""
    if not knobs.runtime.interpret:
        raise RuntimeError(
            "Triton kernels run on CPU tensors only in its interpreter: set TRITON_INTERPRET=1 before triton is imported"
        )
    jit(prepared, grid, arguments)

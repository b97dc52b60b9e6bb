"""The ways a prepared kernel runs. Importing this module imports triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from triton import knobs

if TYPE_CHECKING:
    from rmsnorm_ops.prepared import Prepared

# A compiled kernel's own launch is a private interface: used where it was read and found the same (3.6.0 to 3.9.0).
HOLDS_COMPILED = (3, 6) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= (3, 9)


def options(prepared: Prepared) -> dict[str, Any]:
    """What a kernel is compiled with, beyond its arguments."""
    # Fusing a product and a sum is asked for, not left to a default that changes with triton 3.10: bits depend on it.
    return {"num_warps": prepared.plan.warps, "enable_fp_fusion": True}


def jit(prepared: Prepared, grid: tuple[int, int], arguments: tuple[Any, ...]) -> Any:
    """Triton's public launch. Specialises, compiles where needed, and returns the compiled kernel."""
    return prepared.kernel[grid](*arguments, *prepared.constants, **options(prepared))


def held(prepared: Prepared, grid: tuple[int, int], arguments: tuple[Any, ...]) -> None:
    """Launch the compiled kernel itself: ``prepared`` already stands for all that the public launch would look up again."""
    run = prepared.run
    if run is None or knobs.runtime.launch_enter_hook.calls:  # a profiler's hooks want the public launch
        compiled = jit(prepared, grid, arguments)
        if HOLDS_COMPILED:
            prepared.function, prepared.metadata = compiled.function, compiled.packed_metadata
            prepared.run = compiled.run  # last: from here on another thread may launch it
        return
    stream = torch._C._cuda_getCurrentRawStream(prepared.device.index)
    run(
        *grid, 1, stream, prepared.function, prepared.metadata, None, None, None, *arguments, *prepared.constants,
    )  # fmt: skip


def interpreted(prepared: Prepared, grid: tuple[int, int], arguments: tuple[Any, ...]) -> None:
    """Run the kernel's Python on CPU tensors."""
    if not knobs.runtime.interpret:
        raise RuntimeError(
            "Triton kernels run on CPU tensors only in its interpreter: set TRITON_INTERPRET=1 before triton is imported"
        )
    jit(prepared, grid, arguments)

"""The limits of the devices at hand. The one reader of GPU properties; each device is asked once."""

from __future__ import annotations

from contextvars import ContextVar
from functools import cache

import torch

from rmsnorm_ops.plan import DeviceLimits

# CUDA and HIP alike allow 1024 threads a program: 32 warps of 32, or 16 wavefronts of 64.
MAX_THREADS = 1024

# What meta tensors stand for while inspect/ records launches.
ASSUMED: ContextVar[DeviceLimits] = ContextVar("assumed limits")


def limits(device: torch.device) -> DeviceLimits:
    """The limits of ``device``. A CPU device stands for Triton's interpreter, which runs the plans of a 32-wide GPU."""
    return ASSUMED.get() if device.type == "meta" else _limits(device)


@cache
def _limits(device: torch.device) -> DeviceLimits:
    if device.type == "cpu":
        return DeviceLimits(warp_size=32, max_threads=MAX_THREADS, processors=4, shared_memory=227 * 1024)
    properties = torch.cuda.get_device_properties(device)
    return DeviceLimits(
        warp_size=properties.warp_size,
        max_threads=MAX_THREADS,
        processors=properties.multi_processor_count,
        # ROCm reports no larger limit to opt in to.
        shared_memory=getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block),
        ahead="registers" if torch.version.hip else "shared memory",
        # On NVIDIA GPUs alone has it been run.
        cooperative=torch.version.hip is None,
        converts_to_fp8=torch.version.hip is None and properties.major >= 9,
    )

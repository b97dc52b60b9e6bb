"""The limits of the devices at hand. The one reader of GPU properties; each device is asked once."""

from __future__ import annotations

from functools import cache

import torch

from rmsnorm_ops.plan import DeviceLimits

# CUDA and HIP alike allow 1024 threads a program: 32 warps of 32, or 16 wavefronts of 64.
MAX_THREADS = 1024


@cache
def limits(device: torch.device) -> DeviceLimits:
    """The limits of ``device``. A CPU device stands for Triton's interpreter, which runs the plans of a 32-wide GPU."""
    if device.type == "cpu":
        return DeviceLimits(warp_size=32, max_threads=MAX_THREADS)
    return DeviceLimits(warp_size=torch.cuda.get_device_properties(device).warp_size, max_threads=MAX_THREADS)

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
        return DeviceLimits(warp_size=32, max_threads=MAX_THREADS, processors=4, shared_memory=227 * 1024)
    properties = torch.cuda.get_device_properties(device)
    return DeviceLimits(
        warp_size=properties.warp_size,
        max_threads=MAX_THREADS,
        processors=properties.multi_processor_count,
        # ROCm reports no larger limit to opt in to.
        shared_memory=getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block),
        # On NVIDIA GPUs alone has it been run.
        cooperative=torch.version.hip is None,
    )


@cache
def converts_to_fp8(device: torch.device) -> bool:
    """Whether Triton's conversion of fp32 to e4m3fn and e5m2 is one instruction that rounds once: NVIDIA's from sm_90 on.

    Elsewhere some of them do not compile and others go through fp16; its interpreter loses a carry.
    """
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)

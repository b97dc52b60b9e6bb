"""The GPUs that kernels are compiled for, as data: none of them need be there.

One part stands for each target. Sources: [CCCL] NVIDIA's arch_traits (cuda/__device/arch_traits.h); [ROCm] AMD's table of GPU
specifications (rocm.docs.amd.com, reference/gpu-specs); [LLVM] AMDGPUBaseInfo.cpp, which the compiler itself goes by; for an
NVIDIA part its architecture white paper, or what the CUDA driver reports of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from rmsnorm_ops.plan import DeviceLimits

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Target:
    """What the compiler is told, what a plan must know, and what occupancy follows from.

    A processor is what torch counts as one: an SM, a compute unit of CDNA, or the two compute units (WGP) of RDNA that a
    program spreads over. Each has four SIMDs, whose warps share a register file.
    """

    name: str
    part: str
    backend: str  # cuda, hip
    arch: int | str
    limits: DeviceLimits
    registers: int  # of 32 bits a lane, in the register file of a SIMD
    register_granule: int  # registers come in multiples of this
    max_registers: int  # a thread can address
    warps: int  # a SIMD holds at most; a warp is a wavefront on AMD
    programs: int  # a processor holds at most
    shared_memory: int  # bytes a processor has for its programs
    reserved_memory: int  # bytes of it that each program costs besides its own
    l2: int  # bytes

    @property
    def amd(self) -> bool:
        return self.backend == "hip"


def _nvidia(name: str, part: str, *, sms: int, l2: int, warps: int, programs: int, shared: int) -> Target:
    # [CCCL] 1024 threads a block; 65536 registers an SM, in four parts; 255 a thread; 1 KiB of shared memory reserved a block,
    # which is also what one block cannot have of the SM's. Registers come in 256 a warp, 8 a lane (CUDA occupancy calculator).
    arch = int(name.removeprefix("sm_"))
    limits = DeviceLimits(32, 1024, sms, shared_memory=shared - KIB, cooperative=True, converts_to_fp8=arch >= 90)
    return Target(
        name, part, "cuda", arch, limits, registers=512, register_granule=8, max_registers=255,
        warps=warps, programs=programs, shared_memory=shared, reserved_memory=KIB, l2=l2,
    )  # fmt: skip


def _cdna(name: str, part: str, *, cus: int, l2: int, lds: int) -> Target:
    # [LLVM] 512 registers a lane of a SIMD, AGPRs included, all of which one wave may have; granule 8; 8 waves a SIMD.
    # [ROCm] wavefronts of 64; a work-group has at most 1024 work-items, and may have the whole LDS of its CU.
    limits = DeviceLimits(warp_size=64, max_threads=1024, processors=cus, shared_memory=lds, ahead="registers")
    return Target(
        name, part, "hip", name, limits, registers=512, register_granule=8, max_registers=512,
        warps=8, programs=32, shared_memory=lds, reserved_memory=0, l2=l2,
    )  # fmt: skip


def _rdna(name: str, part: str, *, wgps: int, l2: int) -> Target:
    # [LLVM] gfx1100, gfx1201: 1536 registers a lane of a SIMD (feature 1.5x VGPRs), 256 a wave; granule 24; 16 waves of 32.
    # [ROCm] 128 KiB of LDS a WGP, of which one work-group may have 64 KiB; at most 1024 work-items.
    limits = DeviceLimits(warp_size=32, max_threads=1024, processors=wgps, shared_memory=64 * KIB, ahead="registers")
    return Target(
        name, part, "hip", name, limits, registers=1536, register_granule=24, max_registers=256,
        warps=16, programs=64, shared_memory=128 * KIB, reserved_memory=0, l2=l2,
    )  # fmt: skip


# Warps a SIMD, programs an SM and shared memory of NVIDIA's: [CCCL]. Compute units, LDS and L2 of AMD's: [ROCm]; torch reports
# the WGPs of RDNA, half of its compute units.
TARGETS = {
    target.name: target
    for target in (
        # NVIDIA A100 white paper: 108 SMs, 40 MB of L2.
        _nvidia("sm_80", "A100", sms=108, l2=40 * MIB, warps=16, programs=32, shared=164 * KIB),
        # NVIDIA Ada white paper: 128 SMs, 72 MB of L2 (L40S: 142 SMs, 96 MB).
        _nvidia("sm_89", "RTX 4090", sms=128, l2=72 * MIB, warps=12, programs=24, shared=100 * KIB),
        # The driver reports 132 SMs and 60 MB of L2 (H100 white paper: 132 in the SXM5 form, and 50 MB).
        _nvidia("sm_90", "H200", sms=132, l2=60 * MIB, warps=16, programs=32, shared=228 * KIB),
        # Blackwell tuning guide: 126 MB of L2, shared memory as on Hopper. The driver reports 148 SMs.
        _nvidia("sm_100", "B200", sms=148, l2=126 * MIB, warps=16, programs=32, shared=228 * KIB),
        # NVIDIA RTX Blackwell white paper, and the driver: 170 SMs, 96 MB of L2.
        _nvidia("sm_120", "RTX 5090", sms=170, l2=96 * MIB, warps=12, programs=24, shared=100 * KIB),
        # Of an MI250X each of the two dies is a device: 110 of its 220 compute units, 8 of 16 MB.
        _cdna("gfx90a", "MI250X", cus=110, l2=8 * MIB, lds=64 * KIB),
        # L2: 4 MB for each of eight dies.
        _cdna("gfx942", "MI300X", cus=304, l2=32 * MIB, lds=64 * KIB),
        _cdna("gfx950", "MI355X", cus=256, l2=32 * MIB, lds=160 * KIB),
        _rdna("gfx1100", "RX 7900 XTX", wgps=48, l2=6 * MIB),
        _rdna("gfx1201", "RX 9070 XT", wgps=32, l2=8 * MIB),
    )
}

"""What datasheets promise, as data: the name that torch gives a device → peak memory bandwidth and fp32 rate outside the matrix
units. Whole names alone: a laptop's, a cut-down or a partitioned GPU of nearly the same name has other peaks."""

from __future__ import annotations

from typing import NamedTuple


class Peak(NamedTuple):
    gb_s: float  # 10⁹ bytes a second
    tflops: float  # 10¹² fp32 operations a second, an fma as two

    @property
    def ridge(self) -> float:
        """FLOP a byte from which on arithmetic, not memory, bounds an operation."""
        return self.tflops * 1e3 / self.gb_s


PEAKS = {
    # NVIDIA B200, GB200: "NVIDIA Blackwell" datasheet, HGX B200 and GB200 a GPU (8 TB/s; 80 TFLOPS)
    "NVIDIA B200": Peak(8000, 80),
    "NVIDIA GB200": Peak(8000, 80),
    # "NVIDIA H200 Tensor Core GPU" datasheet: SXM (67 TFLOPS), NVL (60)
    "NVIDIA H200": Peak(4800, 67),
    "NVIDIA H200 NVL": Peak(4800, 60),
    # "NVIDIA H100 Tensor Core GPU" datasheet: SXM, PCIe, NVL
    "NVIDIA H100 80GB HBM3": Peak(3350, 67),
    "NVIDIA H100 PCIe": Peak(2000, 51),
    "NVIDIA H100 NVL": Peak(3900, 60),
    # "NVIDIA A100 Tensor Core GPU" datasheet
    "NVIDIA A100-SXM4-40GB": Peak(1555, 19.5),
    "NVIDIA A100-PCIE-40GB": Peak(1555, 19.5),
    "NVIDIA A100-SXM4-80GB": Peak(2039, 19.5),
    "NVIDIA A100 80GB PCIe": Peak(1935, 19.5),
    # "NVIDIA L4", "L40", "L40S" datasheets
    "NVIDIA L4": Peak(300, 30.3),
    "NVIDIA L40": Peak(864, 90.5),
    "NVIDIA L40S": Peak(864, 91.6),
    # "NVIDIA Ada" and "NVIDIA RTX Blackwell GPU Architecture" white papers, tables of specifications
    "NVIDIA GeForce RTX 4090": Peak(1008, 82.6),
    "NVIDIA GeForce RTX 5090": Peak(1792, 104.8),
    # AMD Instinct data sheets: peak memory bandwidth, peak single precision (FP32 vector)
    "AMD Instinct MI300X": Peak(5300, 163.4),
    "AMD Instinct MI325X": Peak(6000, 163.4),
    "AMD Instinct MI355X": Peak(8000, 157.3),
}


def peak(device: str) -> Peak | None:
    """What ``device`` could reach by its datasheet; None where the table does not have it."""
    return PEAKS.get(device)

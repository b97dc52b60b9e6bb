"""What a result depends on besides the code: versions, the device, its driver."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from rmsnorm_ops.version import __version__


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, and the device and its driver where that is a GPU, as JSON types."""
    gpu = device.type == "cuda"
    return {
        "rmsnorm_ops": __version__,
        "torch": torch.__version__,
        "triton": _triton_version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if gpu else "cpu",
        "cuda": torch.version.cuda if gpu else None,
        "hip": torch.version.hip if gpu else None,
        "driver": _driver() if gpu else None,
        "threads": torch.get_num_threads(),
    }


def has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def _triton_version() -> str | None:
    if not has_triton():
        return None
    import triton

    return str(triton.__version__)


def _driver() -> str | None:
    """The GPU driver's version, as NVIDIA's tool or AMD's kernel module tells it; None where neither does."""
    amd = Path("/sys/module/amdgpu/version")
    if torch.version.hip:
        return amd.read_text().strip() if amd.exists() else None
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    return answer[0] if answer else None

"""ptxas, NVIDIA's assembler, which comes with triton: what it reports of registers and spills."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from rmsnorm_ops.inspect import ptx
from rmsnorm_ops.inspect.machine import Resources


def report(text: str) -> str:
    """Assemble PTX as Triton does and return what ``-v`` says."""
    from triton.backends.nvidia.compiler import get_ptxas

    architecture = ptx.architecture(text)
    assembler = get_ptxas(int(re.sub(r"\D", "", architecture))).path
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(text)
        # -lineinfo as in Triton's own call, so that it is the same assembly.
        command = [
            assembler,
            "-lineinfo",
            "-v",
            f"--gpu-name={architecture}",
            str(source),
            "-o",
            str(binary),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stderr


def resources(report: str) -> Resources:
    """Read a report of one kernel."""
    return Resources(
        registers=_number(r"Used (\d+) registers", report),
        accumulation=0,
        spilled=_number(r"(\d+) bytes spill stores", report),
        scratch=_number(r"(\d+) bytes stack frame", report),
    )


def _number(pattern: str, report: str) -> int:
    found = re.search(pattern, report)
    if found is None:
        raise ValueError(f"ptxas did not report {pattern}:\n{report}")
    return int(found[1])

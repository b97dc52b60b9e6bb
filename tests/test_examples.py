"""The examples run as they stand, in a process of their own, and print what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.hardware import needs_a_compiler
from tests.processes import HERE, environment

EXAMPLES = HERE / "examples"


def run_example(name: str, *launcher: str) -> str:
    """What the example printed, on one thread: tests run side by side. Fails with all that it said if it failed."""
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name)],
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_quickstart() -> None:
    printed = run_example("01_quickstart.py")
    assert "y: (4, 128, 4096) torch.bfloat16" in printed
    assert "compiled: (4, 128, 4096)" in printed


def test_train_block() -> None:
    printed = run_example("02_train_block.py")
    assert re.search(r"gradients differ from torch's by \S+ of their norm, the bound is \S+", printed)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 4


def test_fp8_linear() -> None:
    printed = run_example("04_fp8_linear.py")
    assert "q: (256, 4096) torch.float8_e4m3fn scale: (256, 1) torch.float32 residual_out: torch.bfloat16" in printed
    off, bound = re.search(r"off by (\S+) of the unquantised product, \S+ expected, the bound is (\S+)", printed).groups()
    assert 0.01 < float(off) < float(bound)
    row, group = (float(off) for off in re.findall(r"a scale a .*: off by (\S+),", printed))
    assert group < row / 2


def test_transformers_says_what_it_needs(tmp_path: Path) -> None:
    """One sentence where transformers is not installed, and no traceback."""
    (tmp_path / "transformers.py").write_text("raise ImportError('not installed')\n")
    paths = f"{tmp_path}:{environment()['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "03_transformers.py")],
        env=environment(PYTHONPATH=paths, OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "This example needs Hugging Face's transformers: pip install transformers\n"


def test_distributed() -> None:
    printed = run_example("05_distributed.py", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert "2 processes; the weight of a norm is (Replicate(),)" in printed
    assert "its gradient is (Partial(sum),)" in printed
    assert "outputs and gradients are those of one process" in printed


@needs_a_compiler
def test_compile_and_export() -> None:
    printed = run_example("06_compile_and_export.py")
    assert "compiled: forward and backward, any number of rows" in printed
    assert "exported: rmsnorm.forward.default rmsnorm.add_forward.default" in printed
    assert "saved, loaded, packaged and run at 4 7 33 rows" in printed


def test_every_example_is_tested() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == [
        "01_quickstart.py",
        "02_train_block.py",
        "03_transformers.py",  # run in integrations/test_transformers.py
        "04_fp8_linear.py",
        "05_distributed.py",
        "06_compile_and_export.py",
    ]

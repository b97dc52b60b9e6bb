"""``python -m rmsnorm_ops inspect`` and ``rmsnorm_ops.inspect.examine``: what they say, write and refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

if sys.platform != "linux":
    pytest.skip("needs Triton, which is for Linux", allow_module_level=True)

from rmsnorm_ops import inspect, prepared
from rmsnorm_ops.__main__ import main
from rmsnorm_ops.inspect.targets import TARGETS
from tests.processes import run_python

Row = dict[str, Any]
Capture = pytest.CaptureFixture[str]


def run(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, after the statements ``before``, in an environment that decides nothing."""
    program = f"import sys; {before}; from rmsnorm_ops.__main__ import main; sys.exit(main({list(arguments)!r}))"
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "COLUMNS")}
    command = [sys.executable, "-c", program] if before else [sys.executable, "-m", "rmsnorm_ops", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Row, Path]:
    """The command with no arguments but those that write."""
    folder = tmp_path_factory.mktemp("inspect")
    done = run("inspect", "--json", str(folder / "inspect.json"), "--asm", str(folder / "asm"))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout, json.loads((folder / "inspect.json").read_text()), folder / "asm"


def test_without_arguments_it_prints_a_table_a_target(whole: tuple[str, Row, Path]) -> None:
    output, document, _ = whole
    lines = output.splitlines()
    assert lines[-1].startswith(f"ok: all {len(document['kernels'])} kernels keep every promise")
    titles = [line.split(",")[0] for line in lines if ", bf16 (" in line]
    assert titles == list(TARGETS)
    assert max(map(len, lines)) <= 120
    assert "…" not in output.replace("…, ", "")


def test_what_it_writes(whole: tuple[str, Row, Path]) -> None:
    _, document, folder = whole
    assert document["ok"] is True
    assert document["versions"]["torch"] == torch.__version__
    assert "16-byte loads" in document["rules"]["loads"]
    assert {(row["target"], row["op"]) for row in document["kernels"]} == set(
        product(TARGETS, ("forward", "add_forward", "backward"))
    )
    assert len(list(folder.iterdir())) == len(document["kernels"])
    assert ".amdgpu_metadata" in (folder / "gfx942-forward-4096-bf16-resident_forward.s").read_text()
    assert ".target sm_90" in (folder / "sm_90-backward-4096-bf16-sum_partials.ptx").read_text()


@pytest.fixture
def pinned() -> Callable[..., str]:
    triton = pytest.importorskip("triton")
    if triton.__version__ != "3.6.0":
        pytest.skip("pins what triton 3.6.0 makes of the kernels; needs that version")

    def table(*arguments: str) -> str:
        output = run("inspect", *arguments).stdout
        lines = [line.rstrip() for line in output[output.index("\n\n") :].strip().splitlines()]
        table = "\n".join(line for line in lines if not line.startswith(("ok:", "─")))
        return table.replace("×", "x").replace("÷", "/").replace("√", "r")  # expecttest rewrites ASCII alone

    return table


def test_the_report_of_a_few(pinned: Callable[..., str]) -> None:
    """After a change that is meant, EXPECTTEST_ACCEPT=1 rewrites it."""
    targets = ("--target", "sm_90", "gfx942", "gfx1100")
    found = pinned(*targets, "--hidden", "128", "5120", "--op", "forward", "backward")
    assert_expected_inline(
        found,
        """\
sm_90, bf16 (H200: 132 SMs, 228 KiB of shared memory each, warps of 32)
kernel             plan              warps B/thr loads stores shfl bar rsqrt / r regs spill shmem occupancy   verdict
forward 128
 resident_forward  16x128                4    32 3 94%      2   27   4     4 0 1   40     0   512 12 75% regs ok
forward 5120
 resident_forward  1x4096+1024           4    80    10      5   28  11     2 0 1   80     0    16 6 38% regs  ok
backward 128
 resident_backward 64x128 p1 s3         16    32    13  3 89%   69   9     4 0 1  128     0 65600 1 25% regs  ok
 sum_partials      64x32                 4    32     4   1 0%   10   4     0 0 0   40     0   512 12 75% regs ok
backward 5120
 resident_backward 1x4096+1024 p1 s4     4    80    45     15   40  27     2 0 1  255     0 61472 2 12% regs  ok
 sum_partials      64x32                 4    32     4   1 0%   10   4     0 0 0   40     0   512 12 75% regs ok

gfx942, bf16 (MI300X: 304 CUs, 64 KiB of LDS each, warps of 64)
kernel             plan              warps B/thr loads stores shfl bar rsqrt / r regs spill shmem occupancy   verdict
forward 128
 resident_forward  16x128                2    32 3 94%      2   39   4     4 0 1   48     0   512 16 100%     ok
forward 5120
 resident_forward  1x4096+1024           2    80    10      5   28  11     2 0 1   94     0     8 10 62% regs ok
backward 128
 resident_backward 64x128 p1 s2          8    32     9  5 94%  156  11     8 0 1  166     0  4096 1 25% regs  ok
 sum_partials      64x32                 4    16     2   1 0%   18   4     0 0 0   22     0   512 8 100%      ok
backward 5120
 resident_backward 1x4096+1024 p1 s1     2    80    15     15   41  25     2 0 1  257     0  4096 2 12% regs  ok
 sum_partials      64x32                 4    16     2   1 0%   18   4     0 0 0   22     0   512 8 100%      ok

gfx1100, bf16 (RX 7900 XTX: 48 WGPs, 128 KiB of LDS each, warps of 32)
kernel             plan              warps B/thr loads stores shfl bar rsqrt / r regs spill shmem occupancy   verdict
forward 128
 resident_forward  16x128                4    32 3 94%      2   39   4     4 0 1   47     0   512 16 100%     ok
forward 5120
 resident_forward  1x4096+1024           4    80    10      5   28  11     2 0 1  109     0    16 12 75% regs ok
backward 128
 resident_backward 64x128 p1 s2         16    32     9  5 94%  166  11     8 0 1  143     0  8192 2 50% regs  ok
 sum_partials      64x32                 4    32     4   1 0%   14   4     0 0 0   37     0   512 16 100%     ok
backward 5120
 resident_backward 1x4096+1024 p1 s1     4    80    15     15   40  25     2 0 1  251     0  4096 5 31% regs  ok
 sum_partials      64x32                 4    32     4   1 0%   14   4     0 0 0   37     0   512 16 100%     ok
""",
    )


def test_what_falls_short_is_said() -> None:
    before = (
        "from rmsnorm_ops.inspect import verdict;"
        "verdict.RULES = (verdict.Rule('odd', 'never', lambda examined: '[bold]too odd[/bold]'),)"
    )
    done = run("inspect", "--target", "gfx942", "--op", "backward", before=before)
    assert done.returncode == 1
    assert "SHORT gfx942, backward, 4096, bf16: sum_partials: odd: [bold]too odd[/bold]" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1].startswith("2 of 2 kernels fall short")


def test_what_does_not_compile_is_said(tmp_path: Path) -> None:
    before = (
        "from rmsnorm_ops.inspect import recorded;"
        "recorded.triton.compile = lambda *_, **__: exec('raise RuntimeError(\"no [bold]luck[/bold]\\\\nand more\")')"
    )
    file = tmp_path / "inspect.json"
    done = run("inspect", "--target", "gfx942", "--op", "forward", "--json", str(file), before=before)
    sentence = "gfx942, forward, 4096, bf16: resident_forward does not compile: no [bold]luck[/bold]"
    assert done.returncode == 1, done.stderr
    assert f"SHORT {sentence}" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1].startswith("1 of 1 calls do not compile")
    document = json.loads(file.read_text())
    assert (document["ok"], document["failures"], document["kernels"]) == (False, [sentence], [])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--target", "sm_42"], "--target must be one of sm_80, sm_89, sm_90, "),
        (["--op", "forwards"], "--op must be one of forward, add_forward, backward, "),
        (["--dtype", "fp8"], "--dtype must be one of bf16, fp16, fp32, fp64; got fp8"),
        (["--hidden", "0"], "--hidden must be an integer from 1 to 1048576, got 0"),
        (["--hidden", "4096", "-3"], "--hidden must be an integer from 1 to 1048576, got -3"),
        (["--hidden", "x"], "--hidden must be an integer from 1 to 1048576, got x"),
        (["--json", "/nonexistent/a.json"], "--json /nonexistent/a.json cannot be written: No such file"),
        (["--asm", "/proc/nothing"], "--asm /proc/nothing cannot be made: "),
    ],
)
def test_what_cannot_start_says_why(capsys: Capture, arguments: list[str], sentence: str) -> None:
    assert main(["inspect", *arguments]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("inspect cannot start: ")
    assert sentence in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""


def test_the_interpreter_does_not_compile(capsys: Capture) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a process in the interpreter's mode, which is for machines without a GPU")
    assert main(["inspect"]) == 2
    sentence = "TRITON_INTERPRET is set, and what Triton interprets it does not compile: unset it"
    assert capsys.readouterr().err == f"inspect cannot start: {sentence}\n"
    with pytest.raises(RuntimeError, match=sentence):
        inspect.examine("sm_90", "forward")


@pytest.mark.parametrize("package", inspect.NEEDED)
def test_a_missing_package_is_named(package: str) -> None:
    done = run("inspect", before=f"sys.modules[{package!r}] = None; import warnings; warnings.simplefilter('ignore')")
    assert done.returncode == 2
    assert done.stderr == f"inspect needs the package {package}: {inspect.NEEDED[package]}\n"


def test_help_needs_no_package() -> None:
    done = run("inspect", "--help", before="sys.modules['rich'] = sys.modules['triton'] = None")
    assert done.returncode == 0
    assert "--target GPU" in done.stdout


def test_the_python_function_returns_records_and_leaves_nothing_behind() -> None:
    code = """
import sys
from rmsnorm_ops import inspect, prepared
assert "triton" not in sys.modules
(kernel,) = inspect.examine("gfx942", "forward", hidden=1000, dtype="fp32")
print(kernel.kernel, kernel.plan.strategy, kernel.threads, kernel.instructions.loads.wide_share, kernel.faults)
assert prepared._prepared == {}, "a plan for an assumed device was kept"
"""
    assert run_python(code, TRITON_INTERPRET=None).strip() == "resident_forward resident 128 1.0 ()"


def test_meta_tensors_launch_nothing_unless_recorded() -> None:
    from rmsnorm_ops import launch

    with pytest.raises(LookupError):
        launch.forward(torch.empty(2, 8, device="meta"), None, 1e-6)
    assert not [key for key in prepared._prepared if torch.device("meta") in key]

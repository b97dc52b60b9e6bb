"""``python -m rmsnorm_ops check``: what it finds, what it misses nothing of, what it says and writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rmsnorm_ops import accuracy, check, plain, reference
from rmsnorm_ops.__main__ import main
from rmsnorm_ops.bench.cases import CASES
from rmsnorm_ops.bench.command import CannotStart, choose
from rmsnorm_ops.bench.console import WIDTH
from rmsnorm_ops.check import measure, report, session
from rmsnorm_ops.check.measure import Implementation

CPU = torch.device("cpu")
DTYPES = [name for name in ("fp16", "bf16", "fp32", "fp64") if name != "fp64" or reference.EXTENDED]
Forward = Callable[..., Tensor]
Checked = Callable[..., tuple[int, dict[str, Any]]]
Whole = tuple[subprocess.CompletedProcess[str], dict[str, Any]]
Capture = pytest.CaptureFixture[str]


def run(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, after the statements ``before``, in an environment that decides nothing."""
    program = f"import sys; {before}; from rmsnorm_ops.__main__ import main; sys.exit(main({list(arguments)!r}))"
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "COLUMNS")}
    command = [sys.executable, "-c", program] if before else [sys.executable, "-m", "rmsnorm_ops", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Checked:
    """A function that checks one implementation on one case: the exit status, and what --json wrote."""

    def check_one(forward: Forward, case: str = "odd 7") -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(measure, "implementations", lambda device: [Implementation("own", CPU, forward, 2**12)])
        file = tmp_path / "check.json"
        status = main(["check", "--device", "cpu", "--case", case, "--json", str(file)])
        return status, json.loads(file.read_text())

    return check_one


# The command as people run it


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The command on a few cases of every kind, without a GPU."""
    file = tmp_path_factory.mktemp("check") / "check.json"
    chosen = ("--case", "odd 63", "--case", "K of fused", "--case", "rounded", "--case", "tiny eps 0")
    done = run("check", "--device", "cpu", *chosen, "--json", str(file))
    return done, json.loads(file.read_text())


def test_it_is_green_and_says_so_last(whole: Whole) -> None:
    done, document = whole
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"ok: all {len(document['results'])} results are within their bounds")
    assert done.stderr == ""
    assert document["ok"] is True


def test_every_implementation_case_and_dtype_is_there_once(whole: Whole) -> None:
    _, document = whole
    implementations = ["CPU operator", "Triton kernels, interpreted on the CPU"]
    chosen = ["k of fused qkv", "Llama 3.1 8B rounded", "odd 63", "tiny eps 0"]
    expected = [(name, case, dtype) for name in implementations for case in chosen for dtype in DTYPES]
    assert [(row["implementation"], row["case"], row["dtype"]) for row in document["results"]] == expected


def test_every_row_has_its_error_and_the_bound_of_the_contract(whole: Whole) -> None:
    _, document = whole
    dtypes = {name: dtype for dtype, name in report.SHORT.items()}
    for row in document["results"]:
        interpreted = row["implementation"].startswith("Triton")
        rounded = row["case"] == "Llama 3.1 8B rounded"
        assert row["round_before_weight"] is rounded
        expected = accuracy.forward_bound(dtypes[row["dtype"]], round_before_weight=rounded, interpreted=interpreted)
        assert row["bound_ulp"] == expected
        assert 0.3 < row["error_ulp"] <= expected, "nothing of this size is exact"
        assert (row["ok"], row["failure"]) == (True, None)


def test_versions_are_written(whole: Whole) -> None:
    import triton

    _, document = whole
    versions = document["versions"]
    assert (versions["torch"], versions["triton"]) == (torch.__version__, triton.__version__)
    assert versions["python"] == sys.version.split()[0]
    assert (versions["device"], versions["driver"]) == ("cpu", None)
    assert versions["rmsnorm_ops"]


def test_nothing_is_cut_off_at_the_width_of_a_page(whole: Whole) -> None:
    done, _ = whole
    assert max(map(len, done.stdout.splitlines())) <= WIDTH
    assert "…" not in done.stdout
    for row in ("Llama 3.1 8B rounded", "k of fused qkv"):
        assert sum(line.strip().startswith(row) for line in done.stdout.splitlines()) == 2


# What is wrong is found


def off_by_one_ulp(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    y = plain.forward(x, weight, eps, **options)
    if x.dtype is torch.bfloat16:
        y.view(torch.int16)[0, 0] += 1
    return y


def test_a_right_implementation_passes(checked: Checked) -> None:
    status, document = checked(plain.forward)
    assert status == 0
    assert [row["ok"] for row in document["results"]] == [True] * len(DTYPES)


def test_one_ulp_in_one_element_fails(checked: Checked, capsys: Capture) -> None:
    status, document = checked(off_by_one_ulp)
    assert status == 1
    assert document["ok"] is False
    wrong = [row for row in document["results"] if not row["ok"]]
    assert [row["dtype"] for row in wrong] == ["bf16"]
    assert 0.5078125 < wrong[0]["error_ulp"] < 1.5
    output = capsys.readouterr().out
    assert ">0.508" in output
    assert "FAILED own, odd 7, bf16: error" in output
    assert output.splitlines()[-1].startswith(f"FAILED: 1 of {len(DTYPES)} results fall short")


def lossy(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    """Rounds before the weight whether asked to or not, as many implementations do."""
    return plain.forward(x, weight, eps, **{**options, "round_before_weight": True})


def deaf(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    """Ignores weight_offset."""
    return plain.forward(x, weight, eps)


def overflowing(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    """The formula as it is written, whose squares overflow."""
    compute = torch.float64 if x.dtype is torch.float64 else torch.float32
    wide = x.to(compute)
    return (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * (1 if weight is None else weight)).to(x.dtype)


@pytest.mark.parametrize(
    ("forward", "case", "dtypes"),
    [(lossy, "odd 7", {"fp16", "bf16"}), (deaf, "odd 1000", set(DTYPES)), (overflowing, "huge", set(DTYPES) - {"fp16"})],
    ids=["lossy", "deaf", "overflowing"],
)
def test_faults_are_found(checked: Checked, forward: Forward, case: str, dtypes: set[str]) -> None:
    status, document = checked(forward, case)
    assert status == 1
    assert {row["dtype"] for row in document["results"] if not row["ok"]} == dtypes


def raising(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    raise ValueError("out of [bold]luck[/bold]\nand more")


FORMS = {
    "shape": (lambda x, *rest, **options: x[1:].contiguous(), "y must be dense, (300, 7) and"),
    "dtype": (lambda x, *rest, **options: x.to(torch.complex64), "torch.complex64"),
    "strides": (lambda x, *rest, **options: x.t().contiguous().t(), "with strides (1, 300)"),
    "nan": (lambda x, *rest, **options: x * float("nan"), "NaN or infinity where the exact result is another"),
    "raises": (raising, "ValueError: out of [bold]luck[/bold]"),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_number_of_ulp_fails_with_its_reason(checked: Checked, capsys: Capture, form: str) -> None:
    forward, reason = FORMS[form]
    status, document = checked(forward)
    assert status == 1
    for row in document["results"]:
        assert (row["ok"], row["error_ulp"]) == (False, None)
        assert reason in row["failure"]
        assert "\n" not in row["failure"]
    output = capsys.readouterr().out
    assert reason in " ".join(output.split())
    assert "failed" in output


def test_a_long_list_of_failures_is_cut(checked: Checked, capsys: Capture) -> None:
    status, document = checked(raising, "odd")
    failed = len(document["results"])
    output = capsys.readouterr().out
    assert status == 1
    assert failed == 6 * len(DTYPES)
    assert output.count("FAILED own") == session.SHOWN
    assert f"… and {failed - session.SHOWN} more" in output


def test_fp64_is_not_judged_by_fp64(checked: Checked, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "EXTENDED", False)
    status, document = checked(plain.forward)
    assert status == 0
    assert [row["dtype"] for row in document["results"]] == ["fp16", "bf16", "fp32"]
    assert "fp64 is not judged" in capsys.readouterr().out


# Command line


def test_a_whole_name_means_that_case_alone() -> None:
    assert [case.name for case in choose(["odd 7"], CASES)] == ["odd 7"]
    assert [case.name for case in choose(["ODD 7", "one element"], CASES)] == ["one element", "odd 7", "odd 769"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["check", "--case", "nothing"], "no case has nothing in its name; the cases are: head 128, "),
        (["check", "--device", "abacus"], "--device must be cpu, cuda or cuda:N, got abacus"),
        (["check", "--device", "meta"], "--device must be cpu or a GPU of this machine"),
        (["check", "--device", "cuda:99"], "got cuda:99"),
        (["check", "--json", "/nonexistent/a.json"], "--json /nonexistent/a.json cannot be written: No such file"),
    ],
)
def test_what_cannot_start_says_why(capsys: Capture, arguments: list[str], sentence: str) -> None:
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.err.startswith("check cannot start: ")
    assert sentence in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""


@pytest.mark.parametrize(("arguments", "sentence"), [(["frobnicate"], "invalid choice: 'frobnicate'"), ([], "required: command")])
def test_a_command_must_be_known(capsys: Capture, arguments: list[str], sentence: str) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("package", check.NEEDED)
def test_a_missing_package_is_named(package: str) -> None:
    done = run("check", before=f"sys.modules[{package!r}] = None; import warnings; warnings.simplefilter('ignore')")
    assert done.returncode == 2
    assert done.stderr == f"check needs the package {package}: pip install 'rmsnorm_ops[bench]' brings it\n"


def test_help_needs_no_package() -> None:
    done = run("check", "--help", before="sys.modules['rich'] = sys.modules['numpy'] = None")
    assert done.returncode == 0
    assert "--json FILE" in done.stdout


def test_without_triton_the_cpu_is_still_checked(tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    arguments = ("check", "--device", "cpu", "--case", "odd 7", "--json", str(file))
    done = run(*arguments, before="sys.modules['triton'] = None")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "triton cannot be imported: only the CPU operator is checked." in done.stdout.splitlines()
    document = json.loads(file.read_text())
    assert {row["implementation"] for row in document["results"]} == {"CPU operator"}
    assert document["versions"]["triton"] is None


def test_the_interpreter_never_stands_in_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(CannotStart, match="TRITON_INTERPRET is set"):
        measure.implementations(torch.device("cuda", 0))

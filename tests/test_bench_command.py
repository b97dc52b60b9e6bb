"""``python -m rmsnorm_ops bench``: what it runs, prints, writes and refuses."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import rmsnorm_ops
from rmsnorm_ops import bench
from rmsnorm_ops.__main__ import main
from rmsnorm_ops.bench import choice, problem, report
from rmsnorm_ops.bench.cases import CASES, SIZES
from rmsnorm_ops.bench.console import WIDTH
from rmsnorm_ops.bench.peers import PEERS, Peer
from rmsnorm_ops.bench.providers import OURS
from tests.measurements import off_by_a_percent_of_a_row, provider
from tests.processes import run_python

Capture = pytest.CaptureFixture[str]
BY_NAME = {case.name: case for case in (*CASES, *SIZES)}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "CPU_ELEMENTS", 2**12)


def arguments(**given: Any) -> types.SimpleNamespace:
    names = ("op", "case", "dtype", "provider", "device", "json", "plot")
    return types.SimpleNamespace(**{name: given.get(name) for name in names})


# What it runs and writes


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    """Two cases in every operation: what --json wrote, and what was printed."""
    file = tmp_path_factory.mktemp("bench") / "bench.jsonl"
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(problem, "CPU_ELEMENTS", 2**12)
        status = main(["bench", "--device", "cpu", "--case", "odd 63", "--case", "few 16 × 4096", "--json", str(file)])
    assert status == 0, output.getvalue()
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()], output.getvalue()


def test_every_operation_case_and_provider_is_a_line(rows: tuple[list[dict[str, Any]], str]) -> None:
    lines, _ = rows
    speeds = [(row["operation"], row["case"], row["provider"]) for row in lines if row["kind"] == "speed"]
    operations = ["forward", "add_forward", "backward", "forward+backward"]
    providers = ["rmsnorm_ops", "aten", *(peer.name for peer in PEERS if peer.present)]
    assert speeds == [(op, case, name) for op in operations for case in ("odd 63", "few 16 × 4096") for name in providers]
    assert [row["mode"] for row in lines if row["kind"] == "host"][:: len(providers)] == ["no grad", "grad", "forward+backward"]


def test_a_line_has_times_bytes_ratios_and_versions(rows: tuple[list[dict[str, Any]], str]) -> None:
    lines, _ = rows
    for row in lines:
        versions = row["versions"]
        assert (versions["rmsnorm_ops"], versions["torch"]) == (rmsnorm_ops.__version__, torch.__version__)
        assert (versions["device"], versions["driver"]) == ("cpu", None)
        assert "triton" in versions
        if row["status"] != "timed":
            assert (row["us"], bool(row["reason"])) == (None, True)
            continue
        assert 0 < row["low_us"] <= row["us"] <= row["high_us"]
        if row["kind"] == "host":
            assert row["times_aten"] == 1 or row["provider"] != "aten"
            continue
        assert row["gb_s"] == pytest.approx(row["bytes"] / row["us"] / 1e3)
        assert row["fraction_of_copy"] == pytest.approx(row["gb_s"] / (row["copy_bytes"] / row["copy_us"] / 1e3))
        assert 0.5 < row["flop_per_byte"] < 2
        assert row["fraction_of_peak"] is None, "a CPU's peak is not known"
        assert row["dtype"] == "bf16"


def test_tables_have_a_title_an_explanation_and_the_width_of_a_page(rows: tuple[list[dict[str, Any]], str]) -> None:
    _, output = rows
    lines = output.splitlines()
    for operation in ("forward", "add_forward", "backward", "forward+backward"):
        assert f"{operation} on cpu, bf16, 2^12 elements" in lines
        assert f"{operation} on cpu, bf16, few rows: µs" in lines
    assert "Host time of an eager call on cpu, 4 × 1024 bf16, µs (on a CPU the work is included)" in lines
    assert sum(line.endswith(" FLOP a byte; this device's peaks are not known here.") for line in lines) == 4
    assert "–  aten has no backward to call directly on the CPU" in lines
    assert max(map(len, lines)) <= WIDTH
    assert "…" not in output


def test_only_what_is_asked_for_runs(capsys: Capture) -> None:
    chosen = ("--op", "forward", "--case", "ODD 7", "--dtype", "fp32", "--dtype", "fp16", "--provider", "aten")
    assert main(["bench", "--device", "cpu", *chosen]) == 0
    output = capsys.readouterr().out
    assert "forward on cpu, fp32" in output
    assert "forward on cpu, fp16" in output
    assert "odd 769" in output
    for other in ("bf16", "backward", "Host", "rmsnorm_ops  ", "copy's speed"):
        assert other not in output


def test_the_default_is_the_marked_cases_with_few_rows_in_forward_alone() -> None:
    plan, _ = choice.planned(arguments(device="cpu"))
    assert {case.name for case in plan.cases} == {name for name, case in BY_NAME.items() if case.benched}
    assert any(case.few for case in plan.cases_of("forward"))
    assert not any(case.few for case in plan.cases_of("backward"))
    plan, _ = choice.planned(arguments(device="cpu", op=["backward"]))
    assert any(case.few for case in plan.cases_of("backward"))


def test_our_own_wrong_answer_is_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(choice, "OURS", dataclasses.replace(OURS, norm=off_by_a_percent_of_a_row))
    assert main(["bench", "--device", "cpu", "--op", "forward", "--case", "odd 63"]) == 1
    output = " ".join(capsys.readouterr().out.split())
    assert "WRONG rmsnorm_ops, odd 63: y is off by 0.05" in output


# What it refuses


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["--case", "nothing"], "no case has nothing in its name; the cases are: head 128, "),
        (
            ["--op", "sideways"],
            "--op must be one of forward, add_forward, backward, forward+backward, host, forward_quant, forward_quant_128, "
            "add_forward_quant, got sideways",
        ),
        (["--dtype", "int8"], "--dtype must be one of fp16, bf16, fp32, fp64, got int8"),
        (
            ["--provider", "apex"],
            "--provider must be one of rmsnorm_ops, aten, inductor, liger, fla, flash-attn, quack, got apex",
        ),
        (["--device", "abacus"], "--device must be cpu, cuda or cuda:N, got abacus"),
        (["--json", "/nonexistent/a.json"], "--json /nonexistent/a.json cannot be written: No such file"),
        (["--plot", "/dev/null/plots"], "--plot /dev/null/plots cannot be made: Not a directory"),
    ],
)
def test_what_cannot_start_says_why(capsys: Capture, given: list[str], sentence: str) -> None:
    assert main(["bench", "--provider", "aten", *given]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("bench cannot start: ")
    assert sentence in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""


@pytest.mark.parametrize(("package", "given"), [("rich", ()), ("matplotlib", ("--plot", "."))])
def test_a_missing_package_is_named(package: str, given: tuple[str, ...]) -> None:
    assert package in bench.NEEDED
    program = f"import sys; sys.modules[{package!r}] = None; from rmsnorm_ops.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "bench", "--device", "cpu", "--case", "odd 7", *given]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1] == f"bench needs the package {package}: pip install 'rmsnorm_ops[bench]' brings it"


def test_neither_the_package_nor_help_loads_what_a_benchmark_needs() -> None:
    code = """
import sys
for name in ("rich", "matplotlib", "numpy"): sys.modules[name] = None
import rmsnorm_ops
assert not [name for name in sys.modules if name.startswith("rmsnorm_ops.bench")]
from rmsnorm_ops.__main__ import main
try: main(["bench", "--help"])
except SystemExit as done: assert done.code == 0
assert "rmsnorm_ops.bench.providers" not in sys.modules
"""
    assert "--plot DIR" in run_python(code)


# Peers


def refuse(peer: Peer) -> Any:
    raise OSError("libfoo.so: cannot open")


def test_a_missing_peer_is_left_out_and_named_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(choice, "PEERS", (Peer("liger", "no_such_module.ops", "liger-kernel", refuse),))
    found, notes = choice.chosen_providers(None, torch.device("cpu"))
    assert ([one.name for one in found], notes) == (["rmsnorm_ops", "aten"], [])
    assert main(["bench", "--device", "cpu", "--provider", "liger"]) == 2
    sentence = "bench cannot start: --provider liger needs the package liger-kernel, which is not installed\n"
    assert capsys.readouterr().err == sentence


def test_a_peer_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(choice, "PEERS", (Peer("fla", "json", "fla-core", refuse),))
    _, notes = choice.chosen_providers(None, torch.device("cpu"))
    assert notes == ["fla is installed and cannot be imported: OSError: libfoo.so: cannot open"]
    assert main(["bench", "--device", "cpu", "--provider", "fla"]) == 2
    assert "--provider fla is installed and cannot be imported" in capsys.readouterr().err


def test_a_peer_is_compared_and_its_version_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture) -> None:
    peer = Peer("quack", "json", "pytest", lambda peer: provider(peer.name, package=peer.package))
    monkeypatch.setattr(choice, "PEERS", (peer,))
    file = tmp_path / "bench.jsonl"
    assert main(["bench", "--device", "cpu", "--op", "forward", "--case", "odd 63", "--json", str(file)]) == 0
    row = json.loads(file.read_text("utf-8").splitlines()[-1])
    assert (row["provider"], row["status"], row["versions"]["pytest"]) == ("quack", "timed", pytest.__version__)
    header = next(line for line in capsys.readouterr().out.splitlines() if "copy GB/s" in line)
    assert header.split() == ["case", "copy", "GB/s", "rmsnorm_ops", "aten", "quack"]


def test_peers_are_not_imported_before_they_are_asked_for() -> None:
    code = "import json, sys, rmsnorm_ops.bench.choice; print(json.dumps(sorted(name.split('.')[0] for name in sys.modules)))"
    assert not {peer.module.split(".")[0] for peer in PEERS} & set(json.loads(run_python(code)))


def test_the_report_knows_a_mark_for_each_status() -> None:
    assert set(report.MARKS) == {"unsupported", "failed", "wrong"}

"""What measurements become: tables and drawings."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console

from rmsnorm_ops.bench import host, records, report
from rmsnorm_ops.bench.cases import CASES, SIZES, Case
from rmsnorm_ops.bench.console import WIDTH
from rmsnorm_ops.bench.devices import Peak
from rmsnorm_ops.bench.host import HostTime
from rmsnorm_ops.bench.measure import Measurement
from tests.measurements import BF16, CPU, measurement, timing

plots = pytest.importorskip("rmsnorm_ops.bench.plots", reason="needs matplotlib")
LARGE = Case("large", "", 1024, 1024, weight="none")
PEAK = Peak(gb_s=1000.0, tflops=10.0)
PROVIDERS = ("rmsnorm_ops", "aten", "inductor", "liger", "fla", "flash-attn", "quack")
DEFAULT = [case for case in (*CASES, *SIZES) if case.benched]


def printed(*measured: Measurement, peak: Peak | None = None) -> list[str]:
    console = Console(width=WIDTH, file=io.StringIO(), highlight=False)
    console.print(*report.speed_tables(measured, "some GPU", peak), sep="\n")
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def cells(lines: list[str], name: str) -> list[list[str]]:
    return [line.split() for line in lines if line.strip().startswith(name)]


def test_ours_against_the_copy_the_peak_and_the_best_peer() -> None:
    ours = measurement("rmsnorm_ops", 10, case=LARGE, copy_us=8)
    lines = printed(
        ours, measurement("aten", 30, case=LARGE, copy_us=8), measurement("fla", 12, case=LARGE, copy_us=8), peak=PEAK
    )
    # 2 · 2 · 2²⁰ bytes in 10 µs, where the copy took 8, and the peak is 1000 GB/s.
    mine, everyone = cells(lines, "large")
    assert mine == ["large", "1024", "10.00", "±2.0%", "4.19", "419", "0.800", "0.419", "fla", "×1.20"]
    assert everyone == ["large", "524", "0.800", "0.267", "0.667"]
    assert "forward on some GPU, bf16, 2^20 elements: fraction of the copy's speed" in lines
    assert any("1.00 FLOP a byte; the ridge is at 10 (10 TFLOP/s of fp32, 1000 GB/s" in line for line in lines)
    assert "bound by memory." in " ".join(lines)


def test_a_line_has_the_fractions_of_the_copy_and_of_the_peak() -> None:
    row = records.of_measurement(measurement("rmsnorm_ops", 10, case=LARGE, copy_us=8), PEAK, {"torch": "2"})
    assert (row["bytes"], row["us"], row["copy_us"], row["fraction_of_copy"]) == (2**22, 10, 8, pytest.approx(0.8))
    assert (row["fraction_of_peak"], row["ridge_flop_per_byte"]) == (pytest.approx(0.4194304), 10)
    assert (row["flop_per_byte"], row["versions"]) == (1, {"torch": "2"})


def test_arithmetic_bounds_where_the_ridge_is_low() -> None:
    lines = printed(measurement("rmsnorm_ops", 10, case=LARGE), peak=Peak(gb_s=1000, tflops=0.5))
    assert "bound by arithmetic." in " ".join(lines)


def test_few_rows_are_compared_in_microseconds() -> None:
    few = Case("few 4 × 64", "", 4, 64, few=True)
    lines = printed(measurement("rmsnorm_ops", 1.5, case=few, copy_us=1.2), measurement("aten", 4, case=few, copy_us=1.2))
    assert "forward on some GPU, bf16, few rows: µs" in lines
    assert cells(lines, "few 4 × 64")[1][4:] == ["1.20", "1.50", "4.00"]


def test_what_was_not_timed_is_marked_and_explained_once() -> None:
    wide = Case("wide", "", 8, 8192)
    measured = [
        measurement("rmsnorm_ops", 10, case=LARGE),
        measurement("liger", None, case=LARGE, status="failed", reason="RuntimeError: no [bold]luck"),
        measurement("fla", None, case=LARGE, status="unsupported", reason="fla has no backward"),
        measurement("rmsnorm_ops", None, case=wide, status="wrong", reason="y is off"),
        measurement("liger", None, case=wide, status="failed", reason="RuntimeError: no [bold]luck"),
        measurement("fla", None, case=wide, status="unsupported", reason="fla has no backward"),
    ]
    lines = printed(*measured)
    assert cells(lines, "large")[1][-2:] == ["failed", "–"]
    assert cells(lines, "large")[0][-1] == "–", "no peer was timed"
    assert cells(lines, "wide")[0] == ["wide", "8192", "wrong"]
    assert lines.count("FAILED liger, large, wide: RuntimeError: no [bold]luck") == 1
    assert lines.count("–  fla has no backward") == 1
    assert lines.count("WRONG rmsnorm_ops, wide: y is off") == 1


def test_without_ours_the_first_provider_is_the_subject() -> None:
    lines = printed(measurement("aten", 10, case=LARGE), measurement("fla", 5, case=LARGE))
    assert cells(lines, "large")[0][-2:] == ["fla", "×0.50"]
    assert any(line.strip().startswith("aten ") for line in lines), "whose table it is"


def test_all_providers_fit_on_a_page() -> None:
    measured = [measurement(name, 123456.7, case=case) for case in DEFAULT for name in PROVIDERS]
    lines = printed(*measured, peak=PEAK)
    assert max(map(len, lines)) <= WIDTH
    for case in DEFAULT:
        assert len(cells(lines, case.name)) == 2, "folded"


def test_host_times_are_against_aten() -> None:
    times = [HostTime("rmsnorm_ops", mode, BF16, CPU, "timed", timing(30)) for mode in host.MODES]
    times += [HostTime("aten", mode, BF16, CPU, "timed", timing(20)) for mode in host.MODES]
    times += [HostTime("fla", mode, BF16, CPU, "unsupported", None, "fla does not run on cpu") for mode in host.MODES]
    console = Console(width=WIDTH, file=io.StringIO(), highlight=False)
    console.print(*report.host_table(times, "cpu"), sep="\n")
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert cells(lines, "rmsnorm_ops")[0][1:] == ["30.0", "×1.50"] * 3
    assert cells(lines, "fla")[0][1:] == ["–"] * 6
    assert lines[-1] == "–  fla does not run on cpu"
    assert records.of_host(times[0], timing(20), {})["times_aten"] == 1.5
    assert records.of_host(times[-1], timing(20), {})["times_aten"] is None


# Drawings


def drawn(folder: Path) -> list[Path]:
    measured = [measurement(name, 10.0 + i, case=case) for case in DEFAULT for i, name in enumerate(PROVIDERS)]
    measured.append(measurement("fla", None, case=CASES[0], operation="forward+backward", status="failed", reason="no"))
    return plots.draw(measured, "some GPU", folder)


def test_a_plot_is_written_as_svg_and_png(tmp_path: Path) -> None:
    names = [path.name for path in drawn(tmp_path)]
    stems = ("forward-bf16", "forward-bf16-few-rows", "forward_backward-bf16")
    assert names == [f"{stem}.{kind}" for stem in stems for kind in ("svg", "png")]
    for path in tmp_path.iterdir():
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        else:
            assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def texts(path: Path) -> set[str]:
    return {"".join(element.itertext()).strip() for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")}


def test_axes_lines_and_units_are_named(tmp_path: Path) -> None:
    drawn(tmp_path)
    speed, few = texts(tmp_path / "forward-bf16.svg"), texts(tmp_path / "forward-bf16-few-rows.svg")
    assert speed >= {
        "RMSNorm forward, bf16, some GPU",
        "hidden (elements a row)",
        "fraction of a copy's speed",
        "copy",
        *PROVIDERS,
    }
    assert speed >= {"128", "2880", "65536"}
    assert few >= {"rows of 4096 elements", "time (µs)", "copy", "1", "16", "256", *PROVIDERS}
    assert "rows of 7168 elements" not in few, "two points are no curve"


def test_each_provider_has_a_colour_and_a_marker_of_its_own() -> None:
    assert set(plots.STYLES) == set(PROVIDERS)
    assert len({color for color, _ in plots.STYLES.values()}) == len({marker for _, marker in plots.STYLES.values()}) == 7

"""What the check prints and what it writes: tables for people, one JSON document for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from rmsnorm_ops.bench import cases, records
from rmsnorm_ops.bench.cases import SHORT
from rmsnorm_ops.bench.console import table
from rmsnorm_ops.bench.measure import Measurement
from rmsnorm_ops.check.measure import Result


def accuracy_table(results: Sequence[Result]) -> tuple[Text, Table]:
    """The results of one implementation under a title: a line a case, a column a dtype."""
    lines = table("case")
    lines.add_column("hidden", justify="right")
    lines.add_column("rows", justify="right")
    for dtype in cases.DTYPES:
        lines.add_column(SHORT[dtype], justify="right", no_wrap=True)
    by_case: dict[str, dict[torch.dtype, Result]] = {}
    for result in results:
        by_case.setdefault(result.case.name, {})[result.dtype] = result
    for name, by_dtype in by_case.items():
        first = next(iter(by_dtype.values()))
        cells = [_cell(by_dtype.get(dtype)) for dtype in cases.DTYPES]
        lines.add_row(name, str(first.case.hidden), str(first.rows), *cells)
    return Text(f"\n{results[0].implementation}: largest error / bound, in ulp", style="bold"), lines


def _cell(result: Result | None) -> Text:
    if result is None:
        return Text("-", style="dim")
    if result.failure:
        return Text("failed", style="bold red")
    decimals = 3 if result.dtype.itemsize == 2 else 2
    error = f"{result.error:.{decimals}f}" if result.error < 10 else f"{result.error:.2g}"
    bound = f"{result.bound:.3f}".rstrip("0").rstrip(".")
    # A bound that is not met reads as a comparison, for terminals without colours.
    sign, style = ("/", "green") if result.ok else (">", "bold red")
    return Text(f"{error}{sign}{bound}", style=style)


def speed_table(speeds: Sequence[Measurement], device: str) -> tuple[Text, Table]:
    """The timed cases of one operator on a GPU under a title: a line a case."""
    lines = table("case")
    for column in ("hidden", "µs", "spread", "GB/s", "copy GB/s", "of copy"):
        lines.add_column(column, justify="right", no_wrap=True)
    for speed in speeds:
        if speed.time is None or speed.gb_s is None:
            lines.add_row(speed.problem.case.name, str(speed.problem.case.hidden), speed.status)
            continue
        lines.add_row(
            speed.problem.case.name, str(speed.problem.case.hidden), f"{speed.time.median_us:.1f}", f"±{speed.spread:.1%}",
            f"{speed.gb_s:.0f}", f"{speed.copy_gb_s:.0f}", f"{speed.fraction:.3f}",
        )  # fmt: skip
    problem = speeds[0].problem
    size = round(math.log2(problem.elements))
    title = f"\n{problem.operation} on {device}, bf16, 2^{size} elements, against a copy in the same run"
    return Text(title, style="bold"), lines


def failures(results: Sequence[Result], speeds: Sequence[Measurement] = ()) -> list[str]:
    """A sentence for each result that falls short, and for what was too wrong to time."""
    found = [
        f"{result.implementation}, {result.case.name}, {SHORT[result.dtype]}: "
        + (result.failure or f"error {result.error:.6g} ulp, bound {result.bound:.6g}")
        for result in results
        if not result.ok
    ]
    untimed = [speed for speed in speeds if speed.time is None]
    return found + [f"{speed.problem.operation}, {speed.problem.case.name}, not timed: {speed.reason}" for speed in untimed]


def document(environment: dict[str, Any], results: Sequence[Result], speeds: Sequence[Measurement]) -> dict[str, Any]:
    """Everything, as JSON types. An error is null where ``failure`` says why there is no finite one."""
    return {
        "versions": environment,
        "ok": not failures(results, speeds),
        "results": [_result_row(result) for result in results],
        "speeds": [records.of_speed(speed) for speed in speeds],
    }


def _result_row(result: Result) -> dict[str, Any]:
    return {
        "implementation": result.implementation,
        **records.of_case(result.case, result.rows),
        "dtype": SHORT[result.dtype],
        "error_ulp": result.error if math.isfinite(result.error) else None,
        "bound_ulp": result.bound,
        "ok": result.ok,
        "failure": result.failure or None,
    }

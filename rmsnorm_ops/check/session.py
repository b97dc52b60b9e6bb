"""The course of a check: choose, measure with progress, print, write, give the verdict."""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from rmsnorm_ops.bench.cases import CASES, Case
from rmsnorm_ops.bench.command import choose, device_of, writable
from rmsnorm_ops.bench.console import heading, output, progress
from rmsnorm_ops.bench.environment import environment, has_triton
from rmsnorm_ops.bench.measure import Measurement
from rmsnorm_ops.check import measure, report, speed
from rmsnorm_ops.check.measure import Implementation, Result

SHOWN = 20  # of what falls short; --json FILE has all of it


def check(texts: list[str] | None, device_name: str | None, json_path: str | None) -> int:
    """Check the cases that ``texts`` name, all where it is None. Returns the exit status: 0, or 1 where a result falls short."""
    started = time.perf_counter()
    chosen = list(CASES) if texts is None else choose(texts, CASES)
    device = device_of(device_name)
    file = None if json_path is None else writable(json_path)
    console = output()
    present = measure.implementations(device)
    versions = environment(device)
    console.print(heading(versions), style="dim")
    for note in _notes(versions):
        console.print(note)
    results: list[Result] = []
    for implementation in present:
        measured = _measured(implementation, chosen)
        console.print(*report.accuracy_table(measured), sep="\n")
        results += measured
    speeds: list[Measurement] = []
    for operation in speed.OPERATIONS:
        timed = _timed([case for case in chosen if case.timed], device, operation)
        if timed:
            console.print(*report.speed_table(timed, versions["device"]), sep="\n")
        speeds += timed
    if file is not None:
        file.write_text(json.dumps(report.document(versions, results, speeds), indent=1, allow_nan=False) + "\n", "utf-8")
    return _concluded(console, results, speeds, time.perf_counter() - started)


def _concluded(console: Console, results: list[Result], speeds: list[Measurement], seconds: float) -> int:
    """Print what failed and the verdict. Returns the exit status."""
    failures = report.failures(results, speeds)
    console.print()
    for failure in failures[:SHOWN]:
        console.print(f"[red]FAILED[/red] {escape(failure)}")
    if len(failures) > SHOWN:
        console.print(f"… and {len(failures) - SHOWN} more")
    if failures:
        console.print(
            f"[bold red]FAILED: {len(failures)} of {len(results) + len(speeds)} results fall short ({seconds:.0f} s)[/bold red]"
        )
        return 1
    console.print(f"[bold green]ok: all {len(results)} results are within their bounds ({seconds:.0f} s)[/bold green]")
    return 0


def _measured(implementation: Implementation, chosen: list[Case]) -> list[Result]:
    results = []
    for case in progress(chosen, implementation.name):
        results += [measure.measure(implementation, case, dtype) for dtype in measure.judged()]
    return results


def _timed(chosen: list[Case], device: torch.device, operation: str) -> list[Measurement]:
    if device.type != "cuda" or not has_triton():
        return []
    return [speed.measure(case, device, operation) for case in progress(chosen, f"speed of {operation}")]


def _notes(environment: dict[str, Any]) -> list[str]:
    notes = []
    if environment["triton"] is None:
        notes.append("triton cannot be imported: only the CPU operator is checked.")
    if torch.float64 not in measure.judged():
        notes.append("fp64 is not judged: numpy has no wider type on this machine.")
    return notes

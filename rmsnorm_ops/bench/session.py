"""The course of a benchmark: choose, measure with progress, print, write."""

from __future__ import annotations

import importlib.metadata
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, TextIO

import torch
from rich.console import Console

from rmsnorm_ops.bench import devices, host, problem, records, report
from rmsnorm_ops.bench.choice import Plan, folder, planned
from rmsnorm_ops.bench.command import writable
from rmsnorm_ops.bench.console import heading, output, progress
from rmsnorm_ops.bench.environment import environment
from rmsnorm_ops.bench.host import HostTime
from rmsnorm_ops.bench.measure import Measurement, measure
from rmsnorm_ops.bench.providers import OURS, Provider


def bench(arguments: Any) -> int:
    """Run what ``arguments`` ask for. Returns the exit status: 0, or 1 where this library's own answer is wrong or missing."""
    started = time.perf_counter()
    plan, notes = planned(arguments)
    file = None if arguments.json is None else writable(arguments.json)
    plots = None if arguments.plot is None else folder(arguments.plot)
    console = output()
    versions = {**environment(plan.device), **_package_versions(plan.providers)}
    console.print(heading(versions), style="dim")
    for note in notes:
        console.print(note)
    # Peers launch on the current device, whatever the tensors' is.
    current = torch.cuda.device(plan.device) if plan.device.type == "cuda" else nullcontext()
    with current, nullcontext() if file is None else file.open("w", encoding="utf-8") as lines:
        measured, hosts = _run(plan, console, lines, versions)
    if plots is not None:
        from rmsnorm_ops.bench.plots import draw

        for path in draw(measured, versions["device"], plots):
            console.print(f"wrote {path}", style="dim")
    console.print(f"\n{len(measured) + len(hosts)} measurements ({time.perf_counter() - started:.0f} s)")
    ours = [one.status for one in measured if one.provider == OURS.name]
    ours += [one.status for one in hosts if one.provider == OURS.name]
    return int(not {"failed", "wrong"}.isdisjoint(ours))


def _run(
    plan: Plan, console: Console, lines: TextIO | None, versions: dict[str, Any]
) -> tuple[list[Measurement], list[HostTime]]:
    measured: list[Measurement] = []
    hosts: list[HostTime] = []
    for dtype in plan.dtypes:
        for operation in plan.operations:
            if operation == "host":
                hosts += _host(plan, dtype, console, lines, versions)
            else:
                measured += _speeds(plan, operation, dtype, console, lines, versions)
    return measured, hosts


def _speeds(
    plan: Plan, operation: str, dtype: torch.dtype, console: Console, lines: TextIO | None, versions: dict[str, Any]
) -> list[Measurement]:
    peak = devices.peak(versions["device"])
    results: list[Measurement] = []
    for case in progress(plan.cases_of(operation), operation):
        sized = problem.sized(operation, case, dtype, plan.device, providers=len(plan.providers))
        answers = measure(sized, plan.providers)
        _write(lines, [records.of_measurement(one, peak, versions) for one in answers])
        results += answers
    if results:
        console.print(*report.speed_tables(results, versions["device"], peak), sep="\n")
    return results


def _host(plan: Plan, dtype: torch.dtype, console: Console, lines: TextIO | None, versions: dict[str, Any]) -> list[HostTime]:
    times = host.measure(plan.providers, dtype, plan.device)
    aten = {one.mode: one.time for one in times if one.provider == "aten"}
    _write(lines, [records.of_host(one, aten.get(one.mode), versions) for one in times])
    console.print(*report.host_table(times, versions["device"]), sep="\n")
    return times


def _write(lines: TextIO | None, rows: Sequence[dict[str, Any]]) -> None:
    """One line each, at once: a run that is cut short keeps what it has."""
    if lines is not None:
        lines.writelines(json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n" for row in rows)
        lines.flush()


def _package_versions(providers: Sequence[Provider]) -> dict[str, str]:
    packages = [provider.package for provider in providers if provider.package]
    return {package: _version(package) for package in packages}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # on the path, and not installed
        return "unknown"

"""The course of a check: choose, measure with progress, print, write, give the verdict."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rmsnorm_ops.bench.cases import CASES, Case
from rmsnorm_ops.check import measure, report, speed
from rmsnorm_ops.check.measure import CannotStart, Implementation, Result

__all__ = ["CannotStart", "check"]

WIDTH = 100  # where the output is not a terminal, and so has no width of its own
SHOWN = 20  # of what falls short; --json FILE has all of it


def check(texts: list[str] | None, device_name: str | None, json_path: str | None) -> int:
    """Check the cases that ``texts`` name, all where it is None. Returns the exit status: 0, or 1 where a result falls short."""
    started = time.perf_counter()
    chosen, device = choose(texts), device_of(device_name)
    file = None if json_path is None else writable(json_path)
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    present = measure.implementations(device)
    environment = report.environment(device)
    console.print(_heading(environment), style="dim")
    for note in _notes(environment):
        console.print(note)
    results: list[Result] = []
    for implementation in present:
        measured = _measured(implementation, chosen)
        console.print(*report.accuracy_table(measured), sep="\n")
        results += measured
    speeds: list[speed.Speed] = []
    for operation in speed.OPERATIONS:
        timed = _timed([case for case in chosen if case.timed], device, operation)
        if timed:
            console.print(*report.speed_table(timed, environment["device"]), sep="\n")
        speeds += timed
    if file is not None:
        file.write_text(json.dumps(report.document(environment, results, speeds), indent=1, allow_nan=False) + "\n", "utf-8")
    return _concluded(console, results, time.perf_counter() - started)


def _concluded(console: Console, results: list[Result], seconds: float) -> int:
    """Print what failed and the verdict. Returns the exit status."""
    failures = report.failures(results)
    console.print()
    for failure in failures[:SHOWN]:
        console.print(f"[red]FAILED[/red] {escape(failure)}")
    if len(failures) > SHOWN:
        console.print(f"… and {len(failures) - SHOWN} more")
    if failures:
        console.print(f"[bold red]FAILED: {len(failures)} of {len(results)} results fall short ({seconds:.0f} s)[/bold red]")
        return 1
    console.print(f"[bold green]ok: all {len(results)} results are within their bounds ({seconds:.0f} s)[/bold green]")
    return 0


def choose(texts: list[str] | None) -> list[Case]:
    """The cases that ``texts`` name: whole names, or parts of names in either case of letters. All cases where it is None."""
    if texts is None:
        return list(CASES)
    names = [case.name for case in CASES]
    wanted: set[str] = set()
    for text in texts:
        matches = [text] if text in names else [name for name in names if text.lower() in name.lower()]
        if not matches:
            raise CannotStart(f"no case has {text} in its name; the cases are: {', '.join(names)}")
        wanted.update(matches)
    return [case for case in CASES if case.name in wanted]


def device_of(name: str | None) -> torch.device:
    """The device that ``name`` means, with its index; the current GPU, or the CPU without one, where it is None."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise CannotStart(f"--device must be cpu, cuda or cuda:N, got {name}") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        raise CannotStart(f"--device must be cpu or a GPU of this machine, which has {torch.cuda.device_count()}, got {name}")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def writable(path: str) -> Path:
    """The file to write to, opened once before the work starts: a wrong path must not cost a minute."""
    try:
        with open(path, "a", encoding="utf-8"):
            return Path(path)
    except OSError as error:
        raise CannotStart(f"--json {path} cannot be written: {error.strerror}") from None


def _measured(implementation: Implementation, chosen: list[Case]) -> list[Result]:
    results = []
    for case in _progress(chosen, implementation.name):
        results += [measure.measure(implementation, case, dtype) for dtype in measure.judged()]
    return results


def _timed(chosen: list[Case], device: torch.device, operation: str) -> list[speed.Speed]:
    if device.type != "cuda" or not measure.has_triton():
        return []
    return [speed.measure(case, device, operation) for case in _progress(chosen, f"speed of {operation}")]


def _progress(chosen: list[Case], what: str) -> Iterable[Case]:
    """The cases one by one, under a bar on stderr where that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=len(chosen))
        for case in chosen:
            progress.update(task, description=f"{what}: {case.name}")
            yield case
            progress.advance(task)


def _heading(environment: dict[str, Any]) -> str:
    parts = [f"{name} {environment[name]}" for name in ("rmsnorm_ops", "torch", "triton", "python") if environment[name]]
    driver = f", driver {environment['driver']}" if environment["driver"] else ""
    return " · ".join([*parts, f"{environment['device']}{driver}, {environment['threads']} CPU threads"])


def _notes(environment: dict[str, Any]) -> list[str]:
    notes = []
    if environment["triton"] is None:
        notes.append("triton cannot be imported: only the CPU operator is checked.")
    if torch.float64 not in measure.judged():
        notes.append("fp64 is not judged: numpy has no wider type on this machine.")
    return notes

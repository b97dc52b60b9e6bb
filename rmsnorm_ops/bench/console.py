"""How the commands print: the console, a bar of progress, the first line."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rmsnorm_ops.bench.cases import Case

WIDTH = 100  # where the output is not a terminal, and so has no width of its own


def output() -> Console:
    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)


def progress(chosen: Sequence[Case], what: str) -> Iterator[Case]:
    """The cases one by one, under a bar on stderr where that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=len(chosen))
        for case in chosen:
            bar.update(task, description=f"{what}: {case.name}")
            yield case
            bar.advance(task)


def table(first: str) -> Table:
    """An empty table whose lines are named by the column ``first``."""
    result = Table(box=box.SIMPLE_HEAD, show_edge=False)
    result.add_column(first, overflow="fold", min_width=10)
    return result


def heading(environment: dict[str, Any]) -> str:
    """Versions, device and driver in one line."""
    parts = [f"{name} {environment[name]}" for name in ("rmsnorm_ops", "torch", "triton", "python") if environment[name]]
    driver = f", driver {environment['driver']}" if environment["driver"] else ""
    return " · ".join([*parts, f"{environment['device']}{driver}, {environment['threads']} CPU threads"])

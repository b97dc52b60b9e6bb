"""The course of an inspection: choose, compile with progress, print, write, give the verdict."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from triton import knobs

from rmsnorm_ops.inspect import recorded, report
from rmsnorm_ops.inspect.examination import Examined, examine
from rmsnorm_ops.inspect.operations import DTYPES, OPERATIONS
from rmsnorm_ops.inspect.targets import TARGETS

WIDTH = 120  # where the output is not a terminal, and so has no width of its own
DEFAULT_OPERATIONS = ("forward", "add_forward", "backward")
LARGEST_HIDDEN = 2**20


class CannotStart(Exception):
    """Why nothing could be compiled, in one sentence."""


class Case(NamedTuple):
    target: str
    operation: str
    hidden: int
    dtype: str


def inspect(
    targets: list[str] | None,
    operations: list[str] | None,
    hidden: list[str] | None,
    dtypes: list[str] | None,
    json_path: str | None,
    assembly_path: str | None,
) -> int:
    """Inspect every combination. Returns the exit status: 0, or 1 where a kernel falls short."""
    started = time.perf_counter()
    cases = chosen_cases(targets, operations, hidden, dtypes)
    file = None if json_path is None else writable(json_path)
    folder = None if assembly_path is None else made(assembly_path)
    if knobs.runtime.interpret:
        raise CannotStart(recorded.INTERPRETING)
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print(report.heading(), style="dim")
    found: list[Examined] = []
    failures: list[str] = []
    for case in _progress(cases):
        try:
            kernels = examine(*case)
        except recorded.DoesNotCompile as error:
            failures.append(f"{', '.join(map(str, case))}: {error}")
            continue
        found += kernels
        if folder is not None:
            keep(kernels, folder)
    for group in report.groups(found):
        console.print(*report.table(group), sep="\n")
    if file is not None:
        file.write_text(json.dumps(report.document(found, failures), indent=1, allow_nan=False) + "\n", "utf-8")
    return _concluded(console, found, failures, len(cases), time.perf_counter() - started)


def chosen_cases(
    targets: list[str] | None, operations: list[str] | None, hidden: list[str] | None, dtypes: list[str] | None
) -> list[Case]:
    """Every combination of what was asked for, each name checked; defaults where None."""
    sizes = ["4096"] if hidden is None else hidden
    for size in sizes:
        if not (size.isascii() and size.isdigit() and 1 <= int(size) <= LARGEST_HIDDEN):
            raise CannotStart(f"--hidden must be an integer from 1 to {LARGEST_HIDDEN}, got {size}")
    return [
        Case(target, operation, size, dtype)
        for target, operation, size, dtype in product(
            _known("--target", targets, TARGETS, list(TARGETS)),
            _known("--op", operations, OPERATIONS, DEFAULT_OPERATIONS),
            dict.fromkeys(map(int, sizes)),
            _known("--dtype", dtypes, DTYPES, ["bf16"]),
        )
    ]


def _known(argument: str, names: list[str] | None, known: Iterable[str], default: Sequence[str]) -> list[str]:
    """The names, each once."""
    for name in names or ():
        if name not in known:
            raise CannotStart(f"{argument} must be one of {', '.join(known)}; got {name}")
    return list(dict.fromkeys(default if names is None else names))


def writable(path: str) -> Path:
    """The file to write to, opened once before the work starts."""
    try:
        with open(path, "a", encoding="utf-8"):
            return Path(path)
    except OSError as error:
        raise CannotStart(f"--json {path} cannot be written: {error.strerror}") from None


def made(path: str) -> Path:
    """The folder, there."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotStart(f"--asm {path} cannot be made: {error.strerror}") from None
    return Path(path)


def keep(kernels: Sequence[Examined], folder: Path) -> None:
    """Write the assembly, a file a kernel."""
    for kernel in kernels:
        name = f"{kernel.target.name}-{kernel.operation}-{kernel.hidden}-{kernel.dtype}-{kernel.kernel}"
        (folder / f"{name}.{'s' if kernel.target.amd else 'ptx'}").write_text(kernel.assembly, "utf-8")


def _progress(cases: list[Case]) -> Iterable[Case]:
    """The cases one by one, under a bar on stderr where that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("compiling", total=len(cases))
        for case in cases:
            progress.update(task, description=f"compiling {case.operation} for {case.target}")
            yield case
            progress.advance(task)


def _concluded(console: Console, found: Sequence[Examined], failures: Sequence[str], calls: int, seconds: float) -> int:
    """Print what falls short and the verdict. Returns the exit status."""
    console.print()
    short = [kernel for kernel in found if kernel.faults]
    sentences = [
        f"{kernel.target.name}, {kernel.operation}, {kernel.hidden}, {kernel.dtype}: "
        f"{kernel.kernel}: {fault.rule}: {fault.finding}"
        for kernel in short
        for fault in kernel.faults
    ]
    for sentence in (*failures, *sentences):
        console.print(f"[red]SHORT[/red] {escape(sentence)}")
    if failures:
        console.print(f"[bold red]{len(failures)} of {calls} calls do not compile ({seconds:.0f} s)[/bold red]")
    if short:
        console.print(f"[bold red]{len(short)} of {len(found)} kernels fall short ({seconds:.0f} s)[/bold red]")
    if failures or short:
        return 1
    console.print(f"[bold green]ok: all {len(found)} kernels keep every promise ({seconds:.0f} s)[/bold green]")
    return 0

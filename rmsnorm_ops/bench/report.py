"""What a benchmark prints: for each operation how this library does, then everyone against the copy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from rmsnorm_ops.bench import host, traffic
from rmsnorm_ops.bench.cases import SHORT
from rmsnorm_ops.bench.console import table
from rmsnorm_ops.bench.devices import Peak
from rmsnorm_ops.bench.host import HostTime
from rmsnorm_ops.bench.measure import Measurement, Status
from rmsnorm_ops.bench.providers import OURS

MARKS: dict[Status, Text] = {
    "unsupported": Text("–", style="dim"),
    "failed": Text("failed", style="bold red"),
    "wrong": Text("wrong", style="bold red"),
}


def by_problem(measured: Sequence[Measurement]) -> list[dict[str, Measurement]]:
    """Each problem's measurements by provider, in the order of the run."""
    grouped: dict[object, dict[str, Measurement]] = {}
    for one in measured:
        grouped.setdefault(one.problem, {})[one.provider] = one
    return list(grouped.values())


def best_peer(group: dict[str, Measurement], subject: str) -> Measurement | None:
    """The fastest of the others; None where there is none."""
    others = [one for name, one in group.items() if name != subject and one.time is not None]
    return min(others, key=lambda one: one.time.median_us if one.time else math.inf, default=None)


def speed_tables(measured: Sequence[Measurement], device: str, peak: Peak | None) -> Iterator[Text | Table]:
    """All of one operation in one dtype: large problems, then few rows; why what is missing is missing."""
    problem = measured[0].problem
    what = f"{problem.operation} on {device}, {SHORT[problem.dtype]}"
    for few in (False, True):
        groups = by_problem([one for one in measured if one.problem.case.few is few])
        if groups:
            size = "few rows" if few else _size([next(iter(group.values())) for group in groups])
            yield Text(f"\n{what}, {size}", style="bold")
            yield _of_subject(groups, peak)
            if len(groups[0]) > 1:
                yield Text(f"\n{what}, {size}: " + ("µs" if few else "fraction of the copy's speed"), style="bold")
                yield _of_everyone(groups, few)
    yield Text(_bound(measured, peak), style="dim")
    yield from _notes([(one.provider, one.problem.case.name, one.status, one.reason) for one in measured])


def _size(measured: Sequence[Measurement]) -> str:
    exponents = sorted({round(math.log2(one.problem.elements)) for one in measured})
    return " to ".join(f"2^{exponent}" for exponent in dict.fromkeys((exponents[0], exponents[-1]))) + " elements"


def _of_subject(groups: Sequence[dict[str, Measurement]], peak: Peak | None) -> Table:
    """This library, or the first provider where it is not among them: a line a case."""
    subject = OURS.name if OURS.name in groups[0] else next(iter(groups[0]))
    lines = table("case" if subject == OURS.name else subject)
    for column in ("hidden", "µs", "spread", "MB", "GB/s", "of copy", "of peak", "best peer"):
        lines.add_column(column, justify="right", no_wrap=True)
    for group in groups:
        one = group[subject]
        case = one.problem.case
        if one.time is None or one.gb_s is None:
            lines.add_row(case.name, str(case.hidden), MARKS[one.status])
            continue
        peer = best_peer(group, subject)
        rival = f"{peer.provider} ×{peer.time.median_us / one.time.median_us:.2f}" if peer and peer.time else "–"
        lines.add_row(
            case.name, str(case.hidden), _microseconds(one.time.median_us), f"±{one.spread:.1%}",
            _short(one.problem.moved_bytes / 1e6), _short(one.gb_s), f"{one.fraction:.3f}",
            f"{one.gb_s / peak.gb_s:.3f}" if peak else "–", rival,
        )  # fmt: skip
    return lines


def _of_everyone(groups: Sequence[dict[str, Measurement]], few: bool) -> Table:
    """A line a case, a column a provider; the best in bold."""
    lines = table("case")
    for column in ("copy GB/s" if not few else "copy", *groups[0]):
        lines.add_column(column, justify="right", no_wrap=True)
    for group in groups:
        first = next(iter(group.values()))
        copy = _microseconds(first.copy.median_us) if few else _short(first.copy_gb_s)
        fastest = min((one.time.median_us for one in group.values() if one.time), default=None)
        cells = []
        for one in group.values():
            if one.time is None:
                cells.append(MARKS[one.status])
                continue
            text = _microseconds(one.time.median_us) if few else f"{one.fraction:.3f}"
            cells.append(Text(text, style="bold green" if one.time.median_us == fastest else ""))
        lines.add_row(first.problem.case.name, copy, *cells)
    return lines


def _bound(measured: Sequence[Measurement], peak: Peak | None) -> str:
    """Is the operation bound by memory or by arithmetic?"""
    problem = measured[0].problem
    intensity = traffic.intensity(problem.operation, problem.moved_bytes, problem.elements)
    text = f"Arithmetic intensity {intensity:.2f} FLOP a byte"
    if peak is None:
        return f"{text}; this device's peaks are not known here."
    bound = "memory" if intensity < peak.ridge else "arithmetic"
    return (
        f"{text}; the ridge is at {peak.ridge:.0f} ({peak.tflops:g} TFLOP/s of fp32, {peak.gb_s:g} GB/s by the datasheet):"
        f" bound by {bound}."
    )


def host_table(measured: Sequence[HostTime], device: str) -> Iterator[Text | Table]:
    """µs of an eager call: a line a provider, a column a mode, each with its ratio to aten's."""
    case = host.CASE
    where = "the call alone" if measured[0].device.type == "cuda" else "on a CPU the work is included"
    title = f"\nHost time of an eager call on {device}, {case.rows} × {case.hidden} {SHORT[measured[0].dtype]}, µs ({where})"
    yield Text(title, style="bold")
    lines = table("provider")
    for mode in host.MODES:
        lines.add_column(mode, justify="right", no_wrap=True)
        lines.add_column("/ aten", justify="right", no_wrap=True, style="dim")
    aten = {one.mode: one.time for one in measured if one.provider == "aten"}
    for name in dict.fromkeys(one.provider for one in measured):
        cells: list[str | Text] = []
        for one in measured:
            if one.provider == name:
                base = aten.get(one.mode)
                cells.append(MARKS[one.status] if one.time is None else f"{one.time.median_us:.1f}")
                cells.append(f"×{one.time.median_us / base.median_us:.2f}" if base and one.time else "–")
        lines.add_row(name, *cells)
    yield lines
    yield from _notes([(one.provider, one.mode, one.status, one.reason) for one in measured])


def _notes(results: Sequence[tuple[str, str, Status, str]]) -> Iterator[Text]:
    """Why there is no time, a line a reason, with the cases that it is true of."""
    where: dict[tuple[str, Status, str], list[str]] = {}
    for provider, case, status, reason in results:
        if status != "timed":
            where.setdefault((provider, status, reason), []).append(case)
    for (provider, status, reason), names in where.items():
        if status == "unsupported":
            yield Text(f"–  {reason}", style="dim")
        else:
            yield Text(f"{status.upper()} {provider}, {', '.join(names)}: {reason}", style="red")


def _microseconds(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 10000 else f"{value:.0f}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"

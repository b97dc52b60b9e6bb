"""Drawings of the results, as SVG and PNG: speed over hidden for large problems, time over rows for few."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from rmsnorm_ops.bench.cases import SHORT, Case
from rmsnorm_ops.bench.measure import Measurement
from rmsnorm_ops.bench.providers import OURS

# Okabe and Ito's colours, which colour-blind readers tell apart; the markers say the same without colour.
STYLES = {
    "rmsnorm_ops": ("#000000", "o"),
    "aten": ("#E69F00", "s"),
    "inductor": ("#56B4E9", "^"),
    "liger": ("#009E73", "v"),
    "fla": ("#D55E00", "D"),
    "flash-attn": ("#CC79A7", "P"),
    "quack": ("#0072B2", "X"),
}
COPY = ("#777777", ":")


def draw(measured: Sequence[Measurement], device: str, folder: Path) -> list[Path]:
    """Draw what there is to draw into ``folder``, a file a plot and format, and return the files."""
    written = []
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        for name, figure in _figures(measured, device):
            for kind in ("svg", "png"):
                path = folder / f"{name}.{kind}"
                figure.savefig(path, dpi=150)
                written.append(path)
    return written


def _figures(measured: Sequence[Measurement], device: str) -> Iterator[tuple[str, Figure]]:
    keys = dict.fromkeys((one.problem.operation, SHORT[one.problem.dtype]) for one in measured)
    for operation, dtype in keys:
        ours = [one for one in measured if (one.problem.operation, SHORT[one.problem.dtype]) == (operation, dtype)]
        stem = f"{operation.replace('+', '_')}-{dtype}"
        title = f"RMSNorm {operation}, {dtype}, {device}"
        large = [one for one in ours if _is_plain(one.problem.case)]
        if large:
            yield stem, _speed_over_hidden(large, title)
        few = {hidden: group for hidden, group in _by_hidden(ours).items() if len(_rows(group)) > 2}
        if few:
            yield f"{stem}-few-rows", _time_over_rows(few, title)


def _is_plain(case: Case) -> bool:
    """A line joins problems that differ in one number."""
    options = any(case.options.values()) or case.weight != "as x" or case.values != "normal"
    return case.layout == "dense" and not case.few and not options


def _speed_over_hidden(measured: Sequence[Measurement], title: str) -> Figure:
    """The fraction of the copy's speed, a line a provider."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(1, color=COPY[0], linestyle=COPY[1], label="copy")
    for provider, group in _by_provider(measured).items():
        points = sorted((one.problem.case.hidden, one.fraction) for one in group if one.fraction is not None)
        _line(axes, provider, points)
    _log2_axis(axes, sorted({one.problem.case.hidden for one in measured}), "hidden (elements a row)")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("fraction of a copy's speed")
    axes.set_title(title, loc="left")
    _legend(figure, axes)
    return figure


def _time_over_rows(few: dict[int, list[Measurement]], title: str) -> Figure:
    """Microseconds over rows, a panel a hidden size, a line a provider."""
    figure = Figure(figsize=(max(8, 5 * len(few)), 4.5), layout="constrained")
    panels = figure.subplots(1, len(few), squeeze=False)[0]
    for axes, (hidden, measured) in zip(panels, few.items(), strict=True):
        copies = sorted({one.problem.rows: one.copy.median_us for one in measured}.items())
        axes.plot(*zip(*copies, strict=True), color=COPY[0], linestyle=COPY[1], label="copy")
        for provider, group in _by_provider(measured).items():
            points = sorted((one.problem.rows, one.time.median_us) for one in group if one.time is not None)
            _line(axes, provider, points)
        _log2_axis(axes, _rows(measured), f"rows of {hidden} elements")
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_ylabel("time (µs)")
    panels[0].set_title(title, loc="left")
    _legend(figure, panels[0])
    return figure


def _line(axes: Axes, provider: str, points: Sequence[tuple[float, float]]) -> None:
    if not points:
        return
    color, marker = STYLES.get(provider, ("#F0E442", "*"))
    ours = provider == OURS.name
    axes.plot(
        *zip(*points, strict=True), color=color, marker=marker, markersize=6 if ours else 5, linewidth=2.2 if ours else 1.3,
        label=provider, zorder=3 if ours else 2,
    )  # fmt: skip


def _log2_axis(axes: Axes, values: Sequence[int], label: str) -> None:
    """A tick at each value, but for those too near to the one before to be read."""
    ticks: list[int] = []
    for value in values:
        if not ticks or value > 1.2 * ticks[-1]:
            ticks.append(value)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.tick_params(axis="x", rotation=45)
    for text in axes.get_xticklabels():
        text.set(horizontalalignment="right", rotation_mode="anchor")
    axes.set_xlabel(label)
    axes.grid(alpha=0.3)


def _legend(figure: Figure, axes: Axes) -> None:
    """Beside the axes, where it hides no line; ours, which is drawn last, first."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False)


def _by_provider(measured: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    groups: dict[str, list[Measurement]] = {}
    for one in measured:
        groups.setdefault(one.provider, []).append(one)
    return dict(reversed(groups.items()))  # ours, which comes first, last: over the others' lines


def _by_hidden(measured: Sequence[Measurement]) -> dict[int, list[Measurement]]:
    groups: dict[int, list[Measurement]] = {}
    for one in measured:
        if one.problem.case.few:
            groups.setdefault(one.problem.case.hidden, []).append(one)
    return groups


def _rows(measured: Sequence[Measurement]) -> list[int]:
    return sorted({one.problem.rows for one in measured})

"""Measurements as JSON types, one flat object each. docs/benchmark.md says what the keys mean."""

from __future__ import annotations

from typing import Any

from rmsnorm_ops.bench import traffic
from rmsnorm_ops.bench.cases import SHORT, Case
from rmsnorm_ops.bench.devices import Peak
from rmsnorm_ops.bench.host import CASE, HostTime
from rmsnorm_ops.bench.measure import Measurement
from rmsnorm_ops.bench.timing import Timing


def of_case(case: Case, rows: int) -> dict[str, Any]:
    return {
        "case": case.name,
        "source": case.source,
        "rows": rows,
        "hidden": case.hidden,
        "layout": case.layout,
        "weight": case.weight,
        "eps": case.eps,
        "values": case.values,
        **case.options,
    }


def of_speed(measured: Measurement) -> dict[str, Any]:
    """The problem, the times and the speeds; null where there is no time."""
    problem = measured.problem
    return {
        **of_case(problem.case, problem.rows),
        "dtype": SHORT[problem.dtype],
        "operation": problem.operation,
        **_times("", measured.time),
        "bytes": problem.moved_bytes,
        **_times("copy_", measured.copy),
        "copy_bytes": problem.copy_bytes,
        "gb_s": measured.gb_s,
        "copy_gb_s": measured.copy_gb_s,
        "fraction_of_copy": measured.fraction,
    }


def of_measurement(measured: Measurement, peak: Peak | None, versions: dict[str, Any]) -> dict[str, Any]:
    """A line of ``bench --json``."""
    problem, gb_s = measured.problem, measured.gb_s
    return {
        "kind": "speed",
        "provider": measured.provider,
        "status": measured.status,
        "reason": measured.reason or None,
        **of_speed(measured),
        "flop_per_byte": traffic.intensity(problem.operation, problem.moved_bytes, problem.elements),
        "fraction_of_peak": None if peak is None or gb_s is None else gb_s / peak.gb_s,
        "peak_gb_s": None if peak is None else peak.gb_s,
        "peak_tflops": None if peak is None else peak.tflops,
        "ridge_flop_per_byte": None if peak is None else peak.ridge,
        "versions": versions,
    }


def of_host(host: HostTime, aten: Timing | None, versions: dict[str, Any]) -> dict[str, Any]:
    """A line of ``bench --json``, against ``aten`` in the same mode."""
    ratio = None if aten is None or host.time is None else host.time.median_us / aten.median_us
    return {
        "kind": "host",
        "provider": host.provider,
        "status": host.status,
        "reason": host.reason or None,
        "mode": host.mode,
        "rows": CASE.rows,
        "hidden": CASE.hidden,
        "dtype": SHORT[host.dtype],
        **_times("", host.time),
        "times_aten": ratio,
        "versions": versions,
    }


def _times(prefix: str, time: Timing | None) -> dict[str, float | None]:
    values = (None,) * 3 if time is None else (time.median_us, time.low_us, time.high_us)
    return dict(zip((f"{prefix}us", f"{prefix}low_us", f"{prefix}high_us"), values, strict=True))

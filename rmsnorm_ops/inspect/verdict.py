"""The library's promises of its kernels as rules over what was read, one a technique."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rmsnorm_ops.inspect.examination import Examined
    from rmsnorm_ops.inspect.machine import Accesses


class Fault(NamedTuple):
    """A rule that a kernel falls short of, and by how much."""

    rule: str
    finding: str


class Rule(NamedTuple):
    """``check`` returns what falls short, or nothing."""

    name: str
    technique: str
    check: Callable[[Examined], str | None]


_NORMS = tuple(f"{strategy}_{way}" for strategy in ("resident", "streamed", "shared") for way in ("forward", "backward"))
_PERSISTENT = ("resident_backward", "shared_forward", "shared_backward")
# What is no row, and is read or written a few bytes at a time.
_NARROW_LOADS = {
    "weight_gradient": "the two factors of each row's rstd",
    "shared_forward": "the parts of a sum that the programs of a row publish",
    "shared_backward": "likewise",
}
_NARROW_STORES = {
    "streamed_backward": "the two factors of a row's rstd",
    "sum_partials": "dweight: 32 columns a program, from a sum over its threads",
}


def _loads(examined: Examined) -> str | None:
    return None if examined.kernel in _NARROW_LOADS else _narrow(examined, examined.instructions.loads, "loads")


def _stores(examined: Examined) -> str | None:
    return None if examined.kernel in _NARROW_STORES else _narrow(examined, examined.instructions.stores, "stores")


def _narrow(examined: Examined, accesses: Accesses, what: str) -> str | None:
    if not examined.aligned or accesses.narrow <= _vectors(examined):
        return None
    return f"{accesses.narrow} of {accesses.count} {what} move fewer than 16 bytes"


def _vectors(examined: Examined) -> int:
    """The weight, or a program's dweight, of a tile of several short rows has fewer than 16 bytes for each thread: one access
    of what there is, shared by all rows of the tile."""
    plan = examined.plan
    return int(plan.rows > 1 and plan.head * max(4, examined.itemsize) <= 16 * examined.threads)


def _once(examined: Examined) -> str | None:
    """Only of the kernel that loads nothing ahead: elsewhere the loads of a loop stand in the code more than once."""
    if examined.kernel != "resident_forward" or not examined.aligned:
        return None
    plan, rows = examined.plan, 2 if examined.operation == "add_forward" else 1
    # Each block of each row tensor and of the weight, which is the same for all rows of a tile: a 16-byte load at least.
    blocks = [plan.rows * block * examined.itemsize for block in (plan.head, plan.tail) if block]
    most = (rows + 1) * sum(max(16, block // examined.threads) for block in blocks)
    found = examined.instructions.loads.bytes
    return None if found <= most else f"{found} bytes are loaded by a thread whose part is {most}"


def _compute(examined: Examined) -> str | None:
    narrow = examined.narrow_arithmetic
    return f"{len(narrow)} operations on 16-bit numbers" if narrow else None


def _reduction(examined: Examined) -> str | None:
    if examined.kernel not in _NORMS:
        return None
    if not examined.instructions.shuffles:
        return "no shuffles"
    # Nothing is in shared memory but a number a warp, unless persistent programs load ahead into it.
    if examined.kernel not in _PERSISTENT and not examined.kernel.endswith("_backward") and examined.shared > 4096:
        return f"{examined.shared} bytes of shared memory for a reduction"
    return None


def _rsqrt(examined: Examined) -> str | None:
    expected = 1 if examined.kernel in _NORMS else 0
    found = examined.ordinary.rsqrts
    return None if found == expected else f"{found} rsqrts outside of the rescue branch, not {expected}"


def _slow(examined: Examined) -> str | None:
    slow = examined.ordinary.slow
    return f"{', '.join(slow)} outside of the rescue branch" if slow else None


def _spills(examined: Examined) -> str | None:
    spilled = examined.resources.spilled
    return f"{spilled} bytes a thread" if spilled else None


def _limits(examined: Examined) -> str | None:
    limits = examined.target.limits
    if examined.threads > limits.max_threads:
        return f"{examined.threads} threads, at most {limits.max_threads} launch"
    if examined.shared > limits.shared_memory:
        return f"{examined.shared} bytes of shared memory, a program has {limits.shared_memory}"
    return None if examined.occupancy.programs else "a processor has too few registers for one program"


def _persistent(examined: Examined) -> str | None:
    resident = examined.occupancy.programs * examined.target.limits.processors
    if examined.kernel not in _PERSISTENT or examined.plan.persistent <= resident:
        return None
    return f"{examined.plan.persistent} programs for {resident} places: some wait until others have done all their tiles"


RULES = (
    Rule("loads", "16-byte loads wherever rows start at multiples of 16 bytes", _loads),
    Rule("stores", "16-byte stores likewise", _stores),
    Rule("once", "a resident row is loaded once and kept in registers", _once),
    Rule("compute", "arithmetic in fp32 or wider, whatever the dtype", _compute),
    Rule("reduction", "shuffles in a warp, then a number a warp through shared memory", _reduction),
    Rule("rsqrt", "one rsqrt a row outside of the rescue branch", _rsqrt),
    Rule("slow", "no division and no square root outside of the rescue branch", _slow),
    Rule("spills", "no register is spilled to memory", _spills),
    Rule("limits", "threads, shared memory and registers within what a processor has", _limits),
    Rule("resident", "persistent programs all run at once", _persistent),
)


def faults(examined: Examined) -> tuple[Fault, ...]:
    """Every rule that the kernel falls short of."""
    found = ((rule.name, rule.check(examined)) for rule in RULES)
    return tuple(Fault(name, finding) for name, finding in found if finding is not None)

"""PTX: the instructions of NVIDIA targets."""

from __future__ import annotations

import re

from rmsnorm_ops.inspect.machine import Accesses, Instructions

# A predicate may stand before the opcode: @%p14 ld.global.v4.b32 { … }, [ %rd5 + 0 ];
_INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)(?:\s+(.*?))?;", re.MULTILINE)
_COPIED = re.compile(r"\],\s*(0x[0-9a-f]+|\d+)")  # bytes of cp.async: [shared], [global], bytes, bytes that are not zero
_TYPE = re.compile(r"[busf](\d+)")
_VECTOR = re.compile(r"v([248])")


def instructions(text: str) -> Instructions:
    """Count those of a kernel."""
    loads, stores = [], []
    counts = dict.fromkeys(("shfl", "bar", "rsqrt", "div", "sqrt"), 0)
    for opcode, operands in _INSTRUCTION.findall(text):
        parts = opcode.split(".")
        if opcode.startswith("ld.global"):
            loads.append(_width(parts))
        elif opcode.startswith("st.global"):
            stores.append(_width(parts))
        elif opcode.startswith("cp.async.") and ".global" in opcode:
            loads.append(_copied(operands))
        elif parts[0] in ("bar", "barrier"):
            counts["bar"] += 1
        elif parts[0] in counts and (parts[0] != "div" or parts[-1] in ("f32", "f64")):
            counts[parts[0]] += 1
    return Instructions(
        Accesses.of(loads), Accesses.of(stores), counts["shfl"], counts["bar"], counts["rsqrt"], counts["div"], counts["sqrt"]
    )


def architecture(text: str) -> str:
    """What the text is for, such as sm_90a."""
    found = re.search(r"^\.target (\w+)", text, re.MULTILINE)
    if found is None:
        raise ValueError("PTX without .target")
    return found[1]


def _width(parts: list[str]) -> int:
    """ld.global.v4.b32 moves 16 bytes."""
    bits = [int(match[1]) for part in parts if (match := _TYPE.fullmatch(part))]
    vectors = [int(match[1]) for part in parts if (match := _VECTOR.fullmatch(part))]
    return (vectors[0] if vectors else 1) * bits[-1] // 8


def _copied(operands: str) -> int:
    # The first ] closes the shared address, whose next operand is another address: the first number is the size.
    found = _COPIED.search(operands)
    if found is None:
        raise ValueError(f"cp.async without a size: {operands}")
    return int(found[1], 0)

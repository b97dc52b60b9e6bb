"""Triton's own intermediate code: what every row runs and what the rescue branch alone runs, which assembly no longer tells."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

RSQRT = "= math.rsqrt "


@dataclass(frozen=True)
class Ordinary:
    """What is outside of every branch."""

    rsqrts: int  # for one tile
    slow: tuple[str, ...]  # divisions and square roots


def ordinary(text: str) -> Ordinary:
    """Read what is outside of every scf.if of a kernel.

    A loop over tiles has the rsqrt of one tile in its body. What loads ahead may have another after it, for the last tiles, and
    before it stands what is done once a program.
    """
    lines = without(text, "scf.if").splitlines()
    besides = Counter(without("\n".join(lines), "scf.for").splitlines())
    in_loops = [line for line in lines if not besides[line]]
    counted = "\n".join(in_loops if any(RSQRT in line for line in in_loops) else lines)
    return Ordinary(counted.count(RSQRT), tuple(re.findall(r"= (arith\.divf|math\.sqrt) ", counted)))


def without(text: str, operation: str) -> str:
    """The lines that are in no region of ``operation``, scf.if or scf.for."""
    kept: list[str] = []
    depth = 0
    inside: list[int] = []
    for line in text.splitlines():
        if re.search(rf"\b{re.escape(operation)}\b", line):
            inside.append(depth)
        if not inside:
            kept.append(line)
        depth += line.count("{") - line.count("}")
        while inside and depth <= inside[-1]:
            inside.pop()
    return "\n".join(kept)


def reduction_layouts(text: str) -> list[str]:
    """The operand of each reduction with its layout spelt out, in order."""
    aliases = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))

    def spelt_out(operand: str) -> str:
        for alias in sorted(aliases, key=len, reverse=True):
            operand = re.sub(rf"{alias}\b(?!\.)", aliases[alias], operand)
        return operand

    return [spelt_out(operand) for operand in re.findall(r"^\s*\}\) : \((tensor<.*)\) -> ", text, re.MULTILINE)]


def narrow_arithmetic(text: str) -> list[str]:
    """Floating-point operations on 16-bit numbers; conversions are none."""
    return re.findall(r"= (?:arith\.(?:add|sub|mul|div|max|min)\w*f|math\.\w+) .*: (?:tensor<\S*x)?b?f16\b", text)

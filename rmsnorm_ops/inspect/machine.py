"""What is read from the machine code of any target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

WIDE = 16  # bytes of the widest load that every target has


@dataclass(frozen=True)
class Accesses:
    """Instructions that access global memory, by the bytes each moves for one thread."""

    by_width: Mapping[int, int]

    @classmethod
    def of(cls, widths: list[int]) -> Accesses:
        return cls(dict(sorted(Counter(widths).items())))

    @property
    def count(self) -> int:
        return sum(self.by_width.values())

    @property
    def bytes(self) -> int:
        return sum(width * count for width, count in self.by_width.items())

    @property
    def narrow(self) -> int:
        """Instructions that move fewer than 16 bytes."""
        return sum(count for width, count in self.by_width.items() if width < WIDE)

    @property
    def wide_share(self) -> float:
        """Of the bytes, those moved by 16 or more at a time; 1 where there are none."""
        wide = sum(width * count for width, count in self.by_width.items() if width >= WIDE)
        return wide / self.bytes if self.bytes else 1.0


@dataclass(frozen=True)
class Instructions:
    """Counted where they stand: a loop's body once, however often it runs, and the rescue branch with the rest."""

    loads: Accesses
    stores: Accesses
    shuffles: int  # moves between the threads of a warp
    barriers: int
    rsqrts: int
    divides: int  # of floating-point numbers
    roots: int


@dataclass(frozen=True)
class Resources:
    """What a thread, and a program, take of a processor."""

    registers: int  # 32-bit, a thread; AMD: the file that VGPRs and AGPRs share
    accumulation: int  # those of them that are AGPRs
    spilled: int  # bytes a thread that the compiler moved to memory for want of registers
    scratch: int  # bytes of memory a thread, spills included

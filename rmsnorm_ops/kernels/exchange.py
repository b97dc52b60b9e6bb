"""How programs that share a row tell each other their parts of its sums.

Every row has SUMS · PADDED slots of 32 bits, which the launch fills with EMPTY: PADDED, a power of two, for the COUNT
programs of each of the SUMS sums. A value is its own flag: its bits are never EMPTY, which is a NaN that no program
publishes, so that one relaxed 32-bit store and loads that no cache answers are all the order that is needed. The programs
that wait must all be running: the launch is cooperative.
"""

import triton
import triton.language as tl

EMPTY = tl.constexpr(-1)
_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def publish(slot, value, mask):
    """Store a part, fp32, where the other programs look for it."""
    bits = tl.where(value == value, value.to(tl.int32, bitcast=True), _NAN)
    tl.atomic_xchg(slot, bits, mask=mask, sem="relaxed")


@triton.jit
def poll(slots, mask, COUNT: tl.constexpr, SUMS: tl.constexpr, PADDED: tl.constexpr):
    """The bits in a row's slots as they are now, [SUMS · PADDED]; 0 in those that pad, and in all where ``mask`` is not set."""
    lanes = tl.arange(0, SUMS * PADDED)
    return tl.load(slots + lanes, mask=(lanes % PADDED < COUNT) & mask, other=0, volatile=True)


@triton.jit
def complete(bits):
    """Whether every program has published."""
    return tl.min((bits != EMPTY).to(tl.int32), axis=0) > 0


@triton.jit
def totals(bits, SUMS: tl.constexpr, PADDED: tl.constexpr):
    """The row's first and last sum, each added in the order of the slots."""
    sums = tl.sum(tl.reshape(bits.to(tl.float32, bitcast=True), (SUMS, PADDED)), axis=1)
    which = tl.arange(0, SUMS)
    return tl.sum(tl.where(which == 0, sums, 0.0), axis=0), tl.sum(tl.where(which == SUMS - 1, sums, 0.0), axis=0)


@triton.jit(noinline=True)  # a loop inside a loop would keep the outer one's loads from being issued ahead
def wait(slots, COUNT: tl.constexpr, SUMS: tl.constexpr, PADDED: tl.constexpr):
    """``totals`` once every program has published."""
    bits = poll(slots, True, COUNT, SUMS, PADDED)
    while not complete(bits):
        bits = poll(slots, True, COUNT, SUMS, PADDED)
    return totals(bits, SUMS, PADDED)

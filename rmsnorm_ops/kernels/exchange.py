"""How programs that share a row tell each other their parts of its sums.

A row has lines of PADDED slots of 32 bits, a power of two, one line for each number that COUNT programs put together; the
launch fills them with EMPTY. A value is its own flag: its bits are never EMPTY, a NaN that no program publishes, so that one
relaxed 32-bit store and loads that no cache answers are all the order that is needed. The programs that wait must all be
running: the launch is cooperative. The warps of a program look for themselves, and one may see a part that another does not yet:
what looks at slots must meet no barrier, which 32 slots, or a program of one warp, see to.
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
def poll(slots, mask, COUNT: tl.constexpr, LINES: tl.constexpr, PADDED: tl.constexpr):
    """The bits in a row's first LINES lines as they are now; 0 in slots that pad, and in all where ``mask`` is not set."""
    lanes = tl.arange(0, LINES * PADDED)
    return tl.load(slots + lanes, mask=lanes % PADDED < tl.where(mask, COUNT, 0), other=0, volatile=True)


@triton.jit
def complete(bits):
    """Whether every program has published."""
    return tl.min((bits != EMPTY).to(tl.int32), axis=0) > 0


@triton.jit
def totals(bits, LINES: tl.constexpr, PADDED: tl.constexpr):
    """The sums of the first and the last line, each added in the order of the slots."""
    sums = tl.sum(tl.reshape(bits.to(tl.float32, bitcast=True), (LINES, PADDED)), axis=1)
    which = tl.arange(0, LINES)
    return tl.sum(tl.where(which == 0, sums, 0.0), axis=0), tl.sum(tl.where(which == LINES - 1, sums, 0.0), axis=0)


# Functions of their own: a loop inside a loop would keep the outer one's loads from being issued ahead. They use no shared
# memory: triton 3.6 gives a called function some that its caller's loads are on their way to.
@triton.jit(noinline=True)
def wait_for_totals(slots, COUNT: tl.constexpr, LINES: tl.constexpr, PADDED: tl.constexpr):
    """``totals`` once every program has published."""
    bits = poll(slots, tl.full([1], True, tl.int1), COUNT, LINES, PADDED)
    while not complete(bits):
        bits = poll(slots, tl.full([1], True, tl.int1), COUNT, LINES, PADDED)
    return totals(bits, LINES, PADDED)


@triton.jit(noinline=True)
def wait_for_largest(slots, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """The largest of a line of numbers that are not negative, once every program has published."""
    bits = poll(slots, tl.full([1], True, tl.int1), COUNT, 1, PADDED)
    while not complete(bits):
        bits = poll(slots, tl.full([1], True, tl.int1), COUNT, 1, PADDED)
    return tl.max(bits, axis=0).to(tl.float32, bitcast=True)

"""AMD assembly: the instructions, and the metadata of the code object that stands at its end.

CDNA writes global_load_dwordx4 and ds_read_b32, RDNA 3 and 4 global_load_b128 and ds_load_b32. Buffer instructions are
global accesses with the bounds check of a resource descriptor: Triton's choice below 2 GiB. Scratch is what was spilled.
"""

from __future__ import annotations

import re

from rmsnorm_ops.inspect.machine import Accesses, Instructions, Resources

_OPCODE = re.compile(r"^\s+([a-z]+_\w+)", re.MULTILINE)
_ACCESS = re.compile(r"(?:global|buffer|flat)_(load|store)_(\w+)")
_CDNA_WIDTH = re.compile(r"(?:lds_)?(?:dword(?:x(?P<dwords>\d))?|[us]?(?P<short>short)|[us]?byte)(?:_d16(?:_hi)?)?")
_RDNA_WIDTH = re.compile(r"(?:d16_)?(?:hi_)?[biu](?P<bits>\d+)")
# Moves between the lanes of a wavefront. Of a DPP instruction the move is a part: v_add_f32_dpp moves and adds.
_MOVES = re.compile(r"\w+_dpp|v_permlane\w*|ds_swizzle_b32|ds_bpermute_b32|ds_permute_b32")
_KINDS = {
    "barriers": re.compile(r"s_barrier|s_barrier_signal"),  # RDNA 4 signals and waits
    "rsqrts": re.compile(r"v_(?:s_)?rsq_f\d+(?:_e\d+)?"),  # RDNA 4 has a scalar form
    "divides": re.compile(r"v_div_fixup_f\d+(?:_e\d+)?"),  # the last step of each; v_rcp also serves integer division
    "roots": re.compile(r"v_(?:s_)?sqrt_f\d+(?:_e\d+)?"),
}


def instructions(text: str) -> Instructions:
    """Count those of a kernel."""
    accesses: dict[str, list[int]] = {"load": [], "store": []}
    shuffles = 0
    counts = dict.fromkeys(_KINDS, 0)
    for opcode in _OPCODE.findall(text):
        if access := _ACCESS.fullmatch(opcode):
            accesses[access[1]].append(_width(access))
        elif _MOVES.fullmatch(opcode):
            shuffles += 1
        for kind, pattern in _KINDS.items():
            counts[kind] += pattern.fullmatch(opcode) is not None
    return Instructions(Accesses.of(accesses["load"]), Accesses.of(accesses["store"]), shuffles, **counts)


def resources(text: str) -> Resources:
    """Read the metadata."""
    return Resources(
        # Of the whole file: .vgpr_count includes the AGPRs where the two share one.
        registers=_entry("vgpr_count", text),
        accumulation=_entry("agpr_count", text, 0),
        # Each spilled register is stored as 4 bytes a lane.
        spilled=4 * _entry("vgpr_spill_count", text),
        scratch=_entry("private_segment_fixed_size", text),
    )


def occupancy(text: str) -> int:
    """Waves a SIMD that the registers leave room for, as the compiler has it; without the LDS, which a launch sizes."""
    found = re.search(r"^; Occupancy: (\d+)", text, re.MULTILINE)
    if found is None:
        raise ValueError("assembly without an occupancy")
    return int(found[1])


def _width(access: re.Match[str]) -> int:
    if found := _RDNA_WIDTH.fullmatch(access[2]):  # b128, u16, d16_hi_b16
        return int(found["bits"]) // 8
    found = _CDNA_WIDTH.fullmatch(access[2])  # dwordx4, ushort, short_d16_hi
    if found is None:
        raise ValueError(f"an access of unknown width: {access[0]}")
    if access[2].removeprefix("lds_").startswith("dword"):
        return 4 * int(found["dwords"] or 1)
    return 2 if found["short"] else 1


def _entry(name: str, text: str, default: int | None = None) -> int:
    found = re.search(rf"^\s*(?:- )?\.{name}:\s*(\d+)", text, re.MULTILINE)
    if found is not None:
        return int(found[1])
    if default is None:
        raise ValueError(f"metadata without .{name}")
    return default

"""Compile the forward kernels for GPUs that need not be there. Run in a process without Triton's interpreter:

    python -m tests.machine_code '[{"target": "sm_90", "hidden": 4096}, ...]'

prints what the tests ask of each: counts of instructions, the layouts of its reductions, registers and spills.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from typing import Any

import torch

from rmsnorm_ops import device
from rmsnorm_ops.contracts_quant import FORMATS
from rmsnorm_ops.plan import LaunchPlan, RowProblem, forward_plan
from rmsnorm_ops.plan_quant import forward_quant_plan

TARGETS = {
    "sm_80": ("cuda", 80, 32), "sm_89": ("cuda", 89, 32), "sm_90": ("cuda", 90, 32), "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64), "gfx950": ("hip", "gfx950", 64), "gfx1100": ("hip", "gfx1100", 32),
}  # fmt: skip
CASTS = ("sm_90", "sm_100")  # device.converts_to_fp8
ELEMENT = {"bf16": (2, False), "fp16": (2, False), "fp32": (4, False), "fp64": (8, True)}
# How x may be aligned: (its pointer is, the unit of its strides is 16 bytes, rows lie at two strides)
VARIANTS = {
    "aligned": (True, True, False),
    "unaligned pointer": (False, False, False),
    "odd stride": (True, False, False),
    "two strides": (True, True, True),
}

NOT_QUANTISED = {
    "scale_ptr": None, "max_scale": None, "GROUP": 0, "QMAX": 0.0, "POWER_OF_TWO": False, "COLUMN_MAJOR": False, "FORMAT": "",
    "CAST": False,
}  # fmt: skip


def compile_forward(
    target: str,
    hidden: int,
    dtype: str = "bf16",
    weight: str | None = None,
    variant: str = "aligned",
    codes: str | None = None,
    group: int | None = None,
) -> tuple[LaunchPlan, Any]:
    """The launcher's plan and constants for this row, and the kernel compiled with them. ``codes`` is a format to quantise to,
    with a scale a row, or a ``group``, or of all where that is 0."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rmsnorm_ops.kernels import forward as kernels

    itemsize, fp64 = ELEMENT[dtype]
    aligned_pointer, aligned_stride, folded = VARIANTS[variant]
    limits = replace(device.limits(torch.device("cpu")), warp_size=TARGETS[target][2])
    plan = (forward_plan if codes is None else forward_quant_plan)(RowProblem(hidden, itemsize, fp64), limits)
    kernel = kernels.resident_forward if plan.strategy == "resident" else kernels.streamed_forward
    # Where a row of y is no multiple of 16 bytes, x promises no more: so does rows_of.
    align = 16 // itemsize if aligned_stride and hidden * itemsize % 16 == 0 else 1
    constants = {
        "residual_ptr": None, "residual_out_ptr": None, "HIDDEN": hidden, "FP64": fp64, "WEIGHT_OFFSET": 0.0,
        "ROUND_BEFORE_WEIGHT": False, "X_ALIGN": align, "X_FOLDED": folded, "RESIDUAL_ALIGN": 1, "RESIDUAL_FOLDED": False,
        "ROWS": plan.rows, "HEAD": plan.head, "TAIL": plan.tail, **NOT_QUANTISED,
    }  # fmt: skip
    pointers = {"x_ptr": f"*{dtype}", "y_ptr": f"*{dtype}"}
    if weight is None:
        constants["weight_ptr"] = None
    else:
        pointers["weight_ptr"] = f"*{weight}"
    if codes is not None:
        constants |= quantised(codes, hidden if group is None else min(group, hidden), target)
        del constants["scale_ptr"]
        pointers |= {"y_ptr": "*i8", "scale_ptr": "*fp32"}
    names = kernel.arg_names
    types = {name: "fp64" if name == "eps" else "i64" for name in names} | pointers | dict.fromkeys(constants, "constexpr")
    hints = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers if name != "x_ptr" or aligned_pointer}
    source = ASTSource(
        kernel, {name: types[name] for name in names}, {(names.index(name),): value for name, value in constants.items()}, hints
    )
    return plan, triton.compile(
        source, target=GPUTarget(*TARGETS[target]), options={"num_warps": plan.warps, "enable_fp_fusion": True}
    )


def quantised(codes: str, group: int, target: str) -> dict[str, Any]:
    qmax = next(form.qmax for form in FORMATS.values() if form.name == codes)
    return {"GROUP": group, "QMAX": qmax, "FORMAT": codes, "CAST": target in CASTS}


def reduction_layouts(ttgir: str) -> list[str]:
    """The operand of each reduction with its layout spelt out, in order."""
    aliases = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))

    def spelt_out(text: str) -> str:
        for alias in sorted(aliases, key=len, reverse=True):
            text = re.sub(rf"{alias}\b(?!\.)", aliases[alias], text)
        return text

    return [spelt_out(operand) for operand in re.findall(r"^\s*\}\) : \((tensor<.*)\) -> ", ttgir, re.MULTILINE)]


def outside_of_branches(ttgir: str) -> str:
    """The lines that every row runs: those of no scf.if."""
    kept, depth, branches = [], 0, []
    for line in ttgir.splitlines():
        if re.search(r"\bscf\.if\b", line):
            branches.append(depth)
        if not branches:
            kept.append(line)
        depth += line.count("{") - line.count("}")
        while branches and depth <= branches[-1]:
            branches.pop()
    return "\n".join(kept)


def facts(request: dict[str, Any]) -> dict[str, Any]:
    plan, compiled = compile_forward(**request)
    assembly, ttir, ttgir = compiled.asm, compiled.asm["ttir"], compiled.asm["ttgir"]
    ordinary = outside_of_branches(ttgir)
    moved = re.findall(r"ttg\.convert_layout .* -> tensor<((?:\d+x)+)", ttgir)
    threads = plan.warps * TARGETS[request["target"]][2]
    found = {
        **request,
        "strategy": plan.strategy,
        "blocks": [plan.head] + [plan.tail] * (plan.tail > 0),
        "rows": plan.rows,
        "threads": threads,
        "shared": compiled.metadata.shared,
        "moved": max([0, *(math.prod(map(int, shape.split("x")[:-1])) for shape in moved)]),  # elements, between threads
        "reductions": reduction_layouts(ttgir),
        "rsqrts": len(re.findall(r"= math\.rsqrt ", ttgir)),
        "ordinary_rsqrts": len(re.findall(r"= math\.rsqrt ", ordinary)),
        "ordinary_slow": re.findall(r"= (?:arith\.divf|math\.sqrt) ", ordinary),
        "narrow_arithmetic": re.findall(
            r"= (?:arith\.(?:add|sub|mul|div|max|min)\w*f|math\.\w+) .*: (?:tensor<\S*x)?b?f16\b", ttir
        ),
        "narrow_reductions": [layout for layout in reduction_layouts(ttgir) if "xf16" in layout or "bf16" in layout],
    }
    return found | (ptx_facts(assembly["ptx"]) if "ptx" in assembly else gcn_facts(assembly["amdgcn"]))


def ptx_facts(ptx: str) -> dict[str, Any]:
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        arch = re.search(r"\.target (\w+)", ptx)[1]
        assembler = get_ptxas(int(re.search(r"\d+", arch)[0])).path
        command = [assembler, "-v", "--gpu-name", arch, file.name, "-o", f"{file.name}.cubin"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "loads": len(re.findall(r"\bld\.global\S*", ptx)),
        "wide_loads": len(re.findall(r"\bld\.global\S*\.v(?:4\.b32|2\.b64)\b", ptx)),
        "stores": len(re.findall(r"\bst\.global\S*", ptx)),
        "wide_stores": len(re.findall(r"\bst\.global\S*\.v(?:4\.b32|2\.b64)\b", ptx)),
        "conversions": sorted(set(re.findall(r"\bcvt\.\S*(?:e4m3|e5m2)\S*", ptx))),
        "hardware_rsqrts": len(re.findall(r"\brsqrt\.approx", ptx)),
        "shuffles": len(re.findall(r"\bshfl\.sync\.bfly", ptx)),
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", report))),
        "registers": int(re.search(r"Used (\d+) registers", report)[1]),
    }


def gcn_facts(gcn: str) -> dict[str, Any]:
    return {
        "loads": len(re.findall(r"^\s*(?:global|buffer)_load_", gcn, re.MULTILINE)),
        "wide_loads": len(re.findall(r"^\s*(?:global|buffer)_load_dwordx4", gcn, re.MULTILINE)),
        "stores": len(re.findall(r"^\s*(?:global|buffer)_store_", gcn, re.MULTILINE)),
        "wide_stores": len(re.findall(r"^\s*(?:global|buffer)_store_dwordx4", gcn, re.MULTILINE)),
        "hardware_rsqrts": len(re.findall(r"^\s*v_rsq_f(?:32|64)", gcn, re.MULTILINE)),
        "shuffles": len(re.findall(r"_dpp\b|ds_swizzle|ds_bpermute|v_permlane", gcn)),
        "spilled": int(re.search(r"vgpr_spill_count:\s*(\d+)", gcn)[1]),
        "registers": int(re.search(r"\.vgpr_count:\s*(\d+)", gcn)[1]),
    }


def specialisations(target: str, kernel: str, **changes: Any) -> list[Any]:
    """What Triton's launch would compile this kernel for, beyond the types: one entry an argument that is no constexpr."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from rmsnorm_ops.kernels import forward as kernels

    function = getattr(kernels, f"{kernel}_forward")
    tensor = torch.empty(64, dtype=torch.bfloat16, device="meta")
    arguments = {parameter.name: 16 for parameter in function.params}
    arguments |= {
        "x_ptr": tensor,
        "weight_ptr": tensor,
        "y_ptr": tensor,
        "residual_ptr": None,
        "residual_out_ptr": None,
        "scale_ptr": None,
        "max_scale": None,
        "eps": 1e-6,
    }
    binder = create_function_from_signature(function.signature, function.params, make_backend(GPUTarget(*TARGETS[target])))
    _, specialisation, _ = binder(*(arguments | changes).values(), num_warps=4)
    found = zip(function.params, specialisation, strict=True)
    return [[parameter.name, *map(str, entry)] for parameter, entry in found if not parameter.is_constexpr]


def specialised_differently() -> list[str]:
    """Values that one held kernel has to stand for, where Triton's launch would have compiled another."""
    big = torch.empty(2**31, dtype=torch.bfloat16, device="meta")
    integers = ("n_rows", "x_inner_rows", "x_outer_stride", "x_inner_stride")
    changes = {f"{name}={value}": {name: value} for name in integers for value in (0, 1, 17)}
    changes["4 GiB of x and y"] = {"x_ptr": big, "y_ptr": big}
    return [
        f"{target} {kernel}: {label}"
        for target in ("sm_90", "sm_80", "gfx942")
        for kernel in ("resident", "streamed")
        for label, change in changes.items()
        if specialisations(target, kernel, **change) != specialisations(target, kernel)
    ]


if __name__ == "__main__":
    print(
        json.dumps({"kernels": [facts(request) for request in json.loads(sys.argv[1])], "specialised": specialised_differently()})
    )

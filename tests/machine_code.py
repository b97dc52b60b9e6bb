"""Compile kernels for GPUs that need not be there. Run in a process without Triton's interpreter:

    python -m tests.machine_code forward '[{"target": "sm_90", "hidden": 4096}, ...]'
    python -m tests.machine_code forward_quant '[{"target": "sm_90", "hidden": 4096, "codes": "int8"}, ...]'
    python -m tests.machine_code cases '[["gfx942", "backward", 4096, "bf16"], ...]'
    python -m tests.machine_code specialised

prints, as JSON, what inspect/ reads of each and what more the tests ask for. ``compile_all`` does so from a test.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rmsnorm_ops import launch, launch_quant
from rmsnorm_ops.contracts_quant import FORMATS
from rmsnorm_ops.inspect import gcn, operations, ttgir
from rmsnorm_ops.inspect.targets import TARGETS
from tests.processes import run_python

ROWS = operations.ROWS


def compile_all(what: str, requests: Any, cache: str) -> Any:
    """This module's output, from a process that does not interpret."""
    code = "import runpy; runpy.run_module('tests.machine_code', run_name='__main__')"
    output = run_python(code, what, json.dumps(requests), timeout=3600, TRITON_INTERPRET=None, TRITON_CACHE_DIR=cache)
    return json.loads(output)


def dense(hidden: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(ROWS, hidden, dtype=dtype, device="meta")


def unaligned_pointer(hidden: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(ROWS * hidden + 1, dtype=dtype, device="meta")[1:].view(ROWS, hidden)


def odd_stride(hidden: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(ROWS, hidden + 1, dtype=dtype, device="meta")[:, :hidden]


def two_strides(hidden: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(4, 2 * ROWS, hidden, dtype=dtype, device="meta")[:, :ROWS]


VARIANTS = {"aligned": dense, "unaligned pointer": unaligned_pointer, "odd stride": odd_stride, "two strides": two_strides}


def forward(target: str, hidden: int, dtype: str = "bf16", weight: str | None = None, variant: str = "aligned") -> dict[str, Any]:
    """One forward, of x laid out as ``variant`` says and of a weight of its own dtype, if any."""
    x = VARIANTS[variant](hidden, operations.DTYPES[dtype])
    scale = None if weight is None else torch.empty(hidden, dtype=operations.DTYPES[weight], device="meta")
    return _facts(target, "forward", x, lambda: launch.forward(x, scale, 1e-6)) | {"weight": weight}


def forward_quant(
    target: str,
    hidden: int,
    codes: str,
    dtype: str = "bf16",
    weight: str | None = None,
    variant: str = "aligned",
    group: int | None = None,
) -> dict[str, Any]:
    """``forward`` to codes of a format, with a scale a row, or a ``group``, or of all where that is 0."""
    x = VARIANTS[variant](hidden, operations.DTYPES[dtype])
    factor = None if weight is None else torch.empty(hidden, dtype=operations.DTYPES[weight], device="meta")
    kind = next(kind for kind, form in FORMATS.items() if form.name == codes)
    if group == 0:
        given = torch.empty(1, device="meta")
        return _facts(target, "forward_quant", x, lambda: launch_quant.forward_quant_static(x, factor, given, 1e-6, dtype=kind))
    return _facts(target, "forward_quant", x, lambda: launch_quant.forward_quant(x, factor, 1e-6, dtype=kind, group_size=group))


def _facts(target: str, operation: str, x: Tensor, call: Callable[[], object]) -> dict[str, Any]:
    """What inspect/ reads of the one kernel that ``call`` launches, and what the tests read besides."""
    from rmsnorm_ops.inspect.examination import examined, row
    from rmsnorm_ops.inspect.recorded import compiled, record

    (recorded,) = record(TARGETS[target], call)
    assembly = compiled(recorded, TARGETS[target]).asm
    code = assembly["ttgir"]
    moved = re.findall(r"ttg\.convert_layout .* -> tensor<((?:\d+x)+)", code)
    dtype = next(name for name, dtype in operations.DTYPES.items() if dtype is x.dtype)
    found = examined(recorded, TARGETS[target], operation, x.shape[-1], dtype)
    return row(found) | {
        "reductions": ttgir.reduction_layouts(code),
        "all_rsqrts": code.count("= math.rsqrt "),
        "narrow_arithmetic": list(found.narrow_arithmetic),
        "moved": max([0, *(math.prod(map(int, shape.split("x")[:-1])) for shape in moved)]),  # elements, between threads
        "conversions": sorted(set(re.findall(r"\bcvt\.\S*(?:e4m3|e5m2)\S*", assembly.get("ptx", "")))),
    }


def case(target: str, operation: str, hidden: int, dtype: str) -> list[dict[str, Any]]:
    """The kernels of one operator."""
    from rmsnorm_ops.inspect.examination import examine, row

    return [
        row(kernel) | {"compilers_occupancy": gcn.occupancy(kernel.assembly) if kernel.target.amd else None}
        for kernel in examine(target, operation, hidden, dtype)
    ]


def specialised_differently(target: str) -> list[str]:
    """Values that one held kernel has to stand for, where Triton's launch would have compiled another."""
    from rmsnorm_ops.inspect.recorded import Launch, bound, record

    gpu, different, seen = TARGETS[target], [], set()

    def changed(recorded: Launch, index: int, value: Any) -> bool:
        arguments = (*recorded.arguments[:index], value, *recorded.arguments[index + 1 :])
        return bound(replace(recorded, arguments=arguments), gpu)[1] != bound(recorded, gpu)[1]

    for operation in operations.OPERATIONS:
        for hidden in (4096, 65536):
            for recorded in record(gpu, lambda o=operation, h=hidden: operations.call(o, h, "bf16")):
                names = recorded.prepared.kernel.arg_names
                for index, argument in enumerate(recorded.arguments):
                    values: tuple[Any, ...] = (0, 1, 17) if type(argument) is int else ()
                    if index == 0:
                        values = (torch.empty(2**31, dtype=argument.dtype, device="meta"),)
                    for value in values:
                        label = f"{recorded.kernel} {names[index]}={value if type(value) is int else 'large'}"
                        if label not in seen and changed(recorded, index, value):
                            different.append(label)
                        seen.add(label)
    return different


if __name__ == "__main__":
    what, requests = sys.argv[1], json.loads(sys.argv[2])
    if what in ("forward", "forward_quant"):
        print(json.dumps([globals()[what](**request) for request in requests]))
    elif what == "cases":
        print(json.dumps([kernel for request in requests for kernel in case(*request)]))
    else:
        print(json.dumps({target: specialised_differently(target) for target in requests}))

"""Kernels compiled as an eager launch has them compiled, and as Inductor does. Run in a process without Triton's interpreter:

    python -m tests.compiled_twice

prints, as JSON, the arithmetic of both.
"""

from __future__ import annotations

import json
import re
import runpy
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from torch import Tensor
from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rmsnorm_ops.inspect.recorded import Launch, compiled
from tests.traces import CASES, SM90, eager

# Of the cases above, those that are compiled twice.
COMPILED = ("add, residual in fp32", "narrow", "one row", "one wide row", "two blocks", "slice", "streamed", "rounded twice")


def as_inductor_compiles(launch: Launch, folder: str) -> str:
    """TTGIR of the kernel as Inductor has it compiled: from one file, and with what it knows of each argument."""
    kernel = launch.prepared.kernel
    source = user_defined_triton_kernel_transitive_closure_source_code(kernel)
    path = Path(folder, f"{kernel.__name__}.py")
    path.write_text(f"import triton\nimport triton.language as tl\n\n\n@triton.jit\n{source}")
    module = SimpleNamespace(**runpy.run_path(str(path)))
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    values = (*launch.arguments, *launch.prepared.constants)
    for index, (parameter, value) in enumerate(zip(kernel.params, values, strict=True)):
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[index,] = value
            continue
        if isinstance(value, Tensor):
            signature[parameter.name] = "*" + {"bfloat16": "bf16", "float32": "fp32"}[str(value.dtype).removeprefix("torch.")]
        else:
            signature[parameter.name] = "fp64" if isinstance(value, float) else "i32"
        if isinstance(value, Tensor) or (type(value) is int and value % 16 == 0):
            attributes[index,] = [["tt.divisibility", 16]]
    made = ASTSource(getattr(module, kernel.__name__), signature, constants, attributes)
    options = {"num_warps": launch.plan.warps, "num_stages": 3, "debug": True, "sanitize_overflow": False}
    return triton.compile(made, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"]


def arithmetic(text: str) -> list[str]:
    """The floating-point operations in order, with the layouts of what they work on, values' names and places apart."""
    aliases = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    found = []
    for line in text.splitlines():
        if re.search(r"= (arith\.(add|sub|mul|div|max|min|ext|trunc)\w*f|math\.\w+)\b|\}\) : \(tensor", line):
            line = re.sub(r"loc\(.*|%\w+(#\d+)?", "", line)
            for alias in sorted(aliases, key=len, reverse=True):
                line = re.sub(rf"{alias}\b(?!\.)", aliases[alias], line)
            found.append(re.sub(r"\s+", " ", line).strip())
    return found


def layouts() -> dict[str, Any]:
    """Of each kernel, the arithmetic of an eager launch's and of Inductor's."""
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in COMPILED:
            for one in eager(CASES[name]):
                pair = compiled(one, SM90).asm["ttgir"], as_inductor_compiles(one, folder)
                result[f"{name}: {one.kernel}"] = [arithmetic(text) for text in pair]
    return result


if __name__ == "__main__":
    print(json.dumps(layouts()))

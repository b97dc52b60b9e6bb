"""``python -m rmsnorm_ops inspect``: what does the compiler make of the kernels on a GPU that need not be there?

In Python, ``examine("gfx942", "forward", hidden=4096, dtype="bf16")`` returns what the command prints, as dataclasses.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rmsnorm_ops.inspect.examination import Examined

NEEDED = {  # package: what brings it
    "triton": "triton is for Linux: pip install triton",
    "rich": "pip install 'rmsnorm_ops[bench]' brings it",
}


def examine(target: str, operation: str, hidden: int = 4096, dtype: str = "bf16") -> tuple[Examined, ...]:
    """Compile the kernels of one call of ``operation`` for ``target`` and read them: one record a kernel, in launch order.

    Imports triton, which must not be in its interpreter's mode (TRITON_INTERPRET=1).
    """
    from rmsnorm_ops.inspect import examination

    return examination.examine(target, operation, hidden, dtype)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, metavar, help_text in (
        ("--target", "GPU", "sm_90, gfx942, … (default: every target known)"),
        ("--op", "OP", "operators (default: forward add_forward backward)"),
        ("--hidden", "N", "row lengths (default: 4096)"),
        ("--dtype", "TYPE", "bf16, fp16, fp32, fp64 (default: bf16)"),
    ):
        parser.add_argument(name, nargs="+", action="extend", metavar=metavar, help=help_text)
    parser.add_argument("--json", metavar="FILE", help="also write versions and everything read to FILE, as one JSON document")
    parser.add_argument("--asm", metavar="DIR", help="also keep each kernel's assembly in DIR, which is made where it is missing")


def run(arguments: argparse.Namespace) -> int:
    """0 where every kernel keeps every promise, 1 where one falls short, 2 where the inspection could not start."""
    try:
        from rmsnorm_ops.inspect import session
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in NEEDED:
            raise
        print(f"inspect needs the package {package}: {NEEDED[package]}", file=sys.stderr)
        return 2
    try:
        return session.inspect(arguments.target, arguments.op, arguments.hidden, arguments.dtype, arguments.json, arguments.asm)
    except session.CannotStart as error:
        print(f"inspect cannot start: {error}", file=sys.stderr)
        return 2

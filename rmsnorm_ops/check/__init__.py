"""``python -m rmsnorm_ops check``: is every implementation of this machine as accurate as the contract says, and how fast?"""

from __future__ import annotations

import argparse
import sys

NEEDED = ("rich", "numpy")  # what the bench extra brings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: the current GPU where there is one, else cpu)")
    parser.add_argument(
        "--case", metavar="TEXT", action="append", help="only the case of that name, or those with TEXT in it (repeatable)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write versions and every result to FILE, as one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """0 where everything is within its bound, 1 where something is not, 2 where the check could not start."""
    try:
        from rmsnorm_ops.check import session
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in NEEDED:
            raise
        print(f"check needs the package {package}: pip install 'rmsnorm_ops[bench]' brings it", file=sys.stderr)
        return 2
    try:
        return session.check(arguments.case, arguments.device, arguments.json)
    except session.CannotStart as error:
        print(f"check cannot start: {error}", file=sys.stderr)
        return 2

"""``python -m rmsnorm_ops check``: is every implementation of this machine as accurate as the contract says, and how fast?"""

from __future__ import annotations

import argparse

from rmsnorm_ops.bench import command

NEEDED = ("rich", "numpy")  # what the bench extra brings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: the current GPU where there is one, else cpu)")
    parser.add_argument(
        "--case", metavar="TEXT", action="append", help="only the case of that name, or those with TEXT in it (repeatable)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write versions and every result to FILE, as one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """0 where everything is within its bound, 1 where something is not, 2 where the check could not start."""

    def start() -> int:
        from rmsnorm_ops.check import session

        return session.check(arguments.case, arguments.device, arguments.json)

    return command.started("check", NEEDED, start)

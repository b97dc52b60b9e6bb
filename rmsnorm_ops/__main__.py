"""The command line: ``python -m rmsnorm_ops check``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rmsnorm_ops import check
from rmsnorm_ops.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; 2 where the arguments make no sense."""
    parser = argparse.ArgumentParser("python -m rmsnorm_ops", description="RMSNorm for PyTorch as registered operators.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    help_text = "compare every implementation of this machine with an exact result, and time it on a GPU"
    command = commands.add_parser("check", help=help_text, description=f"{help_text[0].upper()}{help_text[1:]}.")
    check.add_arguments(command)
    command.set_defaults(run=check.run)
    arguments = parser.parse_args(argv)
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())

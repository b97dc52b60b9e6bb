"""The command line: ``python -m rmsnorm_ops check``, ``bench`` and ``inspect``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rmsnorm_ops import bench, check, inspect
from rmsnorm_ops.version import __version__

COMMANDS = {
    "check": (check, "compare every implementation of this machine with an exact result, and time it on a GPU"),
    "bench": (bench, "time the operators against a copy and against other implementations"),
    "inspect": (inspect, "compile the kernels for GPUs that need not be there, and report what the machine code shows"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; 2 where the arguments make no sense."""
    parser = argparse.ArgumentParser("python -m rmsnorm_ops", description="RMSNorm for PyTorch as registered operators.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())

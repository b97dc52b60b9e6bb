"""``python -m rmsnorm_ops bench``: how fast, against what others have and against a copy? And what check and the tests share
with it: cases as data, the traffic model, the one timer."""

from __future__ import annotations

import argparse

NEEDED = ("rich", "matplotlib")  # what the bench extra brings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    repeatable = (
        (
            "--op",
            "NAME",
            "forward, add_forward, backward, forward+backward, host (default: these), forward_quant[_128], add_forward_quant",
        ),
        ("--case", "TEXT", "the case of that name, or those with TEXT in it (default: those of docs/benchmark.md)"),
        ("--dtype", "NAME", "fp16, bf16, fp32 or fp64 (default: bf16)"),
        ("--provider", "NAME", "rmsnorm_ops, aten, inductor, liger, fla, flash-attn or quack (default: those installed)"),
    )
    for option, metavar, text in repeatable:
        parser.add_argument(option, metavar=metavar, action="append", help=f"only {text}; repeatable")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: the current GPU where there is one, else cpu)")
    parser.add_argument("--json", metavar="FILE", help="also write every measurement to FILE, one JSON object a line")
    parser.add_argument("--plot", metavar="DIR", help="also draw the results into DIR, as SVG and PNG")


def run(arguments: argparse.Namespace) -> int:
    """0; 1 where this library's own answer is wrong or missing; 2 where the benchmark could not start."""
    from rmsnorm_ops.bench import command

    def start() -> int:
        from rmsnorm_ops.bench import session

        return session.bench(arguments)

    return command.started("bench", NEEDED, start)

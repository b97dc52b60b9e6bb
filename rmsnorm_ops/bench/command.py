"""What the commands share before their work starts: what their arguments mean, and one sentence where they mean nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from rmsnorm_ops.bench.cases import Case
from rmsnorm_ops.bench.environment import has_triton


class CannotStart(Exception):
    """The machine or the arguments do not allow what was asked for; the message is one sentence."""


def started(command: str, needed: Sequence[str], start: Callable[[], int]) -> int:
    """The exit status of ``start()``; 2 after one sentence where it cannot start, or where a package of ``needed`` is missing."""
    try:
        return start()
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in needed:
            raise
        print(f"{command} needs the package {package}: pip install 'rmsnorm_ops[bench]' brings it", file=sys.stderr)
    except CannotStart as error:
        print(f"{command} cannot start: {error}", file=sys.stderr)
    return 2


def choose(texts: Sequence[str], cases: Sequence[Case]) -> list[Case]:
    """Those of ``cases`` that ``texts`` name: whole names, or parts of names in either case of letters."""
    names = [case.name for case in cases]
    wanted: set[str] = set()
    for text in texts:
        matches = [text] if text in names else [name for name in names if text.lower() in name.lower()]
        if not matches:
            raise CannotStart(f"no case has {text} in its name; the cases are: {', '.join(names)}")
        wanted.update(matches)
    return [case for case in cases if case.name in wanted]


def one_of(option: str, texts: Sequence[str], names: Sequence[str]) -> list[str]:
    """Those of ``names`` that ``texts`` are, in the order of ``names``."""
    for text in texts:
        if text not in names:
            raise CannotStart(f"{option} must be one of {', '.join(names)}, got {text}")
    return [name for name in names if name in texts]


def device_of(name: str | None) -> torch.device:
    """The device that ``name`` means, with its index; the current GPU, or the CPU without one, where it is None."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise CannotStart(f"--device must be cpu, cuda or cuda:N, got {name}") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        raise CannotStart(f"--device must be cpu or a GPU of this machine, which has {torch.cuda.device_count()}, got {name}")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def refuse_interpreter(device: torch.device) -> None:
    """Triton's interpreter runs on the CPU, and must not stand in for a GPU."""
    if device.type == "cuda" and has_triton():
        from triton import knobs

        if knobs.runtime.interpret:
            raise CannotStart("TRITON_INTERPRET is set, so no kernel would run on the GPU; unset it, or use --device cpu")


def writable(path: str) -> Path:
    """The file to write to, opened once before the work starts: a wrong path must not cost a minute."""
    try:
        with open(path, "a", encoding="utf-8"):
            return Path(path)
    except OSError as error:
        raise CannotStart(f"--json {path} cannot be written: {error.strerror}") from None

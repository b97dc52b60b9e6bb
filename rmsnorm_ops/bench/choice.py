"""What the arguments of a benchmark ask for: operations, cases, dtypes, providers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rmsnorm_ops.bench import traffic
from rmsnorm_ops.bench.cases import CASES, SHORT, SIZES, Case
from rmsnorm_ops.bench.command import CannotStart, choose, device_of, one_of, refuse_interpreter
from rmsnorm_ops.bench.peers import PEERS
from rmsnorm_ops.bench.providers import ATEN, OURS, Provider, inductor
from rmsnorm_ops.bench.timing import one_line

DEFAULT = (*traffic.OPERATIONS, "host")
OPERATIONS = (*DEFAULT, *traffic.QUANTISED)
PROVIDERS = (OURS.name, "aten", "inductor", *(peer.name for peer in PEERS))
DTYPES = {name: dtype for dtype, name in SHORT.items()}


@dataclass(frozen=True)
class Plan:
    """What to run."""

    operations: list[str]
    cases: list[Case]
    dtypes: list[torch.dtype]
    providers: list[Provider]
    device: torch.device
    few_in_forward_alone: bool  # the default: a decoding step is a forward

    def cases_of(self, operation: str) -> list[Case]:
        return [case for case in self.cases if not (case.few and self.few_in_forward_alone and operation != "forward")]


def planned(arguments: Any) -> tuple[Plan, list[str]]:
    """What ``arguments`` ask for, and what to say about it."""
    device = device_of(arguments.device)
    refuse_interpreter(device)
    every = (*CASES, *SIZES)
    cases = [case for case in every if case.benched] if arguments.case is None else choose(arguments.case, every)
    operations = list(DEFAULT) if arguments.op is None else one_of("--op", arguments.op, OPERATIONS)
    dtypes = one_of("--dtype", arguments.dtype or ["bf16"], list(DTYPES))
    providers, notes = chosen_providers(arguments.provider, device)
    few_in_forward_alone = arguments.op is None and arguments.case is None
    return Plan(operations, cases, [DTYPES[name] for name in dtypes], providers, device, few_in_forward_alone), notes


def chosen_providers(names: Sequence[str] | None, device: torch.device) -> tuple[list[Provider], list[str]]:
    """The providers that ``names`` are, or all that there are; and a sentence for each that is there and cannot be imported."""
    wanted = None if names is None else one_of("--provider", names, PROVIDERS)
    found: list[Provider] = [provider for provider in (OURS, ATEN) if wanted is None or provider.name in wanted]
    if "inductor" in (wanted or ()) or (wanted is None and device.type == "cuda"):  # on a CPU it compiles for minutes
        found.append(inductor())
    notes = []
    for peer in PEERS:
        asked = wanted is not None and peer.name in wanted
        if wanted is not None and not asked:
            continue
        if not peer.present:
            if asked:
                raise CannotStart(f"--provider {peer.name} needs the package {peer.package}, which is not installed")
            continue
        try:
            found.append(peer.make(peer))
        except Exception as error:  # what a package raises when it is imported is not ours to know
            sentence = f"{peer.name} is installed and cannot be imported: {one_line(error)}"
            if asked:
                raise CannotStart(f"--provider {sentence}") from None
            notes.append(sentence)
    return found, notes


def folder(path: str) -> Path:
    """The folder to draw into, made before the work starts."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CannotStart(f"--plot {path} cannot be made: {error.strerror}") from None
    from rmsnorm_ops.bench import plots  # noqa: F401  (matplotlib may be missing)

    return Path(path)

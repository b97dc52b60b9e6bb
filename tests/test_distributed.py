"""DTensor, tensor and sequence parallel, and FSDP: two processes on a CPU against one. The checks are in ranks.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tests.ranks_models  # noqa: F401  (more checks)
from tests.processes import environment, run_python
from tests.ranks import CHECKS

WORLD = 2
pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    """Of each rank. The ranks are started once, for starting costs more than all the checks."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ranks", str(rank), str(WORLD), str(folder)],
            env=environment(OMP_NUM_THREADS="1"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(said)
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("name", CHECKS)
def test_two_processes_are_one(name: str, outcomes: list[dict[str, str | None]]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome[name] is None, f"rank {rank}:\n{outcome[name]}"


def test_the_rules_cost_nothing_where_there_are_no_dtensors() -> None:
    """Importing torch.distributed.tensor takes half a second, and must not be this package's doing."""
    code = """
import sys
import torch, rmsnorm_ops
x = torch.ones(2, 8, requires_grad=True)
rmsnorm_ops.rms_norm(x).sum().backward()
print("torch.distributed.tensor" in sys.modules)
"""
    assert run_python(code).strip() == "False"

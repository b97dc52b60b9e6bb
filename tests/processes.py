"""Code that needs a process of its own: what is imported there, or which environment triton was imported under."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import rmsnorm_ops

ROOT = Path(rmsnorm_ops.__file__).parent.parent
HERE = Path(__file__).parent.parent


def environment(**changes: str | None) -> dict[str, str]:
    """This process's environment, with the packages importable and no interpreter unless ``changes`` says so."""
    paths = [str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]
    result = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "TRITON_INTERPRET": "0"}
    for name, value in changes.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = value
    return result


def run_python(code: str, *arguments: str, timeout: float = 300, **changes: str | None) -> str:
    """Run ``code`` in a fresh interpreter and return what it printed; fail with what it said if it failed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment(**changes), capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
